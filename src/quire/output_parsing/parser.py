"""Output parser factory: detects tool format and reasoning tags in a chat template, builds a parser per sequence.

Detection searches the template for strings and renders nothing. Does not depend on single formats.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from quire.output_parsing.events import EventEmitter, OutputEvent, OutputParser, PlainText, Schemas
from quire.output_parsing.reader import Reading, StreamReader
from quire.output_parsing.reasoning import MISTRAL_THINK, THINK, ReasoningSplitter, ReasoningTags
from quire.output_parsing.tool_formats import (
    GENERIC,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    PYTHONIC,
    QWEN_CODER,
    ToolFormat,
)

_TOOLS = re.compile(r"\btools\b")

# The first format wins whose strings are all in the template. A template may hold another format's strings too
# (Qwen3-Coder's has the tags of Hermes), so the order matters.
_TEMPLATE_STRINGS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<function=", "<parameter="), QWEN_CODER),
    (("<tool_call>",), HERMES),
    (("<|python_start|>",), PYTHONIC),
    (("<function_calls>",), PYTHONIC),
    (("[func_name1(",), PYTHONIC),
    (("<|python_tag|>",), LLAMA),
    (('"parameters": dictionary',), LLAMA),
)


@dataclass(frozen=True, slots=True)
class DetectedFormat:
    """How a model writes tool calls and reasoning. No tool format: none is known for the template; use GENERIC."""

    tools: ToolFormat | None = None
    reasoning: ReasoningTags | None = None


def detect(template: str | None) -> DetectedFormat:
    if not template:
        return DetectedFormat()
    tags = next((tags for tags in (MISTRAL_THINK, THINK) if tags.end in template), None)
    return DetectedFormat(_tool_format(template), tags)


def _tool_format(template: str) -> ToolFormat | None:
    if not _TOOLS.search(template):
        return None
    for strings, tool_format in _TEMPLATE_STRINGS:
        if all(string in template for string in strings):
            return tool_format
    return None


class ToolCallParser:
    """Runs the parsing generator of one tool format over streamed text."""

    __slots__ = ("_emitter", "_reader", "_reading")

    def __init__(self, read: Callable[[StreamReader, EventEmitter], Reading[None]], schemas: Schemas) -> None:
        self._reader = StreamReader()
        self._emitter = EventEmitter(schemas)
        self._reading = read(self._reader, self._emitter)

    def push(self, text: str) -> list[OutputEvent]:
        self._reader.feed(text)
        next(self._reading, None)
        return self._emitter.drain()

    def finish(self) -> list[OutputEvent]:
        self._reader.end()
        next(self._reading, None)
        assert self._reader.at_end, "a parser reads all text"
        return self._emitter.finish()


class PlainParser:
    """Everything is text."""

    __slots__ = ()

    def push(self, text: str) -> list[OutputEvent]:
        return [PlainText(text)] if text else []

    def finish(self) -> list[OutputEvent]:
        return []


def make_parser(
    detected: DetectedFormat,
    *,
    tools: bool,
    reasoning: bool,
    starts_in_reasoning: bool = False,
    schemas: Schemas | None = None,
) -> OutputParser:
    """A parser for one sequence.

    `tools` and `reasoning`: whether to look for calls and reasoning. `starts_in_reasoning`: the prompt ends inside
    reasoning (`ReasoningTags.is_open_after`). `schemas`: JSON schema of the arguments by function name.
    """
    parser: OutputParser = ToolCallParser((detected.tools or GENERIC).read, schemas or {}) if tools else PlainParser()
    if reasoning and detected.reasoning is not None:
        return ReasoningSplitter(detected.reasoning, parser, starts_in_reasoning=starts_in_reasoning)
    return parser

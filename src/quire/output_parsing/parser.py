"""Puts a parser together from a manner of speaking. Knows nothing of the single formats.

From a chat template, in which manner its model writes calls and thoughts. Looks for strings and renders nothing.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from quire.output_parsing.emitter import EventEmitter, Schemas
from quire.output_parsing.events import OutputParser, PlainText, SpeechEvent
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

# The first format all of whose strings are in the template. A template may speak of what another format uses too
# (Qwen3-Coder's has the tags of Hermes), so the order matters.
_SIGNS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
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
    """How a model speaks. Without a tool format, the template has no words for tools that we can read: use GENERIC."""

    tools: ToolFormat | None = None
    reasoning: ReasoningTags | None = None


def detect(template: str | None) -> DetectedFormat:
    if not template:
        return DetectedFormat()
    return DetectedFormat(_tool_format(template), _reasoning_tags(template))


def _tool_format(template: str) -> ToolFormat | None:
    if not _TOOLS.search(template):
        return None
    for signs, tool_format in _SIGNS:
        if all(sign in template for sign in signs):
            return tool_format
    return None


def _reasoning_tags(template: str) -> ReasoningTags | None:
    for tags in (MISTRAL_THINK, THINK):
        if tags.end in template:
            return tags
    return None


class ToolCallParser:
    """Runs the reader of one tool format over text as it comes."""

    __slots__ = ("_reading", "_tape", "_voice")

    def __init__(self, read: Callable[[StreamReader, EventEmitter], Reading[None]], schemas: Schemas) -> None:
        self._tape = StreamReader()
        self._voice = EventEmitter(schemas)
        self._reading = read(self._tape, self._voice)

    def push(self, text: str) -> list[SpeechEvent]:
        self._tape.feed(text)
        next(self._reading, None)
        return self._voice.drain()

    def finish(self) -> list[SpeechEvent]:
        self._tape.end()
        next(self._reading, None)
        assert self._tape.is_dry, "a reader leaves nothing behind"
        return self._voice.finish()


class PlainParser:
    """All of it is text."""

    __slots__ = ()

    def push(self, text: str) -> list[SpeechEvent]:
        return [PlainText(text)] if text else []

    def finish(self) -> list[SpeechEvent]:
        return []


def make_parser(
    manner: DetectedFormat,
    *,
    tools: bool,
    reasoning: bool,
    forced_thought: bool = False,
    schemas: Schemas | None = None,
) -> OutputParser:
    """A parser for one continuation.

    `tools` and `reasoning` say whether to look for calls and thoughts; `forced_thought`, that the prompt ends inside a
    thought (`ReasoningTags.is_open_after`); `schemas`, what the functions' arguments may be, by name.
    """
    answer: OutputParser = ToolCallParser((manner.tools or GENERIC).read, schemas or {}) if tools else PlainParser()
    if reasoning and manner.reasoning is not None:
        return ReasoningSplitter(manner.reasoning, answer, forced=forced_thought)
    return answer

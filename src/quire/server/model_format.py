"""How the served model speaks of thoughts and tools: the seam between requests and `speech/`. Knows no HTTP.

A voice is found once, from the model's chat template and tokenizer. For each request it says what the template is told,
what a continuation may say, and what a continuation said.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.sampling import Grammar
from quire.output_parsing.events import OutputEvent, OutputParser, ToolArguments, ToolStart
from quire.output_parsing.grammars import response_grammar, strict_grammar, tool_grammar
from quire.output_parsing.parser import DetectedFormat, detect, make_parser
from quire.output_parsing.reasoning import ReasoningTags
from quire.output_parsing.template_messages import (
    Tool,
    tool_instructions,
    tools_as_text,
    with_parsed_arguments,
    with_short_ids,
)
from quire.output_parsing.tool_formats import GENERIC, ToolFormat
from quire.text.chat_template import plain_messages
from quire.text.tokenizer import Tokenizer

Message = Mapping[str, object]
DeclaredTool = Mapping[str, object]  # as OpenAI's clients send it, checked


class ToolChoice(NamedTuple):
    """Whether a tool must be called ("required"), may be ("auto") or not ("none"), or which one ("named")."""

    mode: str = "auto"
    name: str | None = None


class TemplateInput(NamedTuple):
    """What the chat template is given."""

    messages: Sequence[Message]
    tools: Sequence[DeclaredTool]


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """A model's manner, and the ids of those of its markers that are special tokens."""

    manner: DetectedFormat = DetectedFormat()  # noqa: RUF009  frozen
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def tool_format(self) -> ToolFormat:
        return self.manner.tools or GENERIC

    @property
    def description(self) -> str:
        tags = self.manner.reasoning
        return f"tools: {self.tool_format.name} · reasoning: {'none' if tags is None else tags.name}"

    def told(self, messages: Sequence[Message], tools: Sequence[DeclaredTool]) -> TemplateInput:
        """A template without words for tools gets calls and results as text, and the tools as instructions."""
        normal: list[dict[str, object]] = [with_parsed_arguments(message) for message in messages]
        if self.tool_format.needs_instructions:
            written = tools_as_text(plain_messages(normal))
            return TemplateInput(_instructed(written, tool_instructions(_read(tools))) if tools else written, ())
        if self.tool_format.has_short_ids:
            normal = [with_short_ids(message) for message in normal]
        return TemplateInput(normal, tools)

    def parser(self, *, tools: Sequence[DeclaredTool], parallel: bool, prompt: str) -> OutputParser:
        """For one continuation of this prompt, which may end in the middle of a thought and may call these tools."""
        tags = self.manner.reasoning
        parser = make_parser(
            self.manner,
            tools=bool(tools),
            reasoning=tags is not None,
            starts_in_reasoning=tags is not None and tags.is_open_after(prompt),
            schemas={tool.name: tool.parameters for tool in _read(tools)},
        )
        return parser if parallel or not tools else SingleCallParser(parser)

    def keeps_special_tokens(self, *, tools: bool) -> bool:
        """Whether the parser needs to see special tokens, which are usually left out of a text."""
        tags = self.manner.reasoning
        markers = (*(self.tool_format.markers if tools else ()), *((tags.start, tags.end) if tags else ()))
        return any(marker in self.special_tokens for marker in markers)

    def call_grammar(
        self, tools: Sequence[DeclaredTool], choice: ToolChoice, *, parallel: bool, prompt: str
    ) -> Grammar:
        """What a continuation that must call a tool may say. The tool that was named is called once."""
        tags = self.manner.reasoning
        return tool_grammar(
            self.tool_format,
            _read(tools),
            choice.name,
            parallel and choice.name is None,
            special_tokens=self.special_tokens,
            open_reasoning=tags if tags is not None and tags.is_open_after(prompt) else None,
        )

    def answer_grammar(
        self, asked: Grammar | None, tools: Sequence[DeclaredTool], *, parallel: bool, prompt: str
    ) -> Grammar | None:
        """What a continuation that may call tools may say: all, but for calls of strict tools, unless more is asked."""
        if asked is None:
            return strict_grammar(self.tool_format, _read(tools), parallel, special_tokens=self.special_tokens)
        return response_grammar(
            asked,
            self.tool_format,
            _read(tools),
            parallel,
            special_tokens=self.special_tokens,
            tags=self.manner.reasoning,
            prompt=prompt,
        )


class SingleCallParser:
    """Passes on one call and no more: the client wants no parallel ones."""

    __slots__ = ("_parser",)

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[OutputEvent]:
        return _without_later_calls(self._parser.push(text))

    def finish(self) -> list[OutputEvent]:
        return _without_later_calls(self._parser.finish())


def find_voice(
    template: str | None,
    tokenizer: Tokenizer | None,
    tool_format: ToolFormat | None = None,
    reasoning_tags: ReasoningTags | None = None,
) -> ModelFormat:
    """The manner that the template shows, unless an operator knows better."""
    found = detect(template)
    manner = DetectedFormat(tool_format or found.tools, reasoning_tags or found.reasoning)
    tags = manner.reasoning
    markers = ((manner.tools or GENERIC).markers, () if tags is None else (tags.start, tags.end))
    return ModelFormat(manner, {} if tokenizer is None else _special_ids([*markers[0], *markers[1]], tokenizer))


def _special_ids(markers: Sequence[str], tokenizer: Tokenizer) -> dict[str, int]:
    ids = {marker: tokenizer.token_to_id(marker) for marker in markers}
    return {marker: number for marker, number in ids.items() if number is not None and number in tokenizer.special_ids}


def _without_later_calls(events: list[OutputEvent]) -> list[OutputEvent]:
    return [event for event in events if not isinstance(event, ToolStart | ToolArguments) or event.index == 0]


def _instructed(messages: list[dict[str, object]], instructions: str) -> list[dict[str, object]]:
    """Instructions stand at the end of the system message; without one, they are it."""
    first = messages[0] if messages else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": instructions}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *messages[1:]]


def _read(tools: Sequence[DeclaredTool]) -> list[Tool]:
    return [_tool(tool) for tool in tools]


def _tool(declared: DeclaredTool) -> Tool:
    function = declared["function"]
    assert isinstance(function, Mapping), "the dialogue checks tools"
    description = function.get("description")
    return Tool(
        name=str(function["name"]),
        description=description if isinstance(description, str) else "",
        parameters=function.get("parameters") or {},
        strict=function.get("strict") is True,
    )

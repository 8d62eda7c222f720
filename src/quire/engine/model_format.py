"""Model format: the served model's tool-call format and reasoning tags, applied to requests. Does not depend on HTTP.

Detected once, from the model's chat template and tokenizer. Per request it gives the input of the chat template, the
grammar of the output, and the parser of the output.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from urllib.parse import quote

from quire.core.errors import InvalidGrammar, InvalidParameter, shown
from quire.core.sampling import Grammar
from quire.grammar import limits
from quire.grammar.relaxed_schema import relax_schema
from quire.output_parsing.events import OutputEvent, OutputParser, ToolArguments, ToolStart
from quire.output_parsing.grammars import arguments_schema, response_grammar, strict_grammar, tool_grammar
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
DeclaredTool = Mapping[str, object]  # in OpenAI's shape, validated by `check_tools`

MAX_TOOLS = 1024
_RELAXED_BYTES = 2 * limits.LARK_BYTES  # of the schemas of all tools: half of them may be what cannot be enforced
_MODES = ("none", "auto", "required")


class ToolChoice(NamedTuple):
    """Whether a tool must be called ("required"), may be ("auto") or not ("none"), or which one ("named")."""

    mode: str = "auto"
    name: str | None = None


class OutputGrammar(NamedTuple):
    """The grammar of an output, and the keywords of tools that it does not enforce."""

    grammar: Grammar | None
    not_enforced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """The detected format, and the ids of its markers that are special tokens."""

    detected: DetectedFormat = DetectedFormat()  # noqa: RUF009  frozen
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def tool_format(self) -> ToolFormat:
        return self.detected.tools or GENERIC

    @property
    def description(self) -> str:
        tags = self.detected.reasoning
        return f"tools: {self.tool_format.name} · reasoning: {'none' if tags is None else tags.name}"

    def template_messages(self, messages: Sequence[Message], tools: Sequence[DeclaredTool]) -> Sequence[Message]:
        """The messages for the template. Without tool support in it, calls, results and tools become text."""
        normal: list[dict[str, object]] = [with_parsed_arguments(message) for message in messages]
        if self.tool_format.needs_instructions:
            rewritten = tools_as_text(plain_messages(normal))
            return _add_instructions(rewritten, tool_instructions(_tools(tools))) if tools else rewritten
        return [with_short_ids(message) for message in normal] if self.tool_format.has_short_ids else normal

    def template_tools(self, tools: Sequence[DeclaredTool]) -> Sequence[DeclaredTool]:
        """The tools for the template; none if they are in the messages."""
        return () if self.tool_format.needs_instructions else tools

    def parser(self, *, tools: Sequence[DeclaredTool], parallel: bool, prompt: str) -> OutputParser:
        """A parser for one sequence after this prompt, which may end inside reasoning."""
        tags = self.detected.reasoning
        parser = make_parser(
            self.detected,
            tools=bool(tools),
            reasoning=tags is not None,
            starts_in_reasoning=tags is not None and tags.is_open_after(prompt),
            schemas={tool.name: tool.parameters for tool in _tools(tools)},
        )
        return parser if parallel or not tools else SingleCallParser(parser)

    def keeps_special_tokens(self, *, tools: bool) -> bool:
        """Whether the parser needs special tokens in the text, which detokenization omits by default."""
        tags = self.detected.reasoning
        markers = (*(self.tool_format.markers if tools else ()), *((tags.start, tags.end) if tags else ()))
        return any(marker in self.special_tokens for marker in markers)

    def call_grammar(
        self, tools: Sequence[DeclaredTool], choice: ToolChoice, *, parallel: bool, prompt: str
    ) -> OutputGrammar:
        """The grammar of required tool calls. A named tool is called once."""
        tags = self.detected.reasoning
        enforceable = _enforceable([tool for tool in _tools(tools) if choice.name in (None, tool.name)])
        grammar = tool_grammar(
            self.tool_format,
            enforceable.tools,
            choice.name,
            parallel and choice.name is None,
            special_tokens=self.special_tokens,
            open_reasoning=tags if tags is not None and tags.is_open_after(prompt) else None,
        )
        return OutputGrammar(grammar, enforceable.not_enforced)

    def answer_grammar(
        self, requested: Grammar | None, tools: Sequence[DeclaredTool], *, parallel: bool, prompt: str
    ) -> OutputGrammar:
        """The grammar of an output that may call tools: free but for strict tools, or as requested."""
        if requested is None:
            free = strict_grammar(self.tool_format, _tools(tools), parallel, special_tokens=self.special_tokens)
            return OutputGrammar(free)
        enforceable = _enforceable(_tools(tools))
        grammar = response_grammar(
            requested,
            self.tool_format,
            enforceable.tools,
            parallel,
            special_tokens=self.special_tokens,
            tags=self.detected.reasoning,
            prompt=prompt,
        )
        return OutputGrammar(grammar, enforceable.not_enforced)


class SingleCallParser:
    """Drops all tool calls but the first, for parallel_tool_calls: false."""

    __slots__ = ("_parser",)

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[OutputEvent]:
        return _without_later_calls(self._parser.push(text))

    def finish(self) -> list[OutputEvent]:
        return _without_later_calls(self._parser.finish())


def find_model_format(
    template: str | None,
    tokenizer: Tokenizer | None,
    tool_format: ToolFormat | None = None,
    reasoning_tags: ReasoningTags | None = None,
) -> ModelFormat:
    """The format detected in the template, unless set by options."""
    detected = detect(template)
    detected = DetectedFormat(tool_format or detected.tools, reasoning_tags or detected.reasoning)
    if tokenizer is None:
        return ModelFormat(detected)
    tags = detected.reasoning
    markers = (*(detected.tools or GENERIC).markers, *(() if tags is None else (tags.start, tags.end)))
    ids = {marker: tokenizer.token_to_id(marker) for marker in markers}
    special = {each: number for each, number in ids.items() if number is not None and number in tokenizer.special_ids}
    return ModelFormat(detected, special)


def _without_later_calls(events: list[OutputEvent]) -> list[OutputEvent]:
    return [event for event in events if not isinstance(event, ToolStart | ToolArguments) or event.index == 0]


def _add_instructions(messages: list[dict[str, object]], instructions: str) -> list[dict[str, object]]:
    """Appends instructions to the system message, or adds one."""
    first = messages[0] if messages else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": instructions}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *messages[1:]]


def _tools(tools: Sequence[DeclaredTool]) -> list[Tool]:
    return [_tool(tool) for tool in tools]


def _tool(declared: DeclaredTool) -> Tool:
    function = declared["function"]
    assert isinstance(function, Mapping), "validated by check_tools"
    description = function.get("description")
    return Tool(
        name=str(function["name"]),
        description=description if isinstance(description, str) else "",
        parameters=function.get("parameters") or {},
        strict=function.get("strict") is True,
    )


class _EnforceableTools(NamedTuple):
    tools: list[Tool]
    not_enforced: tuple[str, ...]


def _enforceable(tools: Sequence[Tool]) -> _EnforceableTools:
    """The tools with schemas of which all is enforced. Those of strict tools are unchanged: they may be refused."""
    _check_size(tools)
    enforceable, not_enforced = [], []
    for tool in tools:
        if not tool.strict:
            try:
                relaxed = relax_schema(arguments_schema(tool))
            except InvalidGrammar as error:
                error.param = "tools"
                raise
            tool = replace(tool, parameters=relaxed.schema)
            not_enforced += [f"tools.{quote(tool.name)}{where}" for where in relaxed.not_enforced]
        enforceable.append(tool)
    return _EnforceableTools(enforceable, tuple(not_enforced))


def _check_size(tools: Sequence[Tool]) -> None:
    """Refuse what cannot become a grammar before any schema is looked at, which takes time for each."""
    if len(tools) > limits.LARK_SCHEMAS:
        raise InvalidGrammar(
            f"There are {len(tools)} tools whose calls would be constrained; the limit is {limits.LARK_SCHEMAS}.",
            param="tools",
        )
    num_bytes = sum(len(json.dumps(tool.parameters)) for tool in tools)
    if num_bytes > _RELAXED_BYTES:
        raise InvalidGrammar(
            f"The schemas of the {len(tools)} tools whose calls would be constrained take {num_bytes} bytes; the limit "
            f"is {limits.LARK_BYTES}, after what cannot be enforced is left out. Shorten their descriptions.",
            param="tools",
        )


def check_tools(
    tools: Sequence[DeclaredTool] | None, *, mode: str | None = None, name: str | None = None
) -> ToolChoice:
    """Validates tools and tool_choice. Unset means "auto"."""
    if tools is not None and len(tools) > MAX_TOOLS:
        raise InvalidParameter(f"There are {len(tools)} tools; the limit is {MAX_TOOLS}.", param="tools")
    names = [tool_name(tool, place) for place, tool in enumerate(tools or [])]
    if name is not None:
        if name not in names:
            raise InvalidParameter(f"tool_choice names {shown(name)}, which is not among tools.", param="tool_choice")
        return ToolChoice("named", name)
    if mode is None:
        return ToolChoice()
    if mode not in _MODES:
        raise InvalidParameter(
            f"tool_choice is {shown(mode)}; it may be 'none', 'auto', 'required' or name one function.",
            param="tool_choice",
        )
    if mode == "required" and not names:
        raise InvalidParameter("tool_choice requires a call, but there are no tools.", param="tool_choice")
    return ToolChoice(mode)


def tool_name(tool: Mapping[str, object], place: int) -> str:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        function = {}
    shape = '{"type": "function", "function": {"name": …}}'
    name, parameters = function.get("name"), function.get("parameters")
    return check_function(name, parameters, f"tools[{place}]", shape, "function.parameters")


def check_function(name: object, parameters: object, where: str, shape: str, schema_field: str) -> str:
    """Validates a declared function and returns its name. `shape` and `schema_field` are the API's, for errors."""
    if not isinstance(name, str) or not name:
        raise InvalidParameter(f"{where} must be {shape}.", param=where)
    if not isinstance(parameters, Mapping | None):
        schema = f"{where}.{schema_field}"
        raise InvalidParameter(f"{schema} must be a JSON schema: an object, not {shown(parameters)}.", param=schema)
    return name

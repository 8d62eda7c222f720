"""A conversation that a chat-like surface wants continued: messages, tools, and what the chat template is told.

Every surface brings its own shape to this one. Knows no sampling and no answers.

Shortens a conversation that is too long for the context, by whole turns, the oldest first. Sends nothing.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from quire.core.errors import ContextLengthExceeded, InvalidParameter, InvalidPrompt, shown
from quire.core.sampling import Grammar
from quire.output_parsing.events import OutputParser
from quire.server.context import ServedModel
from quire.server.model_format import Message, ToolChoice
from quire.server.request.schema import ChatBody, Json
from quire.text.chat_template import plain_messages, render

MAX_TOOLS = 1024
_MODES = ("none", "auto", "required")


class RenderedPrompt(NamedTuple):
    """A conversation as the model reads it."""

    text: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What is to be continued."""

    messages: list[dict[str, object]]
    tools: list[dict[str, object]] = field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice()  # noqa: RUF009  a NamedTuple never changes
    parallel_tool_calls: bool = True
    template_variables: Mapping[str, object] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def rendered(self, served: ServedModel) -> RenderedPrompt:
        """Through the model's own template. Takes its time: not for an event loop."""
        tokenizer = served.text()
        served.check_least(sum(map(_num_parts, self.messages)))
        template = served.chat_template or ""
        known = [_for_template(each, f"messages[{place}]", template) for place, each in enumerate(self.messages)]
        told = served.voice.told(known, self.callable_tools)
        text = render(
            served.chat_template,
            told.messages,
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
            tools=told.tools or None,
            named_tokens=tokenizer.named_tokens,
            extra=self.template_variables,
        )
        return RenderedPrompt(text, tokenizer.encode_chat(served.readable(text)))

    @property
    def callable_tools(self) -> list[dict[str, object]]:
        return [] if self.tool_choice.mode == "none" else self.tools

    def parser(self, served: ServedModel, prompt: str) -> OutputParser:
        """For one continuation."""
        tools, parallel = self.callable_tools, self.parallel_tool_calls
        return served.voice.parser(tools=tools, parallel=parallel, prompt=prompt)

    def grammar(self, served: ServedModel, asked: Grammar | None, prompt: str) -> Grammar | None:
        """What a continuation may say: a call where one must come, else what the client asked for."""
        voice, tools, parallel = served.voice, self.callable_tools, self.parallel_tool_calls
        if not tools or self.tool_choice.mode == "auto":
            return voice.answer_grammar(asked, tools, parallel=parallel, prompt=prompt)
        if asked is not None:
            raise InvalidParameter(
                "A tool must be called, so there is no answer that could be held to a form; ask for one of the two.",
                param="tool_choice",
            )
        return voice.call_grammar(tools, self.tool_choice, parallel=parallel, prompt=prompt)


def dialogue_of(body: ChatBody) -> ChatPrompt:
    """What a chat wants continued."""
    if body.chat_template is not None:
        raise InvalidParameter(
            "chat_template is not taken from requests: the server runs the model's own. Use chat_template_kwargs.",
            param="chat_template",
        )
    if body.documents:
        raise InvalidParameter("documents are not served here; put their text into the messages.", param="documents")
    tools, mode, named = _chosen(body)
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        variables.setdefault("enable_thinking", body.reasoning_effort != "none")
    return ChatPrompt(
        messages=body.messages,
        tools=tools,
        tool_choice=check_tools(tools, mode, named),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_variables=variables,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )


class _AllowedTools(NamedTuple):
    """The tools that may be called, and whether one must be, or which one."""

    tools: list[dict[str, Json]]
    mode: str | None = None
    name: str | None = None


def _chosen(body: ChatBody) -> _AllowedTools:
    tools, choice = body.tools or [], body.tool_choice
    if choice is None or isinstance(choice, str):
        return _AllowedTools(tools, choice)
    if choice.type == "function" and choice.function is not None:
        return _AllowedTools(tools, name=choice.function.name)
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        allowed = choice.allowed_tools
        return _AllowedTools(only_tools(tools, (tool.function.name for tool in allowed.tools)), allowed.mode)
    raise InvalidParameter(
        "tool_choice may be 'none', 'auto', 'required', "
        '{"type": "function", "function": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}.',
        param="tool_choice",
    )


def _num_parts(message: Mapping[str, object]) -> int:
    """A message takes a token at least, and so does each part of one."""
    content = message.get("content")
    return max(1, len(content)) if isinstance(content, list) else 1


def check_tools(tools: list[dict[str, object]] | None, mode: str | None, name: str | None) -> ToolChoice:
    """The choice among these tools. Nothing said means "auto"."""
    if tools is not None and len(tools) > MAX_TOOLS:
        raise InvalidParameter(f"There are {len(tools)} tools; the most is {MAX_TOOLS}.", param="tools")
    names = [_tool_name(tool, place) for place, tool in enumerate(tools or [])]
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


def only_tools(tools: list[dict[str, object]], allowed: Iterable[str]) -> list[dict[str, object]]:
    """Those of the tools that may be called."""
    wanted = set(allowed)
    names = [_tool_name(tool, place) for place, tool in enumerate(tools)]
    if missing := wanted.difference(names):
        unknown = shown(min(missing))
        raise InvalidParameter(f"tool_choice allows {unknown}, which is not among tools.", param="tool_choice")
    return [tool for name, tool in zip(names, tools, strict=True) if name in wanted]


def check_function(name: object, parameters: object, where: str, shape: str, schema_field: str) -> str:
    """The name of a function, which a surface declares in this shape, with the parameters' schema in this field."""
    if not isinstance(name, str) or not name:
        raise InvalidParameter(f"{where} must be {shape}.", param=where)
    if not isinstance(parameters, Mapping | None):
        spot = f"{where}.{schema_field}"
        raise InvalidParameter(f"{spot} must be a JSON schema: an object, not {shown(parameters)}.", param=spot)
    return name


def _tool_name(tool: Mapping[str, object], place: int) -> str:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        function = {}
    shape = '{"type": "function", "function": {"name": …}}'
    name, parameters = function.get("name"), function.get("parameters")
    return check_function(name, parameters, f"tools[{place}]", shape, "function.parameters")


def _for_template(message: Message, where: str, template: str) -> Message:
    """As templates know messages: older roles, one name for thoughts, a refusal as the text that it is."""
    told = dict(message)
    if told.get("role") == "developer" and "developer" not in template:
        told["role"] = "system"
    if "reasoning" in told and not told.get("reasoning_content"):
        told["reasoning_content"] = told["reasoning"]
    if told.get("role") == "assistant":
        if told.get("content") is None and isinstance(told.get("refusal"), str):
            told["content"] = told["refusal"]
        content = told.get("content")
        if isinstance(content, list):
            told["content"] = [_as_text(part) for part in content]
    _check_calls(told.get("tool_calls"), f"{where}.tool_calls")
    return told


def _as_text(part: object) -> object:
    if isinstance(part, Mapping) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part


def _check_calls(calls: object, where: str) -> None:
    """A template would write anything else into the prompt, whatever it looks like."""
    if calls is None:
        return
    if not isinstance(calls, list):
        raise InvalidPrompt(f"{where} must be a list of calls, not {shown(calls)}.", param=where)
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, Mapping) else (0, 0)
        if not isinstance(name, str) or not isinstance(arguments, str | Mapping | None):
            spot = f"{where}[{place}]"
            raise InvalidPrompt(
                f'{spot} must be {{"id": …, "type": "function", "function": {{"name": …, "arguments": "…"}}}}, with '
                f"arguments as a text of JSON, not {shown(call)}.",
                param=spot,
            )


def final_text(dialogue: ChatPrompt) -> str:
    """The text of a last message that the assistant has begun, or nothing."""
    last = dialogue.messages[-1] if dialogue.messages else {}
    if last.get("role") != "assistant":
        return ""
    [plain] = plain_messages([last])
    return str(plain["content"] or "")


_ROOM_SHARE = 8  # of the context, an eighth is left for an answer of which no length was said


def fitted(dialogue: ChatPrompt, served: ServedModel, max_tokens: int | None) -> ChatPrompt:
    """With as many turns as leave room for the answer; instructions stay. The last turn stays whatever its length."""
    room = max_tokens or served.max_model_len // _ROOM_SHARE
    messages = dialogue.messages
    num_kept = 1 if messages and messages[0].get("role") in ("system", "developer") else 0
    turns = [place for place, message in enumerate(messages) if message.get("role") == "user" and place > num_kept]
    starts = [num_kept, *turns]

    def shorter(start: int) -> ChatPrompt:
        return replace(dialogue, messages=messages[:num_kept] + messages[start:])

    def fits(start: int) -> bool:
        try:
            return len(shorter(start).rendered(served).ids) + room <= served.max_model_len
        except ContextLengthExceeded:
            return False

    return shorter(starts[min(bisect_left(starts, True, key=fits), len(starts) - 1)])

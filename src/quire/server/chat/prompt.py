"""Chat prompt: messages, tools and template variables of a chat request, rendered by the model's chat template.

All chat APIs convert their bodies to `ChatBody`, and that to a `ChatPrompt`. Also drops the oldest turns of a
conversation that does not fit the context. Does not depend on sampling or responses.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from quire.core.errors import ContextLengthExceeded, InvalidParameter, InvalidPrompt, shown
from quire.core.sampling import Grammar
from quire.engine.model_format import Message, OutputGrammar, ToolChoice, check_tools, tool_name
from quire.server.context import ServedModel
from quire.server.request.decode import check_json_texts
from quire.server.request.schema import ChatBody, Json
from quire.text.chat_template import plain_messages, render

_OUTPUT_SHARE = 8  # an eighth of the context is reserved for the output if max_tokens is unset


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to continue."""

    messages: list[dict[str, object]]
    tools: list[dict[str, object]] = field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice()  # noqa: RUF009  a NamedTuple never changes
    parallel_tool_calls: bool = True
    template_variables: Mapping[str, object] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def callable_tools(self) -> list[dict[str, object]]:
        return [] if self.tool_choice.mode == "none" else self.tools

    def render(self, model: ServedModel) -> str:
        """The text of the prompt, by the model's template. Slow: call it on a thread."""
        tokenizer = model.text()
        model.check_length(sum(map(_min_tokens, self.messages)))
        template = model.chat_template or ""
        messages = [_normalize(each, f"messages[{place}]", template) for place, each in enumerate(self.messages)]
        check_json_texts(list(_argument_texts(messages)), "The arguments of the calls in messages have")
        text = render(
            model.chat_template,
            model.model_format.template_messages(messages, self.callable_tools),
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
            tools=model.model_format.template_tools(self.callable_tools) or None,
            named_tokens=tokenizer.named_tokens,
            extra=self.template_variables,
        )
        return model.checked_text(text)

    @property
    def forces_call(self) -> bool:
        """Whether the output is a tool call: a format for answers does not apply then."""
        return bool(self.callable_tools) and self.tool_choice.mode != "auto"

    def grammar(self, model: ServedModel, requested: Grammar | None, text: str) -> OutputGrammar:
        """The grammar of the output after the rendered `text`: a tool call if one is required, else the client's."""
        model_format, tools, parallel = model.model_format, self.callable_tools, self.parallel_tool_calls
        if self.forces_call:
            return model_format.call_grammar(tools, self.tool_choice, parallel=parallel, prompt=text)
        return model_format.answer_grammar(requested, tools, parallel=parallel, prompt=text)

    @property
    def final_assistant_text(self) -> str:
        """The text of the last message if it is the assistant's, else empty."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant":
            return ""
        [plain] = plain_messages([_normalize(last, "messages", "")])
        return str(plain["content"] or "")


def chat_prompt(body: ChatBody) -> ChatPrompt:
    """The prompt of a chat body."""
    if body.chat_template is not None:
        raise InvalidParameter(
            "chat_template is not taken from requests: the server runs the model's own. Use chat_template_kwargs.",
            param="chat_template",
        )
    if body.documents:
        raise InvalidParameter("documents are not served here; put their text into the messages.", param="documents")
    tools, choice = _tools_and_choice(body)
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        variables.setdefault("enable_thinking", body.reasoning_effort != "none")
    return ChatPrompt(
        messages=body.messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_variables=variables,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )


def _tools_and_choice(body: ChatBody) -> tuple[list[dict[str, Json]], ToolChoice]:
    """The tools that may be called, and the choice among them."""
    tools, choice = body.tools or [], body.tool_choice
    if choice is None or isinstance(choice, str):
        return tools, check_tools(tools, mode=choice)
    if choice.type == "function" and choice.function is not None:
        return tools, check_tools(tools, name=choice.function.name)
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        tools = _allowed_tools(tools, (tool.function.name for tool in choice.allowed_tools.tools))
        return tools, check_tools(tools, mode=choice.allowed_tools.mode)
    raise InvalidParameter(
        "tool_choice may be 'none', 'auto', 'required', "
        '{"type": "function", "function": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}.',
        param="tool_choice",
    )


def _allowed_tools(tools: list[dict[str, object]], allowed: Iterable[str]) -> list[dict[str, object]]:
    allowed_names = set(allowed)
    names = [tool_name(tool, place) for place, tool in enumerate(tools)]
    if missing := allowed_names.difference(names):
        unknown = shown(min(missing))
        raise InvalidParameter(f"tool_choice allows {unknown}, which is not among tools.", param="tool_choice")
    return [tool for name, tool in zip(names, tools, strict=True) if name in allowed_names]


def _min_tokens(message: Mapping[str, object]) -> int:
    """A message takes at least one token, and so does each part of it."""
    content = message.get("content")
    return max(1, len(content)) if isinstance(content, list) else 1


def _normalize(message: Message, where: str, template: str) -> Message:
    """The message in the terms of templates: older roles, one name for reasoning, refusals as text."""
    normal = dict(message)
    if normal.get("role") == "developer" and "developer" not in template:
        normal["role"] = "system"
    if "reasoning" in normal and not normal.get("reasoning_content"):
        normal["reasoning_content"] = normal["reasoning"]
    if normal.get("role") == "assistant":
        if normal.get("content") is None and isinstance(normal.get("refusal"), str):
            normal["content"] = normal["refusal"]
        content = normal.get("content")
        if isinstance(content, list):
            normal["content"] = [_refusal_as_text(part) for part in content]
    _check_calls(normal.get("tool_calls"), f"{where}.tool_calls")
    return normal


def _refusal_as_text(part: object) -> object:
    if isinstance(part, Mapping) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part


def _check_calls(calls: object, where: str) -> None:
    """A template would write invalid calls into the prompt unchecked."""
    if calls is None:
        return
    if not isinstance(calls, list):
        raise InvalidPrompt(f"{where} must be a list of calls, not {shown(calls)}.", param=where)
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, Mapping) else (0, 0)
        if not isinstance(name, str) or not isinstance(arguments, str | Mapping | None):
            param = f"{where}[{place}]"
            raise InvalidPrompt(
                f'{param} must be {{"id": …, "type": "function", "function": {{"name": …, "arguments": "…"}}}}, with '
                f"arguments as a text of JSON, not {shown(call)}.",
                param=param,
            )


def _argument_texts(messages: Iterable[Message]) -> Iterator[str]:
    """The arguments of valid calls that are texts: they are decoded for the template."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(arguments := call["function"].get("arguments"), str):
                yield arguments


def drop_oldest_turns(prompt: ChatPrompt, model: ServedModel, max_tokens: int | None) -> ChatPrompt:
    """The prompt with as many of the latest turns as leave space for the output. Instructions and last turn stay."""
    num_output = max_tokens or model.max_model_len // _OUTPUT_SHARE
    messages = prompt.messages
    num_kept = 1 if messages and messages[0].get("role") in ("system", "developer") else 0
    turns = [place for place, message in enumerate(messages) if message.get("role") == "user" and place > num_kept]
    starts = [num_kept, *turns]

    def from_turn(start: int) -> ChatPrompt:
        return replace(prompt, messages=messages[:num_kept] + messages[start:])

    def fits(start: int) -> bool:
        try:
            ids = model.prompt_ids(from_turn(start).render(model), add_special_tokens=False)
        except ContextLengthExceeded:
            return False
        return len(ids) + num_output <= model.max_model_len

    return from_turn(starts[min(bisect_left(starts, True, key=fits), len(starts) - 1)])

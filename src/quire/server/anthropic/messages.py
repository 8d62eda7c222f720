"""POST /v1/messages and /v1/messages/count_tokens, for Anthropic's clients.

The bodies of POST /v1/messages and /v1/messages/count_tokens.

What a client of /v1/messages asks for, as a chat. Knows Anthropic's blocks, and what its clients put in them.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec
from msgspec import UNSET, Struct
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidParameter, InvalidPrompt, shown
from quire.server.anthropic.messages_output import MessagesResponse
from quire.server.chat.messages import MessageBuilder
from quire.server.chat.prompt import check_function, dialogue_of
from quire.server.chat.session import ChatDelta, ChatStream
from quire.server.context import ServedModel, ServerState
from quire.server.http.errors import called
from quire.server.http.request_context import context_of
from quire.server.http.sse import Events, json_response, stream, unless_gone, worked
from quire.server.request.decode import read
from quire.server.request.params import chat_wanted
from quire.server.request.schema import (
    CarriedBody,
    ChatBody,
    ChosenTools,
    Count,
    FunctionName,
    Json,
    NamedSchema,
    Refused,
    ResponseFormat,
    carried,
)

Block = dict[str, Json]


class AnthropicMessage(Struct, kw_only=True):
    """Who said what: a text, or blocks of it."""

    role: str
    content: str | list[Block]


class AnthropicTool(Struct, kw_only=True):
    """A tool of the client's. Those that Anthropic runs have a type of their own and no schema."""

    name: str | None = None
    description: str | None = None
    input_schema: Json = None
    type: str | None = None


class AnthropicToolChoice(Struct, kw_only=True):
    """Whether tools may (auto), must (any), must not (none) be called, or which one (tool)."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    """Whether the model is to think first."""

    type: str


class OutputFormat(Struct, kw_only=True):
    """The schema of an answer."""

    type: str
    schema: Json = None


class OutputConfig(Struct, kw_only=True):
    """How hard to try, and in which shape to answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensBody(CarriedBody, kw_only=True):
    """A conversation as Anthropic's clients tell it."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "response_format": "use output_config.format",
        "output_format": "use output_config.format",
    }

    messages: list[AnthropicMessage]
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    response_format: Refused = None
    output_format: Refused = None


class MessagesBody(CountTokensBody, kw_only=True):
    """One that is to go on."""

    max_tokens: Count
    stop_sequences: list[str] | None = None


NAMES = {
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
}
_OWN = (None, "custom")  # the types of tools that a client runs itself
_BILLING = "x-anthropic-billing-header"  # begins a block that Claude Code changes from session to session
_MODES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


def as_chat(body: CountTokensBody) -> ChatBody:
    """The same question to /v1/chat/completions. A last message of the assistant is gone on with."""
    conversation = _conversation(body)
    choice = body.tool_choice
    config = body.output_config
    said = carried(body)
    if isinstance(body, MessagesBody) and body.stop_sequences is not None:
        if body.stop is not None:
            raise InvalidParameter("stop and stop_sequences mean the same; give one of them.", param="stop")
        said["stop"] = body.stop_sequences
    said["chat_template_kwargs"] = {"enable_thinking": _thinks(body), **(body.chat_template_kwargs or {})}
    return ChatBody(
        **said,
        messages=conversation.messages(),
        tools=[_tool(tool, place) for place, tool in enumerate(body.tools or []) if tool.type in _OWN] or None,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        continue_final_message=conversation.begun,
        reasoning_effort=None if config is None else config.effort,
        response_format=_response_format(None if config is None else config.format),
        max_tokens=body.max_tokens if isinstance(body, MessagesBody) else UNSET,
    )


def _thinks(body: CountTokensBody) -> bool:
    """Anthropic's models think where they are told to."""
    if body.thinking is None:
        return False
    kind = body.thinking.type
    if kind not in _THINKING:
        raise InvalidParameter(
            f"thinking.type is {shown(kind)}; it may be one of {', '.join(_THINKING)}.", param="thinking.type"
        )
    return _THINKING[kind]


def _tool(tool: AnthropicTool, place: int) -> dict[str, Json]:
    shape = '{"name": …, "input_schema": {…}}'
    name = check_function(tool.name, tool.input_schema, f"tools[{place}]", shape, "input_schema")
    function: dict[str, Json] = {"name": name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _tool_choice(body: CountTokensBody) -> str | ChosenTools | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool" and choice.name is not None:
        return ChosenTools(function=FunctionName(name=choice.name))
    if choice.type not in _MODES:
        raise InvalidParameter(
            f"tool_choice.type is {shown(choice.type)}; it may be 'auto', 'any', 'none', or 'tool' with a name.",
            param="tool_choice",
        )
    return _MODES[choice.type]


def _response_format(wanted: OutputFormat | None) -> ResponseFormat | None:
    if wanted is None:
        return None
    return ResponseFormat(type=wanted.type, json_schema=NamedSchema(schema=wanted.schema))


def _conversation(body: CountTokensBody) -> MessageBuilder:
    conversation = MessageBuilder()
    if system := _system(body.system):
        conversation.say("system", system)
    for place, message in enumerate(body.messages):
        _tell(message, f"messages[{place}]", conversation)
    if not body.messages:
        raise InvalidPrompt("messages is empty: there is nothing to answer.", param="messages")
    return conversation


def _system(system: str | Sequence[Block] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [_text(block, f"system[{place}]") for place, block in enumerate(system)]
    if texts and texts[0].startswith(_BILLING):
        del texts[0]
    return "\n".join(texts)


def _tell(message: AnthropicMessage, where: str, conversation: MessageBuilder) -> None:
    role, content = message.role, message.content
    if role not in ("user", "assistant", "system"):
        raise _refused(f"{where}.role is {shown(role)}; it may be 'user' or 'assistant'", where)
    if isinstance(content, str):
        conversation.say(role, content)
        return
    if not content:
        raise _refused(f"{where}.content is empty", where)
    texts: list[str] = []
    for place, block in enumerate(content):
        spot = f"{where}.content[{place}]"
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            _flush(role, texts, conversation)
            conversation.result(_word(block, "tool_use_id", spot), _result(block.get("content"), f"{spot}.content"))
        elif kind == "tool_use" and role == "assistant":
            arguments = msgspec.json.encode(block.get("input") or {}).decode()
            _flush(role, texts, conversation)
            conversation.call(_word(block, "id", spot), _word(block, "name", spot), arguments)
        elif kind == "thinking" and role == "assistant":
            conversation.think(_word(block, "thinking", spot))
        elif kind != "redacted_thinking":
            texts.append(_text(block, spot))
    _flush(role, texts, conversation)


def _flush(role: str, texts: list[str], conversation: MessageBuilder) -> None:
    """Texts side by side are one."""
    if texts:
        conversation.say(role, "\n".join(texts))
        texts.clear()


def _result(content: Json, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _refused(f"{where} must be a text or a list of blocks, not {shown(content)}", where)
    return "\n".join(_text(block, f"{where}[{place}]") for place, block in enumerate(content))


def _text(block: Json, where: str) -> str:
    text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
    if not isinstance(text, str):
        raise _refused(f"{where} must be a block of text, not {shown(block)}: this model reads text only", where)
    return text


def _word(block: Block, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _refused(f"{where}.{name} must be a text, not {shown(value)}", where)
    return value


def _refused(why: str, where: str) -> InvalidPrompt:
    return InvalidPrompt(f"{why}.", param=where)


async def messages(desk: ServerState, request: Request) -> Response:
    body = await read(request, MessagesBody)
    served = desk.served
    served.check_model(body.model)
    with called(NAMES if body.stop is not None else {**NAMES, "stop": "stop_sequences"}):
        served.check_least(len(body.messages))
        chat = await worked(request, as_chat, body)
        wanted = chat_wanted(chat, served)
        exchange = await ChatStream.begin(desk.service, served, dialogue_of(chat), wanted, clamp=True)
        answer = MessagesResponse(served.name, len(exchange.prompt_ids), context_of(request.scope).request_id)
        if wanted.stream:
            events = _events(exchange, answer)
            return await stream(request, events, exchange.leave, desk.keep_alive_s, answer.failed)
        answered = await unless_gone(request, exchange.whole(), exchange.leave)
    return json_response(answer.whole(answered))


async def count_tokens(desk: ServerState, request: Request) -> Response:
    body = await read(request, CountTokensBody)
    served = desk.served
    served.check_model(body.model)
    served.check_least(len(body.messages))
    return json_response({"input_tokens": await run_in_threadpool(_num_tokens, body, served)})


async def _events(exchange: ChatStream, answer: MessagesResponse) -> Events:
    while isinstance(news := await exchange.hear(), ChatDelta):
        if told := answer.events(news):
            yield told
    yield answer.ending(news)


def _num_tokens(body: CountTokensBody, served: ServedModel) -> int:
    return len(dialogue_of(as_chat(body)).rendered(served).ids)

"""Messages API: POST /v1/messages and /v1/messages/count_tokens, their bodies, and the conversion to chat bodies."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec
from msgspec import UNSET, Struct
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidParameter, InvalidPrompt, shown
from quire.engine.model_format import check_function
from quire.server.anthropic.messages_output import MessagesResponse, PromptUsage
from quire.server.chat.messages import MessageBuilder, refused_part, text_field
from quire.server.chat.prompt import chat_prompt
from quire.server.chat.session import ChatDelta, ChatStream, start_chat
from quire.server.context import ServedModel, ServerState
from quire.server.http.errors import rename_error_params
from quire.server.http.request_context import context_of
from quire.server.http.sse import Events, json_response, run_inline_if_short, stream, until_disconnect
from quire.server.request.decode import read
from quire.server.request.params import chat_generation
from quire.server.request.schema import (
    ChatBody,
    ChosenTools,
    Count,
    FunctionName,
    Json,
    NamedSchema,
    Refused,
    ResponseFormat,
    SharedBody,
    shared_fields,
)

Block = dict[str, Json]


class AnthropicMessage(Struct, kw_only=True):
    """A message: text, or content blocks."""

    role: str
    content: str | list[Block]


class AnthropicTool(Struct, kw_only=True):
    """A tool of the client. Server tools of Anthropic have a type and no schema."""

    name: str | None = None
    description: str | None = None
    input_schema: Json = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Json = None


class AnthropicToolChoice(Struct, kw_only=True):
    """Whether tools may (auto), must (any), must not (none) be called, or which one (tool)."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    """Whether the model reasons first."""

    type: str


class OutputFormat(Struct, kw_only=True):
    """The JSON schema of the answer."""

    type: str
    schema: Json = None


class OutputConfig(Struct, kw_only=True):
    """Reasoning effort and answer format."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensBody(SharedBody, kw_only=True):
    """A conversation in Anthropic's shape."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "response_format": "use output_config.format",
        "output_format": "use output_config.format",
    }

    messages: list[AnthropicMessage]
    chat_template_kwargs: dict[str, Json] | None = None
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Json = None
    response_format: Refused = None
    output_format: Refused = None


class MessagesBody(CountTokensBody, kw_only=True):
    """A conversation to continue."""

    max_tokens: Count
    stop_sequences: list[str] | None = None


PARAM_NAMES = {
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
}
_CLIENT_TOOL_TYPES = (None, "custom")
_BILLING = "x-anthropic-billing-header"  # starts a block that Claude Code changes per session: it defeats caching
_MODES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


def as_chat(body: CountTokensBody) -> ChatBody:
    """The equivalent body of /v1/chat/completions. A last message of the assistant is continued."""
    builder = _build_messages(body)
    choice = body.tool_choice
    config = body.output_config
    fields = shared_fields(body)
    if isinstance(body, MessagesBody) and body.stop_sequences is not None:
        if body.stop is not None:
            raise InvalidParameter("stop and stop_sequences mean the same; give one of them.", param="stop")
        fields["stop"] = body.stop_sequences
    fields["chat_template_kwargs"] = {"enable_thinking": _enable_thinking(body), **(body.chat_template_kwargs or {})}
    return ChatBody(
        **fields,
        messages=builder.messages(),
        tools=[_tool(tool, place) for place, tool in enumerate(body.tools or []) if tool.type in _CLIENT_TOOL_TYPES]
        or None,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        continue_final_message=builder.ends_with_assistant_text,
        reasoning_effort=None if config is None else config.effort,
        response_format=_response_format(None if config is None else config.format),
        max_tokens=body.max_tokens if isinstance(body, MessagesBody) else UNSET,
    )


def _enable_thinking(body: CountTokensBody) -> bool:
    """Thinking is off by default, as in Anthropic's API."""
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
    if tool.strict:
        function["strict"] = True
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


def _response_format(output_format: OutputFormat | None) -> ResponseFormat | None:
    if output_format is None:
        return None
    return ResponseFormat(type=output_format.type, json_schema=NamedSchema(schema=output_format.schema))


def _build_messages(body: CountTokensBody) -> MessageBuilder:
    builder = MessageBuilder()
    if system := _system(body.system):
        builder.add_text("system", system)
    for place, message in enumerate(body.messages):
        _add_message(message, f"messages[{place}]", builder)
    if not body.messages:
        raise InvalidPrompt("messages is empty: there is nothing to answer.", param="messages")
    return builder


def _system(system: str | Sequence[Block] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [_text(block, f"system[{place}]") for place, block in enumerate(system)]
    if texts and texts[0].startswith(_BILLING):
        del texts[0]
    return "\n".join(texts)


def _add_message(message: AnthropicMessage, where: str, builder: MessageBuilder) -> None:
    role, content = message.role, message.content
    if role not in ("user", "assistant", "system"):
        raise refused_part(f"{where}.role is {shown(role)}; it may be 'user' or 'assistant'", where)
    if isinstance(content, str):
        builder.add_text(role, content)
        return
    if not content:
        raise refused_part(f"{where}.content is empty", where)
    texts: list[str] = []
    for place, block in enumerate(content):
        param = f"{where}.content[{place}]"
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            _flush(role, texts, builder)
            text = _result(block.get("content"), f"{param}.content")
            builder.add_result(text_field(block, "tool_use_id", param), text)
        elif kind == "tool_use" and role == "assistant":
            arguments = msgspec.json.encode(block.get("input") or {}).decode()
            _flush(role, texts, builder)
            builder.add_call(text_field(block, "id", param), text_field(block, "name", param), arguments)
        elif kind == "thinking" and role == "assistant":
            builder.add_reasoning(text_field(block, "thinking", param))
        elif kind != "redacted_thinking":
            texts.append(_text(block, param))
    _flush(role, texts, builder)


def _flush(role: str, texts: list[str], builder: MessageBuilder) -> None:
    """Joins adjacent text blocks into one text."""
    if texts:
        builder.add_text(role, "\n".join(texts))
        texts.clear()


def _result(content: Json, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise refused_part(f"{where} must be a text or a list of blocks, not {shown(content)}", where)
    return "\n".join(_text(block, f"{where}[{place}]") for place, block in enumerate(content))


def _text(block: Json, where: str) -> str:
    text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
    if not isinstance(text, str):
        raise refused_part(f"{where} must be a block of text, not {shown(block)}: this model reads text only", where)
    return text


async def messages(state: ServerState, request: Request) -> Response:
    body = await read(request, MessagesBody)
    model = state.model
    model.check_model(body.model)
    with rename_error_params(PARAM_NAMES if body.stop is not None else {**PARAM_NAMES, "stop": "stop_sequences"}):
        model.check_length(len(body.messages))
        chat_body = await run_inline_if_short(request, as_chat, body)
        generation, prompt = chat_generation(chat_body, model), chat_prompt(chat_body)
        chat = await start_chat(state.engine, model, prompt, generation, clamp=True)
        info = state.engine.info
        usage = PromptUsage(chat, caches=_marks_cache(body) and info is not None and info.caches_prefixes)
        response = MessagesResponse(model.name, usage, context_of(request.scope).request_id)
        if generation.stream:
            events = _events(chat, response)
            return await stream(request, events, chat.close, state.keep_alive_s, response.failed)
        result = await until_disconnect(request, chat.result(), chat.close)
    return json_response(response.whole(result))


def _marks_cache(body: MessagesBody) -> bool:
    """Whether any part of the request is marked to be cached. The cache needs no marks: they only change usage."""
    if body.cache_control is not None or any(tool.cache_control is not None for tool in body.tools or ()):
        return True
    contents = [body.system, *(message.content for message in body.messages)]
    blocks = (block for content in contents if isinstance(content, list) for block in content)
    return any(block.get("cache_control") is not None for block in blocks)


async def count_tokens(state: ServerState, request: Request) -> Response:
    body = await read(request, CountTokensBody)
    model = state.model
    model.check_model(body.model)
    model.check_length(len(body.messages))
    return json_response({"input_tokens": await model.text_threads.run(_num_tokens, body, model)})


async def _events(chat: ChatStream, response: MessagesResponse) -> Events:
    while isinstance(update := await chat.receive(), ChatDelta):
        if events := response.events(update):
            yield events
    yield response.last_events(update)


def _num_tokens(body: CountTokensBody, model: ServedModel) -> int:
    return len(model.text().encode_chat(chat_prompt(as_chat(body)).render(model)))

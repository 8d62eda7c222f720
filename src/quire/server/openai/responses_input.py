"""Responses API input: the request body, its conversion to a chat body, and its items as they are stored.

A conversation is the items of stored responses, if the request continues one, and then the request's own.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import msgspec
from msgspec import UNSET, Struct

from quire.core.errors import InvalidParameter, InvalidPrompt, shown
from quire.engine.model_format import check_function
from quire.server.chat.messages import MessageBuilder, refused_part, text_field
from quire.server.request.schema import (
    ChatBody,
    ChosenTools,
    Count,
    FunctionName,
    Json,
    NamedSchema,
    NumLogprobs,
    Refused,
    ResponseFormat,
    SharedBody,
    shared_fields,
)
from quire.server.response_store import StoredItem


class TextFormat(Struct, kw_only=True):
    """The format of the text: free, JSON, or JSON by a schema."""

    type: str
    name: str | None = None
    schema: Json = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, kw_only=True):
    """Options of the text output."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Struct, kw_only=True):
    """Reasoning effort, and the summary to return."""

    effort: str | None = None
    summary: str | None = None


class ResponsesBody(SharedBody, kw_only=True):
    """A request for a response to a text or a list of items."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "response_format": "use text.format",
        "max_tokens": "use max_output_tokens",
        "max_completion_tokens": "use max_output_tokens",
    }

    input: str | list[dict[str, Json]] | None = None
    instructions: str | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    tools: list[dict[str, Json]] | None = None
    tool_choice: str | dict[str, Json] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    reasoning: Reasoning | None = None
    truncation: str | None = None
    include: Json = None
    top_logprobs: NumLogprobs | None = None
    metadata: dict[str, Json] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    previous_response_id: str | None = None
    conversation: Json = None
    prompt: Json = None
    background: bool | None = None
    store: bool | None = None
    response_format: Refused = None
    max_tokens: Refused = None
    max_completion_tokens: Refused = None


PARAM_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
_SHAPE = '{"type": "function", "name": …, "parameters": {…}}'
_NOT_SERVED = {"conversation": "use previous_response_id", "prompt": "send its text as instructions and input"}
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_LOGPROBS = "message.output_text.logprobs"
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "reasoning_text": "text", "summary_text": "text",
          "refusal": "refusal"}  # fmt: skip


FindItem = Callable[[str], StoredItem | None]


def as_chat(body: ResponsesBody, earlier: Sequence[StoredItem], find: FindItem) -> ChatBody:
    """The equivalent body of /v1/chat/completions. `earlier`: the conversation that it continues. `find`: a stored
    item by its id."""
    for name, instead in _NOT_SERVED.items():
        if getattr(body, name):
            raise InvalidParameter(f"{name} is not served here; {instead}.", param=name)
    if body.background and body.store is False:
        raise InvalidParameter(
            "store must not be false with background: true, whose response is stored, to be polled with "
            "GET /v1/responses/{id}.",
            param="store",
        )
    if body.truncation not in (None, "auto", "disabled"):
        raise InvalidParameter(
            f"truncation is {shown(body.truncation)}; it may be 'auto' or 'disabled'.", param="truncation"
        )
    return ChatBody(
        **shared_fields(body),
        chat_template_kwargs=body.chat_template_kwargs,
        messages=_messages(body, earlier, find),
        tools=[{"type": "function", "function": _function(tool)} for tool in kept_tools(body)] or None,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        max_tokens=UNSET if body.max_output_tokens is None else body.max_output_tokens,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        response_format=_response_format(None if body.text is None else body.text.format),
        logprobs=asks_for_logprobs(body),
        top_logprobs=body.top_logprobs if asks_for_logprobs(body) else None,
    )


def asks_for_logprobs(body: ResponsesBody) -> bool:
    """Whether the text is to have log-probabilities."""
    return bool(body.top_logprobs) or (isinstance(body.include, list) and _LOGPROBS in body.include)


def kept_tools(body: ResponsesBody) -> list[dict[str, Json]]:
    """The function tools. Tools of other types run at OpenAI; they are ignored."""
    functions = []
    for place, tool in enumerate(body.tools or []):
        if tool.get("type") == "function":
            check_function(tool.get("name"), tool.get("parameters"), f"tools[{place}]", _SHAPE, "parameters")
            functions.append(tool)
    choice = body.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return functions
    entries = choice.get("tools")
    allowed = [tool for tool in entries if isinstance(tool, dict)] if isinstance(entries, list) else []
    names = {
        name
        for tool in allowed
        if tool.get("type", "function") == "function" and isinstance(name := tool.get("name"), str)
    }
    if missing := names.difference(tool["name"] for tool in functions):
        unknown = shown(min(missing))
        raise InvalidParameter(f"tool_choice allows {unknown}, which is not among tools.", param="tool_choice")
    return [tool for tool in functions if tool["name"] in names]


def _function(tool: Mapping[str, Json]) -> dict[str, Json]:
    """The function in the shape of chat completions."""
    named = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {**named, "strict": True} if tool.get("strict") is True else named


def _tool_choice(body: ResponsesBody) -> str | ChosenTools | None:
    choice = body.tool_choice
    if not isinstance(choice, dict):
        return choice
    kind, name, mode = choice.get("type"), choice.get("name"), choice.get("mode")
    if kind == "function" and isinstance(name, str):
        return ChosenTools(function=FunctionName(name=name))
    if kind == "allowed_tools" and isinstance(mode, str):
        return mode
    if isinstance(kind, str) and kind not in ("function", "allowed_tools"):
        return None  # a tool of another type, which is ignored
    raise InvalidParameter(
        f"tool_choice is {shown(choice)}; it may be 'none', 'auto', 'required', "
        f'{{"type": "function", "name": …}} or {{"type": "allowed_tools", "mode": …, "tools": […]}}.',
        param="tool_choice",
    )


def _response_format(text_format: TextFormat | None) -> ResponseFormat | None:
    if text_format is None:
        return None
    name, schema = text_format.name, text_format.schema
    if text_format.type == "json_schema":
        return ResponseFormat(
            type="json_schema", json_schema=NamedSchema(name=name, schema=schema, strict=text_format.strict)
        )
    return ResponseFormat(type=text_format.type, schema=schema)


def _messages(body: ResponsesBody, earlier: Sequence[StoredItem], find: FindItem) -> list[dict[str, Json]]:
    builder = MessageBuilder()
    if body.instructions:
        builder.add_text("system", body.instructions)
    for stored in earlier:
        _add_item(msgspec.json.decode(stored.json), "previous_response_id", builder, find)
    if isinstance(body.input, str):
        builder.add_text("user", body.input)
    for place, item in enumerate(_own_items(body)):
        _add_item(item, f"input[{place}]", builder, find)
    messages = builder.messages()
    if not messages:
        raise InvalidPrompt("input is empty: there is nothing to answer.", param="input")
    return messages


def _own_items(body: ResponsesBody) -> list[dict[str, Json]]:
    return body.input if isinstance(body.input, list) else []


def _add_item(item: Mapping[str, Json], where: str, builder: MessageBuilder, find: FindItem) -> None:
    kind = item.get("type") or "message"
    match kind:
        case "message":
            role = item.get("role")
            if role not in _ROLES:
                raise refused_part(f"{where}.role is {shown(role)}; it may be one of {', '.join(_ROLES)}", where)
            builder.add_text(role, _text(item.get("content"), f"{where}.content"))
        case "function_call":
            name, arguments = text_field(item, "name", where), text_field(item, "arguments", where)
            builder.add_call(text_field(item, "call_id", where), name, arguments)
        case "function_call_output":
            builder.add_result(text_field(item, "call_id", where), _text(item.get("output"), f"{where}.output"))
        case "reasoning":
            if reasoning := _text(item.get("content") or item.get("summary") or "", f"{where}.content"):
                builder.add_reasoning(reasoning)
        case "item_reference":
            _add_item(msgspec.json.decode(_referenced(item, where, find).json), where, builder, find)
        case _:
            raise refused_part(
                f"{where}.type is {shown(kind)}; served here are message, function_call, function_call_output, "
                f"reasoning and item_reference",
                where,
            )


def _referenced(item: Mapping[str, Json], where: str, find: FindItem) -> StoredItem:
    item_id = text_field(item, "id", where)
    found = find(item_id)
    if found is None:
        raise refused_part(
            f"{where} refers to {shown(item_id)}, which is not a stored output item; send the item itself", where
        )
    return found


def stored_items(body: ResponsesBody, find: FindItem) -> tuple[StoredItem, ...]:
    """The request's own items in the shape of the API, each with an id. Their conversion must have succeeded."""
    if isinstance(body.input, str):
        return (_stored({"role": "user", "content": body.input}),)
    return tuple(
        _referenced(item, "input", find) if item.get("type") == "item_reference" else _stored(item)
        for item in _own_items(body)
    )


def _stored(item: Mapping[str, Json]) -> StoredItem:
    kind = str(item.get("type") or "message")
    given, content = item.get("id"), item.get("content")
    item_id = given if isinstance(given, str) and given else f"{_ID_PREFIXES[kind]}_{uuid.uuid4().hex}"
    whole: dict[str, Json] = {**item, "id": item_id, "type": kind, "status": item.get("status") or "completed"}
    if kind == "message" and isinstance(content, str):
        own = item.get("role") == "assistant"
        part: dict[str, Json] = {"type": "output_text" if own else "input_text", "text": content}
        whole["content"] = [{**part, "annotations": []} if own else part]
    return StoredItem(item_id, msgspec.json.encode(whole))


def _text(content: Json, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused_part(f"{where} must be a text or a list of parts, not {shown(content)}", where)
    return "\n".join(_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _part(part: Json, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
    if not isinstance(text, str):
        raise refused_part(f"{where} must hold text, not {shown(part)}: this model reads text only", where)
    return text

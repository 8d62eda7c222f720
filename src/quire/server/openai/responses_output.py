"""Responses API output: the JSON body, and the stream events. Does not depend on HTTP.

Events are numbered from 0. An item keeps its id from its first event to the final response.
"""

import time
import uuid

from quire.engine.outputs import RequestOutput
from quire.server.chat.items import (
    ItemClosed,
    ItemDelta,
    ItemEvent,
    ItemOpened,
    OutputItem,
    OutputItemKind,
    OutputItems,
)
from quire.server.chat.session import ChatDelta, ChatResult
from quire.server.http.errors import error_body
from quire.server.http.sse import client_error, named_event
from quire.server.openai.responses_input import ResponsesBody, kept_tools
from quire.server.request.params import GenerationRequest

Body = dict[str, object]

_ID_PREFIXES = {OutputItemKind.REASONING: "rs", OutputItemKind.TEXT: "msg", OutputItemKind.TOOL_CALL: "fc"}
_DELTA_EVENTS = {
    OutputItemKind.REASONING: "response.reasoning_text",
    OutputItemKind.TEXT: "response.output_text",
    OutputItemKind.TOOL_CALL: "response.function_call_arguments",
}


class ResponsesResponse:
    """The JSON of one response."""

    def __init__(self, model: str, body: ResponsesBody, generation: GenerationRequest) -> None:
        self._items = OutputItems()
        self._truncated = False
        self._num_events = 0
        self._head: Body = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time())}
        self._echo: Body = {"model": model, **_echo(body, generation)}

    def whole(self, result: ChatResult, num_reasoning_tokens: int) -> Body:
        self._items.add(result.choices[0].events)
        self._finish(result.output.outputs[0].finish_reason)
        return self._finished(result.output, num_reasoning_tokens)

    def events(self, chat_delta: ChatDelta) -> bytes:
        """The events of one delta; the first ones open the response."""
        events = []
        if not self._num_events:
            response = self._response("in_progress", [])
            events = [self._event(kind, response=response) for kind in ("response.created", "response.in_progress")]
        item_events = self._items.add(chat_delta.events)
        if chat_delta.delta.finish_reason is not None:
            item_events += self._finish(chat_delta.delta.finish_reason)
        for item_event in item_events:
            events += self._item_events(item_event)
        return b"".join(events)

    def last_event(self, output: RequestOutput, num_reasoning_tokens: int) -> bytes:
        kind = "response.incomplete" if self._truncated else "response.completed"
        return self._event(kind, response=self._finished(output, num_reasoning_tokens))

    def failed(self, error: Exception) -> bytes:
        """The event of a failure after the first byte. Before the response is opened, it is an `error` event."""
        reported = client_error(error)
        details = error_body(reported)["error"]
        assert isinstance(details, dict)
        if not self._num_events:
            return self._event("error", code=details["code"], message=details["message"], param=details["param"])
        codes = {429: "rate_limit_exceeded"}
        code = codes.get(reported.status, "server_error" if reported.status >= 500 else "invalid_prompt")
        items = [_item(item, "incomplete") for item in self._items.items]
        failure = {"code": code, "message": details["message"]}
        return self._event("response.failed", response=self._response("failed", items, error=failure))

    def _finish(self, finish_reason: str | None) -> list[ItemEvent]:
        self._truncated = finish_reason == "length"
        return self._items.finish(truncated=self._truncated)

    def _finished(self, output: RequestOutput, num_reasoning_tokens: int) -> Body:
        items = [_item(item, _final_status(item)) for item in self._items.items]
        usage = _usage(output, num_reasoning_tokens)
        if self._truncated:
            details = {"reason": "max_output_tokens"}
            return self._response("incomplete", items, incomplete_details=details, usage=usage)
        return self._response("completed", items, usage=usage, completed_at=int(time.time()))

    def _response(self, status: str, items: list[Body], **fields: object) -> Body:
        outcome = {"error": None, "incomplete_details": None, "usage": None, "completed_at": None, **fields}
        return {**self._head, "status": status, "output": items, **outcome, **self._echo}

    def _item_events(self, item_event: ItemEvent) -> list[bytes]:
        item = item_event.item
        is_call = item.kind is OutputItemKind.TOOL_CALL
        place: Body = {"item_id": _id(item), "output_index": item.index, **({} if is_call else {"content_index": 0})}
        logprobs: Body = {"logprobs": []} if item.kind is OutputItemKind.TEXT else {}
        match item_event:
            case ItemOpened():
                empty: Body = {"arguments": ""} if is_call else {"content": []}
                events = [self._item_event("added", item, {**_item(item, "in_progress"), **empty})]
                if not is_call:
                    events.append(self._event("response.content_part.added", **place, part=_part(item.kind, "")))
                return events
            case ItemDelta(_, text):
                return [self._event(f"{_DELTA_EVENTS[item.kind]}.delta", **place, delta=text, **logprobs)]
            case ItemClosed():
                done = f"{_DELTA_EVENTS[item.kind]}.done"
                if is_call:
                    events = [self._event(done, **place, name=item.name, arguments=item.text)]
                else:
                    part = _part(item.kind, item.text)
                    events = [
                        self._event(done, **place, text=item.text, **logprobs),
                        self._event("response.content_part.done", **place, part=part),
                    ]
                return [*events, self._item_event("done", item, _item(item, _final_status(item)))]

    def _item_event(self, name: str, item: OutputItem, body: Body) -> bytes:
        return self._event(f"response.output_item.{name}", output_index=item.index, item=body)

    def _event(self, kind: str, **fields: object) -> bytes:
        body = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return named_event(kind, body)


def _id(item: OutputItem) -> str:
    return f"{_ID_PREFIXES[item.kind]}_{item.key}"


def _final_status(item: OutputItem) -> str:
    return "incomplete" if item.truncated else "completed"


def _item(item: OutputItem, status: str) -> Body:
    match item.kind:
        case OutputItemKind.TOOL_CALL:
            call_id = f"call_{item.key[:24]}"
            body: Body = {"type": "function_call", "call_id": call_id, "name": item.name, "arguments": item.text}
        case OutputItemKind.TEXT:
            body = {"type": "message", "role": "assistant", "content": [_part(item.kind, item.text)]}
        case OutputItemKind.REASONING:
            content = [_part(item.kind, item.text)]
            body = {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
    return {"id": _id(item), **body, "status": status}


def _part(kind: OutputItemKind, text: str) -> Body:
    if kind is OutputItemKind.TEXT:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def _usage(output: RequestOutput, num_reasoning_tokens: int) -> Body:
    num_prompt, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": output.metrics.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": num_prompt + num_output,
    }


def _echo(body: ResponsesBody, generation: GenerationRequest) -> Body:
    """The request fields that a response repeats."""
    text, reasoning, params = body.text, body.reasoning, generation.params
    shape = None if text is None else text.format
    named = ("name", "schema", "description", "strict") if shape is not None and shape.type == "json_schema" else ()
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "top_logprobs": 0,
        "text": {
            "format": {
                "type": "text" if shape is None else shape.type,
                **{name: getattr(shape, name) for name in named},
            },
            **({} if text is None or text.verbosity is None else {"verbosity": text.verbosity}),
        },
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "tools": [
            {"type": "function", **{name: tool.get(name) for name in ("name", "description", "parameters", "strict")}}
            for tool in kept_tools(body)
        ],
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "truncation": body.truncation or "disabled",
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
        "user": body.user,
        "service_tier": "default",
        "store": False,
        "background": False,
        "previous_response_id": None,
    }

"""Writes the answers of /v1/responses: whole, and event by event. Knows pieces and outputs, no HTTP.

Every event has the next number, and an item keeps its id from its first event to the final response.
"""

import time
import uuid

from quire.engine.outputs import RequestOutput
from quire.server.chat.items import ItemClosed, ItemDelta, ItemOpened, OutputItem, OutputItemKind, OutputItems, Step
from quire.server.chat.session import ChatDelta, ChatResult
from quire.server.http.errors import error_body
from quire.server.http.sse import as_told, named_event
from quire.server.openai.responses_input import ResponsesBody, kept_tools
from quire.server.request.params import GenerationRequest

Body = dict[str, object]

_PREFIXES = {OutputItemKind.THOUGHT: "rs", OutputItemKind.TEXT: "msg", OutputItemKind.CALL: "fc"}
_GROWTH = {
    OutputItemKind.THOUGHT: "response.reasoning_text",
    OutputItemKind.TEXT: "response.output_text",
    OutputItemKind.CALL: "response.function_call_arguments",
}


class ResponsesResponse:
    """The bodies of one answer."""

    def __init__(self, model: str, body: ResponsesBody, wanted: GenerationRequest) -> None:
        self._turn = OutputItems()
        self._cut = False
        self._num_events = 0
        self._head: Body = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time())}
        self._echo: Body = {"model": model, **_echo(body, wanted)}

    def whole(self, answered: ChatResult, num_thought: int) -> Body:
        self._turn.hear(answered.said[0].events)
        self._end(answered.output.outputs[0].finish_reason)
        return self._ended(answered.output, num_thought)

    def events(self, spoken: ChatDelta) -> bytes:
        """What was said with one delta, after the beginning of it all."""
        told = [] if self._num_events else self._opening()
        steps = self._turn.hear(spoken.events)
        if spoken.delta.finish_reason is not None:
            steps += self._end(spoken.delta.finish_reason)
        for step in steps:
            told += self._step(step)
        return b"".join(told)

    def ending(self, output: RequestOutput, num_thought: int) -> bytes:
        kind = "response.incomplete" if self._cut else "response.completed"
        return self._event(kind, response=self._ended(output, num_thought))

    def failed(self, error: Exception) -> bytes:
        """After the first byte; a response that has not begun cannot fail, so that is an error alone."""
        told = as_told(error)
        parts = error_body(told)["error"]
        assert isinstance(parts, dict)
        if not self._num_events:
            return self._event("error", code=parts["code"], message=parts["message"], param=parts["param"])
        codes = {429: "rate_limit_exceeded"}
        code = codes.get(told.status, "server_error" if told.status >= 500 else "invalid_prompt")
        items = [_item(piece, "incomplete") for piece in self._turn.pieces]
        failure = {"code": code, "message": parts["message"]}
        return self._event("response.failed", response=self._response("failed", items, error=failure))

    def _end(self, finish_reason: str | None) -> list[Step]:
        self._cut = finish_reason == "length"
        return self._turn.end(cut=self._cut)

    def _ended(self, output: RequestOutput, num_thought: int) -> Body:
        items = [_item(piece, _ended_status(piece)) for piece in self._turn.pieces]
        told = {"usage": _usage(output, num_thought), "completed_at": None if self._cut else int(time.time())}
        if self._cut:
            return self._response("incomplete", items, incomplete_details={"reason": "max_output_tokens"}, **told)
        return self._response("completed", items, **told)

    def _response(self, status: str, items: list[Body], **told: object) -> Body:
        ending = {"error": None, "incomplete_details": None, "usage": None, "completed_at": None, **told}
        return {**self._head, "status": status, "output": items, **ending, **self._echo}

    def _opening(self) -> list[bytes]:
        begun = self._response("in_progress", [])
        return [self._event("response.created", response=begun), self._event("response.in_progress", response=begun)]

    def _step(self, step: Step) -> list[bytes]:
        piece = step.piece
        place: Body = {"item_id": _id(piece), "output_index": piece.place}
        if piece.kind is not OutputItemKind.CALL:
            place["content_index"] = 0
        scores: Body = {"logprobs": []} if piece.kind is OutputItemKind.TEXT else {}
        match step:
            case ItemDelta(_, text):
                return [self._event(f"{_GROWTH[piece.kind]}.delta", **place, delta=text, **scores)]
            case ItemOpened():
                told = [self._item_event("added", piece, {**_item(piece, "in_progress"), **_nothing_yet(piece)})]
                if piece.kind is not OutputItemKind.CALL:
                    told.append(self._event("response.content_part.added", **place, part=_part(piece.kind, "")))
                return told
            case ItemClosed():
                return [*self._closing(piece, place, scores), self._item_event("done", piece)]

    def _closing(self, piece: OutputItem, place: Body, scores: Body) -> list[bytes]:
        done = f"{_GROWTH[piece.kind]}.done"
        if piece.kind is OutputItemKind.CALL:
            return [self._event(done, **place, name=piece.name, arguments=piece.text)]
        part = _part(piece.kind, piece.text)
        return [
            self._event(done, **place, text=piece.text, **scores),
            self._event("response.content_part.done", **place, part=part),
        ]

    def _item_event(self, what: str, piece: OutputItem, item: Body | None = None) -> bytes:
        told = _item(piece, _ended_status(piece)) if item is None else item
        return self._event(f"response.output_item.{what}", output_index=piece.place, item=told)

    def _event(self, kind: str, **told: object) -> bytes:
        body = {"type": kind, "sequence_number": self._num_events, **told}
        self._num_events += 1
        return named_event(kind, body)


def _id(piece: OutputItem) -> str:
    return f"{_PREFIXES[piece.kind]}_{piece.key}"


def _ended_status(piece: OutputItem) -> str:
    return "incomplete" if piece.cut else "completed"


def _item(piece: OutputItem, status: str) -> Body:
    if piece.kind is OutputItemKind.CALL:
        said: Body = {"type": "function_call", "call_id": f"call_{piece.key[:24]}", "name": piece.name,
                      "arguments": piece.text}  # fmt: skip
    elif piece.kind is OutputItemKind.TEXT:
        said = {"type": "message", "role": "assistant", "content": [_part(piece.kind, piece.text)]}
    else:
        content = [_part(piece.kind, piece.text)]
        said = {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
    return {"id": _id(piece), **said, "status": status}


def _nothing_yet(piece: OutputItem) -> Body:
    return {"arguments": ""} if piece.kind is OutputItemKind.CALL else {"content": []}


def _part(kind: OutputItemKind, text: str) -> Body:
    if kind is OutputItemKind.TEXT:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def _usage(output: RequestOutput, num_thought: int) -> Body:
    num_prompt, num_said = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": output.metrics.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_said,
        "output_tokens_details": {"reasoning_tokens": num_thought},
        "total_tokens": num_prompt + num_said,
    }


def _echo(body: ResponsesBody, wanted: GenerationRequest) -> Body:
    """What the client asked for, as far as it was heard; the type has a place for each."""
    text, reasoning, params = body.text, body.reasoning, wanted.params
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

"""Writes the answers of /v1/messages: whole, and event by event. Knows pieces and outputs, no HTTP."""

import uuid

import msgspec

from quire.engine.outputs import CompletionOutput, Delta, RequestOutput
from quire.server.chat.items import ItemClosed, ItemDelta, ItemOpened, OutputItem, OutputItemKind, OutputItems, Step
from quire.server.chat.session import ChatDelta, ChatResult
from quire.server.http.errors import reply_to
from quire.server.http.sse import as_told, named_event

Body = dict[str, object]

PATH = "/v1/messages"

_DELTAS = {
    OutputItemKind.THOUGHT: ("thinking_delta", "thinking"),
    OutputItemKind.TEXT: ("text_delta", "text"),
    OutputItemKind.CALL: ("input_json_delta", "partial_json"),
}


class MessagesResponse:
    """The bodies of one answer."""

    def __init__(self, model: str, num_prompt: int, request_id: str) -> None:
        self._turn = OutputItems()
        self._head: Body = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        self._num_prompt = num_prompt
        self._request_id = request_id
        self._begun = False
        self._why: Body = {"stop_reason": None, "stop_sequence": None}

    def whole(self, answered: ChatResult) -> Body:
        self._turn.hear(answered.said[0].events)
        self._end(answered.output.outputs[0])
        content = [_block(piece) for piece in self._turn.pieces]
        return {**self._head, "content": content, **self._why, "usage": _usage(answered.output)}

    def events(self, spoken: ChatDelta) -> bytes:
        """What was said with one delta, after the beginning of it all."""
        told = []
        if not self._begun:
            self._begun = True
            told.append(self._opening())
        steps = self._turn.hear(spoken.events)
        if spoken.delta.finish_reason is not None:
            steps += self._end(spoken.delta)
        told += [_event_of(step) for step in steps]
        return b"".join(told)

    def ending(self, output: RequestOutput) -> bytes:
        return _event("message_delta", delta=self._why, usage=_usage(output)) + _event("message_stop")

    def failed(self, error: Exception) -> bytes:
        reply = reply_to(as_told(error), path=PATH, request_id=self._request_id)
        return b"event: error\ndata: " + reply.body + b"\n\n"

    def _opening(self) -> bytes:
        usage = _counts(self._num_prompt, num_said=0, num_cached=0)
        return _event("message_start", message={**self._head, "content": [], **self._why, "usage": usage})

    def _end(self, ended: CompletionOutput | Delta) -> list[Step]:
        if ended.finish_reason == "length":
            reason = "max_tokens"
        elif any(piece.kind is OutputItemKind.CALL for piece in self._turn.pieces):
            reason = "tool_use"
        else:
            reason = "stop_sequence" if isinstance(ended.stop_reason, str) else "end_turn"
        sequence = ended.stop_reason if reason == "stop_sequence" else None
        self._why = {"stop_reason": reason, "stop_sequence": sequence}
        return self._turn.end(cut=reason == "max_tokens")


def _event(kind: str, **told: object) -> bytes:
    return named_event(kind, {"type": kind, **told})


def _event_of(step: Step) -> bytes:
    piece = step.piece
    match step:
        case ItemOpened():
            return _event("content_block_start", index=piece.place, content_block=_opened_block(piece))
        case ItemDelta(_, text):
            kind, name = _DELTAS[piece.kind]
            return _event("content_block_delta", index=piece.place, delta={"type": kind, name: text})
        case ItemClosed():
            signed = b""
            if piece.kind is OutputItemKind.THOUGHT:
                signature = {"type": "signature_delta", "signature": piece.key}
                signed = _event("content_block_delta", index=piece.place, delta=signature)
            return signed + _event("content_block_stop", index=piece.place)


def _opened_block(piece: OutputItem) -> Body:
    match piece.kind:
        case OutputItemKind.THOUGHT:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case OutputItemKind.TEXT:
            return {"type": "text", "text": ""}
        case OutputItemKind.CALL:
            return {"type": "tool_use", "id": f"toolu_{piece.key[:24]}", "name": piece.name, "input": {}}


def _block(piece: OutputItem) -> Body:
    block = _opened_block(piece)
    match piece.kind:
        case OutputItemKind.THOUGHT:
            block.update(thinking=piece.text, signature=piece.key)  # clients send it back; nobody checks it here
        case OutputItemKind.TEXT:
            block["text"] = piece.text
        case OutputItemKind.CALL:
            block["input"] = _arguments(piece.text)
    return block


def _arguments(text: str) -> Body:
    """Where the length cut them, or the model wrote no JSON: the text as it is, which no tool should be called with."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, object])
    except (ValueError, RecursionError):
        return {"invalid_json": text}


def _usage(output: RequestOutput) -> Body:
    num_said = len(output.outputs[0].token_ids)
    return _counts(len(output.prompt_token_ids), num_said, output.metrics.num_cached_tokens)


def _counts(num_prompt: int, num_said: int, num_cached: int) -> Body:
    """The input is the whole prompt, as count_tokens tells it; what the cache gave is part of it."""
    return {
        "input_tokens": num_prompt,
        "output_tokens": num_said,
        "cache_read_input_tokens": num_cached,
        "cache_creation_input_tokens": 0,
    }

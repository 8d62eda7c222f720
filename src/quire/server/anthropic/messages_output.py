"""Messages API output: the JSON body, and the stream events. Does not depend on HTTP."""

import uuid

from quire.engine.outputs import CompletionOutput, Delta, RequestOutput
from quire.server.chat.items import (
    ItemClosed,
    ItemDelta,
    ItemEvent,
    ItemOpened,
    OutputItem,
    OutputItemKind,
    OutputItems,
)
from quire.server.chat.session import ChatDelta, ChatResult, ChatStream, parsed_arguments
from quire.server.http.errors import reply_to
from quire.server.http.sse import client_error, named_event

Body = dict[str, object]

PATH = "/v1/messages"

_DELTAS = {
    OutputItemKind.REASONING: ("thinking_delta", "thinking"),
    OutputItemKind.TEXT: ("text_delta", "text"),
    OutputItemKind.TOOL_CALL: ("input_json_delta", "partial_json"),
}


class PromptUsage:
    """Input tokens as Anthropic counts them: each token of the prompt under one name, so that the sum is its length.

    `caches`: the request marks parts to be cached (`cache_control`), and the engine caches. The tokens that were not
    found are then reported as written to the cache, except the last of the prompt, which is computed every time.
    """

    def __init__(self, chat: ChatStream, *, caches: bool) -> None:
        self._chat = chat
        self._caches = caches

    def counts(self, output: RequestOutput | None = None) -> Body:
        """The usage so far; the output is given at the end."""
        num_cached = self._chat.num_cached_tokens
        num_computed = len(self._chat.prompt_ids) - num_cached
        num_created = max(num_computed - 1, 0) if self._caches else 0
        return {
            "input_tokens": num_computed - num_created,
            "output_tokens": 0 if output is None else len(output.outputs[0].token_ids),
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": num_created,
        }


class MessagesResponse:
    """The JSON of one message."""

    def __init__(self, model: str, usage: "PromptUsage", request_id: str) -> None:
        self._items = OutputItems()
        self._head: Body = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        self._usage = usage
        self._request_id = request_id
        self._started = False
        self._stop: Body = {"stop_reason": None, "stop_sequence": None}

    def whole(self, result: ChatResult) -> Body:
        self._items.add(result.choices[0].events)
        self._finish(result.output.outputs[0])
        content = [_block(item) for item in self._items.items]
        return {**self._head, "content": content, **self._stop, "usage": self._usage.counts(result.output)}

    def events(self, chat_delta: ChatDelta) -> bytes:
        """The events of one delta; the first one is `message_start`."""
        events = []
        if not self._started:
            self._started = True
            usage = self._usage.counts()
            events.append(_event("message_start", message={**self._head, "content": [], **self._stop, "usage": usage}))
        item_events = self._items.add(chat_delta.events)
        if chat_delta.delta.finish_reason is not None:
            item_events += self._finish(chat_delta.delta)
        events += [_item_event(item_event) for item_event in item_events]
        return b"".join(events)

    def last_events(self, output: RequestOutput) -> bytes:
        return _event("message_delta", delta=self._stop, usage=self._usage.counts(output)) + _event("message_stop")

    def failed(self, error: Exception) -> bytes:
        reply = reply_to(client_error(error), path=PATH, request_id=self._request_id)
        return b"event: error\ndata: " + reply.body + b"\n\n"

    def _finish(self, choice: CompletionOutput | Delta) -> list[ItemEvent]:
        if choice.finish_reason == "length":
            reason = "max_tokens"
        elif any(item.kind is OutputItemKind.TOOL_CALL for item in self._items.items):
            reason = "tool_use"
        else:
            reason = "stop_sequence" if isinstance(choice.stop_reason, str) else "end_turn"
        sequence = choice.stop_reason if reason == "stop_sequence" else None
        self._stop = {"stop_reason": reason, "stop_sequence": sequence}
        return self._items.finish(truncated=reason == "max_tokens")


def _event(kind: str, **fields: object) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def _item_event(item_event: ItemEvent) -> bytes:
    item = item_event.item
    match item_event:
        case ItemOpened():
            return _event("content_block_start", index=item.index, content_block=_empty_block(item))
        case ItemDelta(_, text):
            kind, name = _DELTAS[item.kind]
            return _event("content_block_delta", index=item.index, delta={"type": kind, name: text})
        case ItemClosed():
            signature_event = b""
            if item.kind is OutputItemKind.REASONING:
                delta = {"type": "signature_delta", "signature": item.key}
                signature_event = _event("content_block_delta", index=item.index, delta=delta)
            return signature_event + _event("content_block_stop", index=item.index)


def _empty_block(item: OutputItem) -> Body:
    match item.kind:
        case OutputItemKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case OutputItemKind.TEXT:
            return {"type": "text", "text": ""}
        case OutputItemKind.TOOL_CALL:
            return {"type": "tool_use", "id": f"toolu_{item.key[:24]}", "name": item.name, "input": {}}


def _block(item: OutputItem) -> Body:
    block = _empty_block(item)
    match item.kind:
        case OutputItemKind.REASONING:
            block.update(thinking=item.text, signature=item.key)  # clients send it back; it is not checked
        case OutputItemKind.TEXT:
            block["text"] = item.text
        case OutputItemKind.TOOL_CALL:
            block["input"] = parsed_arguments(item.text)
    return block

"""Responses API output: the JSON body, and the stream events. Does not depend on HTTP.

Events are numbered from 0. An item keeps its id from its first event to the final response. Log-probabilities belong to
the text items alone: each token is placed in the output, and goes to the item that its text is part of.

The events of a response that has ended are not kept. They follow from its JSON and from an outline of its stream: which
items were opened and closed, and how long each delta was.
"""

import time
import uuid
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from quire.engine.outputs import Logprob, RequestOutput
from quire.output_parsing.events import OutputEvent, PlainText, ReasoningText
from quire.server.chat.items import (
    ItemClosed,
    ItemDelta,
    ItemEvent,
    ItemOpened,
    OutputItem,
    OutputItemKind,
    OutputItems,
)
from quire.server.chat.logprobs import TokenText, chat_logprobs
from quire.server.chat.session import ChatDelta, ChatResult
from quire.server.http.errors import error_body
from quire.server.http.sse import client_error, named_event
from quire.server.openai.responses_input import ResponsesBody, kept_tools
from quire.server.request.params import GenerationRequest
from quire.text.detokenizer import Detokenizer

Body = dict[str, object]

_ID_PREFIXES = {OutputItemKind.REASONING: "rs", OutputItemKind.TEXT: "msg", OutputItemKind.TOOL_CALL: "fc"}
_DELTA_EVENTS = {
    OutputItemKind.REASONING: "response.reasoning_text",
    OutputItemKind.TEXT: "response.output_text",
    OutputItemKind.TOOL_CALL: "response.function_call_arguments",
}


class _PlacedEntry(NamedTuple):
    """A token's log-probabilities, and its place in the output text."""

    start: int
    end: int
    entry: dict[int, Logprob]


class TextLogprobs:
    """Finds the tokens of the text items. Tokens of reasoning, tool calls and tags have no place in the response."""

    def __init__(self, token_text: TokenText, detokenizer: Detokenizer | None, num_top: int) -> None:
        self._token_text = token_text
        self._detokenizer = detokenizer
        self._num_top = num_top
        self._pending: list[_PlacedEntry] = []
        self._unread = ""  # output that is in no event so far
        self._num_read = 0  # characters before it

    def add(self, text: str, entries: Sequence[dict[int, Logprob]], events: Sequence[OutputEvent]) -> list[list[Body]]:
        """More output, and the events that it led to: the log-probabilities of each `PlainText` among them.

        A parser drops tags and holds back what may become one: each event's text is looked for from the end.
        """
        self._unread += text
        for entry in entries:
            start = end = 0
            if self._detokenizer is not None:
                start = self._detokenizer.place
                self._detokenizer.push([next(iter(entry))])
                end = self._detokenizer.place
            self._pending.append(_PlacedEntry(start, end, entry))
        texts = [event for event in events if isinstance(event, PlainText | ReasoningText) and event.text]
        spans: list[tuple[int, int]] = []
        before = len(self._unread)
        for event in reversed(texts):
            start = max(self._unread.rfind(event.text, 0, before), 0)
            spans.append((start, min(start + len(event.text), before)))
            before = start
        spans.reverse()
        taken = [self._take(self._num_read + start, self._num_read + end) for start, end in spans]
        num_read = spans[-1][1] if spans else 0
        self._unread, self._num_read = self._unread[num_read:], self._num_read + num_read
        return [logprobs for event, logprobs in zip(texts, taken, strict=True) if isinstance(event, PlainText)]

    def _take(self, start: int, end: int) -> list[Body]:
        """The tokens within a span, or across its beginning; earlier ones are dropped."""
        later = next((at for at, each in enumerate(self._pending) if each.start >= end), len(self._pending))
        taken = [each.entry for each in self._pending[:later] if each.end > start or each.start >= start]
        self._pending = self._pending[later:]
        return chat_logprobs(taken, self._num_top, self._token_text)


# In an outline. Other numbers are the lengths of deltas; in a response with log-probabilities, the length of a text's
# delta is followed by their number.
_STARTED, _STARTED_SCORED, _OPENED, _CLOSED = -1, -2, -3, -4


class EventWriter:
    """Writes the events of one response, and notes the outline of its stream. Those up to a number are only counted."""

    def __init__(self, starting_after: int = -1) -> None:
        self.num_events = 0
        self.outline = array("i")
        self.logprobs: dict[str, list[object]] = {}  # of the text items, by the key of an item
        self._starting_after = starting_after

    def event(self, kind: str, **fields: object) -> bytes:
        number = self.num_events
        self.num_events += 1
        if number <= self._starting_after:
            return b""
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})

    def start(self, response: Body, *, queued: bool, scored: bool) -> list[bytes]:
        """The events before the first item, of a response that was queued without those sent then."""
        self.outline.append(_STARTED_SCORED if scored else _STARTED)
        kinds = ["response.in_progress"] if queued else ["response.created", "response.in_progress"]
        return [self.event(kind, response=response) for kind in kinds]

    def queued(self, response: Body) -> list[bytes]:
        return [self.event(kind, response=response) for kind in ("response.created", "response.queued")]

    def item_events(self, item_event: ItemEvent, logprobs: Sequence[object] | None) -> list[bytes]:
        """The events of one step of an item. `logprobs` of a text's delta: None if the response has none."""
        item = item_event.item
        is_call = item.kind is OutputItemKind.TOOL_CALL
        is_text = item.kind is OutputItemKind.TEXT
        place: Body = {"item_id": _id(item), "output_index": item.index, **({} if is_call else {"content_index": 0})}
        match item_event:
            case ItemOpened():
                self.outline.append(_OPENED)
                empty: Body = {"arguments": ""} if is_call else {"content": []}
                events = [self._item_event("added", item, {**self.item(item, "in_progress"), **empty})]
                if not is_call:
                    events.append(self.event("response.content_part.added", **place, part=_part(item.kind, "", [])))
                return events
            case ItemDelta(_, text):
                self.outline.append(len(text))
                scored: Body = {"logprobs": logprobs or []} if is_text else {}
                if is_text and logprobs is not None:
                    self.outline.append(len(logprobs))
                return [self.event(f"{_DELTA_EVENTS[item.kind]}.delta", **place, delta=text, **scored)]
            case ItemClosed():
                self.outline.append(_CLOSED)
                done = f"{_DELTA_EVENTS[item.kind]}.done"
                if is_call:
                    events = [self.event(done, **place, name=item.name, arguments=item.text)]
                else:
                    all_logprobs = self.logprobs.get(item.key, [])
                    part = _part(item.kind, item.text, all_logprobs)
                    scored = {"logprobs": all_logprobs} if is_text else {}
                    events = [
                        self.event(done, **place, text=item.text, **scored),
                        self.event("response.content_part.done", **place, part=part),
                    ]
                return [*events, self._item_event("done", item, self.item(item, _final_status(item)))]

    def item(self, item: OutputItem, status: str) -> Body:
        match item.kind:
            case OutputItemKind.TOOL_CALL:
                call_id = f"call_{item.key[:24]}"
                body: Body = {"type": "function_call", "call_id": call_id, "name": item.name, "arguments": item.text}
            case OutputItemKind.TEXT:
                part = _part(item.kind, item.text, self.logprobs.get(item.key, []))
                body = {"type": "message", "role": "assistant", "content": [part]}
            case OutputItemKind.REASONING:
                content = [_part(item.kind, item.text, [])]
                body = {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return {"id": _id(item), **body, "status": status}

    def _item_event(self, name: str, item: OutputItem, body: Body) -> bytes:
        return self.event(f"response.output_item.{name}", output_index=item.index, item=body)


class ResponsesResponse:
    """The JSON of one response."""

    def __init__(
        self,
        model: str,
        body: ResponsesBody,
        generation: GenerationRequest,
        logprobs: TextLogprobs | None = None,
        ended: Callable[[Body], None] = lambda body: None,
    ) -> None:
        self._items = OutputItems()
        self._writer = EventWriter()
        self._truncated = False
        self._is_open = False  # its first events were sent
        self._logprobs = logprobs
        self.id = f"resp_{uuid.uuid4().hex}"
        self._head: Body = {"id": self.id, "object": "response", "created_at": int(time.time())}
        self._echo: Body = {"model": model, **_echo(body, generation)}
        self._ended = ended  # gets the response when it has ended

    @property
    def outline(self) -> bytes:
        """Of its stream, for `replayed`; empty if it was not streamed."""
        return self._writer.outline.tobytes()

    def without_output(self, status: str) -> bytes:
        """The response with this status, as JSON."""
        return msgspec.json.encode(self._response(status, []))

    def whole(self, result: ChatResult, num_reasoning_tokens: int) -> Body:
        """The response at its end; `end` follows. Slow with many log-probabilities: then call it on a thread."""
        output, events = result.output.outputs[0], result.choices[0].events
        self._note_logprobs(self._items.add(events), output.text, output.logprobs or [], events)
        self._finish(output.finish_reason)
        return self._finished(result.output, num_reasoning_tokens)

    def queued(self) -> bytes:
        """The first events of a background response, which waits."""
        return b"".join(self._writer.queued(self._response("queued", [])))

    def events(self, chat_delta: ChatDelta) -> bytes:
        """The events of one delta; the first ones open the response."""
        events = []
        delta = chat_delta.delta
        if not self._is_open:
            self._is_open = True
            begun, queued = self._response("in_progress", []), self._writer.num_events > 0
            events = self._writer.start(begun, queued=queued, scored=self._logprobs is not None)
        item_events = self._items.add(chat_delta.events)
        logprobs = self._note_logprobs(item_events, delta.text, delta.logprobs, chat_delta.events)
        if delta.finish_reason is not None:
            item_events += self._finish(delta.finish_reason)
        for place, item_event in enumerate(item_events):
            scored = None if self._logprobs is None else logprobs.get(place, [])
            events += self._writer.item_events(item_event, scored)
        return b"".join(events)

    def _note_logprobs(
        self,
        item_events: Sequence[ItemEvent],
        text: str,
        entries: Sequence[dict[int, Logprob]],
        events: Sequence[OutputEvent],
    ) -> dict[int, list[msgspec.Raw]]:
        """The log-probabilities of the text deltas among these events, by their place."""
        if self._logprobs is None:
            return {}
        places = [
            place
            for place, each in enumerate(item_events)
            if isinstance(each, ItemDelta) and each.item.kind is OutputItemKind.TEXT
        ]
        scored = self._logprobs.add(text, entries, events)
        found = {
            place: [msgspec.Raw(msgspec.json.encode(entry)) for entry in logprobs]  # written once; events repeat them
            for place, logprobs in zip(places, scored, strict=True)
        }
        for place, logprobs in found.items():
            self._writer.logprobs.setdefault(item_events[place].item.key, []).extend(logprobs)
        return found

    def last_event(self, output: RequestOutput, num_reasoning_tokens: int) -> bytes:
        kind = "response.incomplete" if self._truncated else "response.completed"
        return self._writer.event(kind, response=self.end(self._finished(output, num_reasoning_tokens)))

    def failed(self, error: Exception) -> bytes:
        """The event of a failure after the first byte. Before the response is opened, it is an `error` event."""
        if not self._writer.num_events:
            details = error_body(client_error(error))["error"]
            assert isinstance(details, dict)
            return self._writer.event("error", code=details["code"], message=details["message"], param=details["param"])
        return self._writer.event("response.failed", response=self.fail(error))

    def fail(self, error: Exception) -> Body:
        """The failed response, with what it has so far."""
        reported = client_error(error)
        details = error_body(reported)["error"]
        assert isinstance(details, dict)
        codes = {429: "rate_limit_exceeded"}
        code = codes.get(reported.status, "server_error" if reported.status >= 500 else "invalid_prompt")
        items = [self._writer.item(item, "incomplete") for item in self._items.items]
        failure = {"code": code, "message": details["message"]}
        return self.end(self._response("failed", items, error=failure))

    def _finish(self, finish_reason: str | None) -> list[ItemEvent]:
        self._truncated = finish_reason == "length"
        return self._items.finish(truncated=self._truncated)

    def _finished(self, output: RequestOutput, num_reasoning_tokens: int) -> Body:
        items = [self._writer.item(item, _final_status(item)) for item in self._items.items]
        usage = _usage(output, num_reasoning_tokens)
        if self._truncated:
            details = {"reason": "max_output_tokens"}
            return self._response("incomplete", items, incomplete_details=details, usage=usage)
        return self._response("completed", items, usage=usage, completed_at=int(time.time()))

    def end(self, response: Body) -> Body:
        """The response has ended, and is stored. On the event loop's thread."""
        self._ended(response)
        return response

    def _response(self, status: str, items: list[Body], **fields: object) -> Body:
        outcome = {"error": None, "incomplete_details": None, "usage": None, "completed_at": None, **fields}
        return {**self._head, "status": status, "output": items, **outcome, **self._echo}


class _ReplayedPart(msgspec.Struct):
    """What the events of a part need of its JSON. Log-probabilities stay as they are: decoded, they take ten times the
    memory."""

    text: str = ""
    logprobs: list[msgspec.Raw] = []


class _ReplayedItem(msgspec.Struct):
    """What the events of an item need of its JSON."""

    id: str
    type: str
    status: str
    name: str = ""
    arguments: str = ""
    content: list[_ReplayedPart] = []

    def output_item(self, index: int, *, truncated: bool) -> OutputItem:
        kind = {"message": OutputItemKind.TEXT, "reasoning": OutputItemKind.REASONING}.get(self.type)
        item = OutputItem(kind or OutputItemKind.TOOL_CALL, index, self.name)
        item.key = self.id.partition("_")[2]
        item.truncated = truncated
        item.append(self.arguments or "".join(part.text for part in self.content))
        return item


_BEFORE_ITEMS: Body = {"output": [], "error": None, "incomplete_details": None, "usage": None, "completed_at": None}


def replayed(body: bytes, outline: bytes, starting_after: int) -> Iterator[bytes]:
    """The events of a response that has ended, as they were sent, from its JSON; those up to a number are empty.

    Without an outline it was not streamed: each item is one delta.
    """
    final = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    status, background = (msgspec.json.decode(final[name]) for name in ("status", "background"))
    stored = msgspec.json.decode(final["output"], type=list[_ReplayedItem])
    items = [
        each.output_item(index, truncated=each.status == "incomplete" and status != "failed")
        for index, each in enumerate(stored)
    ]
    logprobs = [[entry for part in each.content for entry in part.logprobs] for each in stored]
    writer = EventWriter(starting_after)
    writer.logprobs.update((item.key, list[object](each)) for item, each in zip(items, logprobs, strict=True))
    if background:
        yield from writer.queued({**final, **_BEFORE_ITEMS, "status": "queued"})
    index, num_read, num_scored, scored = -1, 0, 0, False
    steps = iter(array("i", outline) if outline else _undivided(items, logprobs))
    for step in steps:
        if step in (_STARTED, _STARTED_SCORED):
            scored = step == _STARTED_SCORED
            begun = {**final, **_BEFORE_ITEMS, "status": "in_progress"}
            yield from writer.start(begun, queued=background, scored=scored)
        elif step == _OPENED:
            index, num_read, num_scored = index + 1, 0, 0
            yield from writer.item_events(ItemOpened(items[index]), None)
        elif step == _CLOSED:
            yield from writer.item_events(ItemClosed(items[index]), None)
        else:
            count = next(steps) if scored and items[index].kind is OutputItemKind.TEXT else 0
            delta = ItemDelta(items[index], items[index].text[num_read : num_read + step])
            entries = logprobs[index][num_scored : num_scored + count] if scored else None
            yield from writer.item_events(delta, entries)
            num_read, num_scored = num_read + step, num_scored + count
    yield writer.event(f"response.{status}", response=final)


def _undivided(items: Sequence[OutputItem], logprobs: Sequence[Sequence[object]]) -> list[int]:
    """The outline of a stream in which each item is one delta."""
    scored = any(logprobs)
    steps = [_STARTED_SCORED if scored else _STARTED]
    for item, entries in zip(items, logprobs, strict=True):
        counted = [len(entries)] if scored and item.kind is OutputItemKind.TEXT else []
        steps += [_OPENED, *([len(item.text), *counted] if item.text else []), _CLOSED]
    return steps


def _id(item: OutputItem) -> str:
    return f"{_ID_PREFIXES[item.kind]}_{item.key}"


def _final_status(item: OutputItem) -> str:
    return "incomplete" if item.truncated else "completed"


def _part(kind: OutputItemKind, text: str, logprobs: Sequence[object]) -> Body:
    if kind is OutputItemKind.TEXT:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
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
        "top_logprobs": body.top_logprobs or 0,
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
        "store": body.store is not False,
        "background": bool(body.background),
        "previous_response_id": body.previous_response_id,
    }

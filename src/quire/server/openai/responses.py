"""/v1/responses: create, count the input tokens, retrieve, cancel, delete, list the input items.

A response is stored unless `store` is false. One with `background` is generated after its request has been answered,
and polled or followed (`background.py`); it counts as an open request until it ends, and is lost with the server.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidParameter, QuireError, shown
from quire.server.admission import client_of
from quire.server.chat.logprobs import TokenText
from quire.server.chat.prompt import ChatPrompt, chat_prompt, drop_oldest_turns
from quire.server.chat.session import ChatStream, start_chat
from quire.server.context import ServedModel, ServerState
from quire.server.http.errors import TooManyStreams, rename_error_params
from quire.server.http.request_context import context_of
from quire.server.http.sse import Events, json_response, run_inline_if_short, stream, until_disconnect
from quire.server.openai.background import BackgroundResponse, ResponseCancelled, response_events
from quire.server.openai.responses_input import PARAM_NAMES, ResponsesBody, as_chat, stored_items
from quire.server.openai.responses_output import Body, ResponsesResponse, TextLogprobs, replayed
from quire.server.request.decode import read
from quire.server.request.params import GenerationRequest, chat_generation
from quire.server.request.schema import ChatBody
from quire.server.response_store import ResponseStore, StoredItem, StoredResponse

_SHORT_BYTES = 1 << 16  # of a stored conversation: read inline
_MAX_LISTED = 100  # items of a page, as OpenAI has it
_NUM_LISTED = 20
_REPEATED_BYTES = 1 << 20  # of one field
_REPEATED = ("instructions", "metadata", "text", "tools", "tool_choice", "prompt_cache_key", "safety_identifier",
             "user", "previous_response_id")  # fmt: skip
_MAX_DIGITS = 9  # of the number of an event
_EVENTS_AT_ONCE, _BYTES_AT_ONCE = 64, 1 << 16  # of a replayed stream: about 0.2 ms
# Streams of stored responses, by client and in all. Each takes some memory, and time with each token; one of a response
# that has ended holds events which repeat it.
_FOLLOWED_BYTES, _FOLLOWER_BYTES, _COPIES = 128 << 20, 1 << 20, 4


class ResponseNotFound(QuireError):
    """No stored response of this key has that id."""

    status = 404
    code = "response_not_found"


class PreviousResponseNotFound(QuireError):
    """The same, of the response that a request continues."""

    status = 400
    code = "previous_response_not_found"


class ResponsesInput(NamedTuple):
    """A request as the model gets it, and as it is stored."""

    generation: GenerationRequest
    prompt: ChatPrompt
    items: tuple[StoredItem, ...]  # of the whole conversation


async def responses(state: ServerState, request: Request) -> Response:
    body = await read(request, ResponsesBody)
    model, owner = state.model, _owner(request)
    model.check_model(body.model)
    _check_repeated(body, context_of(request.scope).num_body_bytes)
    with rename_error_params(PARAM_NAMES):
        generation, prompt, items = await _input(state, request, body)
        chat = await start_chat(state.engine, model, prompt, generation)
        logprobs = _logprobs(model, prompt, generation, chat)
        if body.background:
            return await _start_background(state, request, body, chat, items, generation, logprobs)

        def ended(final: Body) -> None:
            if body.store is not False:
                state.responses.put(_stored(owner, final, items, response.outline))

        response = ResponsesResponse(model.name, body, generation, logprobs, ended)
        if generation.stream:
            events = response_events(chat, response)
            return await stream(request, events, chat.close, state.keep_alive_s, response.failed)
        try:
            result = await until_disconnect(request, chat.result())
            num_reasoning, num_scores = await chat.num_reasoning_tokens(), result.output.num_scores
            whole = await model.text_threads.run_scored(num_scores, lambda: response.whole(result, num_reasoning))
        finally:
            chat.close()
    return json_response(response.end(whole))


def _check_repeated(body: ResponsesBody, num_body_bytes: int) -> None:
    """Each event that has the response repeats fields of the request; they are written on the event loop."""
    if num_body_bytes > _REPEATED_BYTES:
        fields = {name: getattr(body, name) for name in _REPEATED}
        num_bytes, largest = max((len(msgspec.json.encode(value)), name) for name, value in fields.items())
        if num_bytes > _REPEATED_BYTES:
            raise InvalidParameter(
                f"{largest} takes {num_bytes} bytes as JSON; a response repeats it, and the limit is "
                f"{_REPEATED_BYTES}.",
                param=largest,
            )


async def input_tokens(state: ServerState, request: Request) -> Response:
    body = await read(request, ResponsesBody)
    model = state.model
    model.check_model(body.model)
    with rename_error_params(PARAM_NAMES):
        _, prompt, _ = await _input(state, request, body)
        ids = await model.text_threads.run(lambda: model.text().encode_chat(prompt.render(model)))
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})


async def retrieve(state: ServerState, request: Request) -> Response:
    """The response as it is; with `stream`, its events from any of them on, and those to come while it is generated."""
    stored, query = _find(state.responses, request), request.query_params
    if query.get("stream") not in ("true", "True", "1"):
        return _json(stored)
    given = query.get("starting_after")
    if given is not None and not (given.isascii() and given.isdigit() and len(given) <= _MAX_DIGITS):
        raise InvalidParameter(f"starting_after is {shown(given)}; it must be a number.", param="starting_after")
    after, running = -1 if given is None else int(given), stored.running
    if isinstance(running, BackgroundResponse):
        if running.log is None:
            raise InvalidParameter(
                "This response is being generated without stream; wait for its end, or omit stream.", param="stream"
            )
        ended = _take_follower(state, request, 0)
        return await stream(request, running.log.follow(after), ended, state.keep_alive_s, running.log.failed)
    if stored.outline is None:
        raise ResponseCancelled("The response was cancelled: it has no events. Omit stream.")
    ended = _take_follower(state, request, len(stored.body))
    return await stream(request, _replay(stored.body, stored.outline, after), ended, state.keep_alive_s)


def _take_follower(state: ServerState, request: Request, num_bytes: int) -> Callable[[], None]:
    """Room for one stream of a stored response, which has this size if it has ended. The result gives it back."""
    client = client_of(context_of(request.scope).identity, request.scope)
    if not state.followed.has_room(client, _FOLLOWED_BYTES):
        raise TooManyStreams(
            f"{state.followed.held(client) >> 20} MiB of stored responses are being streamed to this client; "
            f"all clients may have {_FOLLOWED_BYTES >> 20} MiB. Read those first, or omit stream."
        )
    taken = _FOLLOWER_BYTES + _COPIES * num_bytes
    state.followed.take(client, taken)
    return partial(state.followed.release, client, taken)


async def _replay(body: bytes, outline: bytes, after: int) -> Events:
    """The events of a response that has ended. Other tasks run in between. One that is not read holds few events."""
    some: list[bytes] = []
    num_bytes = 0
    for event in replayed(body, outline, after):
        some.append(event)
        num_bytes += len(event)
        if len(some) >= _EVENTS_AT_ONCE or num_bytes >= _BYTES_AT_ONCE:
            if num_bytes:
                yield b"".join(some)
            some, num_bytes = [], 0
            await asyncio.sleep(0)
    if num_bytes:
        yield b"".join(some)


async def delete(state: ServerState, request: Request) -> Response:
    """A response that is being generated is cancelled."""
    stored = _find(state.responses, request)
    if stored.running is not None:
        stored.running.cancel()
    state.responses.delete(stored)
    return json_response({"id": stored.id, "object": "response", "deleted": True})


async def cancel(state: ServerState, request: Request) -> Response:
    """The response as it is then; one that has ended stays as it is."""
    stored = _find(state.responses, request)
    if not stored.background:
        raise InvalidParameter("Only a response with background: true can be cancelled.", param="response_id")
    if stored.running is not None:
        cancelled = stored.running.cancel()
        stored = StoredResponse(stored.id, stored.owner, cancelled, stored.input, background=True, outline=None)
        state.responses.put(stored)
    return _json(stored)


async def input_items(state: ServerState, request: Request) -> Response:
    """A page of the items of the conversation before the response."""
    stored, query = _find(state.responses, request), request.query_params
    limit, order, after = query.get("limit", str(_NUM_LISTED)), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= _MAX_LISTED):
        raise InvalidParameter(f"limit is {shown(limit)}; it must be from 1 to {_MAX_LISTED}.", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidParameter(f"order is {shown(order)}; it may be 'asc' or 'desc'.", param="order")
    items = stored.input if order == "asc" else stored.input[::-1]
    if after is not None:
        place = next((place for place, item in enumerate(items) if item.id == after), None)
        if place is None:
            raise InvalidParameter(f"after is {shown(after)}, which is not an item of this response.", param="after")
        items = items[place + 1 :]
    page = items[: int(limit)]
    return json_response(
        {
            "object": "list",
            "data": [msgspec.Raw(item.json) for item in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": len(page) < len(items),
        }
    )


async def _input(state: ServerState, request: Request, body: ResponsesBody) -> ResponsesInput:
    model, owner = state.model, _owner(request)
    earlier = _conversation(state.responses, owner, body.previous_response_id)
    find = partial(state.responses.item, owner)
    if body.truncation != "auto":
        model.check_length(len(earlier) + (len(body.input) if isinstance(body.input, list) else 0), "input")

    def convert() -> tuple[ChatBody, tuple[StoredItem, ...]]:
        chat_body = as_chat(body, earlier, find)
        return chat_body, () if body.store is False else earlier + stored_items(body, find)

    num_stored = sum(len(item.json) for item in earlier)
    context_of(request.scope).num_body_bytes += num_stored
    if num_stored > _SHORT_BYTES:
        chat_body, items = await run_in_threadpool(convert)
    else:
        chat_body, items = await run_inline_if_short(request, convert)
    generation, prompt = chat_generation(chat_body, model), chat_prompt(chat_body)
    if body.truncation == "auto":
        prompt = await model.text_threads.run(drop_oldest_turns, prompt, model, generation.params.max_tokens)
    return ResponsesInput(generation, prompt, items)


def _logprobs(
    model: ServedModel, prompt: ChatPrompt, generation: GenerationRequest, chat: ChatStream
) -> TextLogprobs | None:
    if generation.params.logprobs is None:
        return None
    token_text = TokenText(model.tokenizer, as_ids=generation.tokens_as_ids)
    skipped = not model.model_format.keeps_special_tokens(tools=bool(prompt.callable_tools))
    detokenizer = token_text.detokenizer(chat.prompt_ids, skip_special_tokens=skipped)
    return TextLogprobs(token_text, detokenizer, generation.params.logprobs)


async def _start_background(
    state: ServerState,
    request: Request,
    body: ResponsesBody,
    chat: ChatStream,
    items: tuple[StoredItem, ...],
    generation: GenerationRequest,
    logprobs: TextLogprobs | None,
) -> Response:
    store, owner, context = state.responses, _owner(request), context_of(request.scope)

    def ended(final: Body) -> None:
        if store.get(owner, response.id) is not None:  # it may have been deleted
            store.put(_stored(owner, final, items, response.outline, background=True))

    response = ResponsesResponse(state.model.name, body, generation, logprobs, ended)
    place, context.place = context.place, None  # it is released when the response ends, not with the request
    running = BackgroundResponse(chat, response, place, state.model.text_threads, streamed=generation.stream)
    stored = StoredResponse(response.id, owner, running.body(), items, background=True, running=running)
    try:
        store.put(stored)
    except QuireError:
        running.cancel()
        raise
    if (log := running.log) is None:
        return _json(stored)
    return await stream(request, log.follow(-1), lambda: None, state.keep_alive_s, log.failed)  # it goes on without


def _stored(
    owner: str, final: Body, items: tuple[StoredItem, ...], outline: bytes, *, background: bool = False
) -> StoredResponse:
    output = final["output"]
    assert isinstance(output, list)
    produced = tuple(StoredItem(item["id"], msgspec.json.encode(item)) for item in output)
    body = msgspec.json.encode(final)
    return StoredResponse(str(final["id"]), owner, body, items, produced, background, outline)


def _owner(request: Request) -> str:
    """The name of the key; without keys the client's address."""
    return client_of(context_of(request.scope).identity, request.scope).name


def _conversation(store: ResponseStore, owner: str, previous_id: str | None) -> tuple[StoredItem, ...]:
    """The items that a request continues."""
    if previous_id is None:
        return ()
    previous = store.get(owner, previous_id)
    if previous is None:
        raise PreviousResponseNotFound(_missing(previous_id, store), param="previous_response_id")
    if previous.running is not None:
        raise InvalidParameter(
            f"The response {shown(previous_id)} is still being generated; wait for its end.",
            param="previous_response_id",
        )
    return previous.conversation


def _find(store: ResponseStore, request: Request) -> StoredResponse:
    response_id = request.path_params["response_id"]
    stored = store.get(_owner(request), response_id)
    if stored is None:
        raise ResponseNotFound(_missing(response_id, store), param="response_id")
    return stored


def _missing(response_id: str, store: ResponseStore) -> str:
    return (
        f"This client has no stored response {shown(response_id)}. Responses are kept in memory, "
        f"{store.limits.describe()}, the least recently used dropped first; they are lost when the server restarts."
    )


def _json(stored: StoredResponse) -> Response:
    body = stored.body if stored.running is None else stored.running.body()
    return Response(body, media_type="application/json")

"""POST /v1/embeddings: texts as vectors, in the order in which they came."""

import base64
from collections import deque
from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidParameter, InvalidPrompt
from quire.core.ids import FloatArray
from quire.engine.outputs import EMBEDDING, RequestOutput, unit
from quire.engine.request_options import RequestOptions
from quire.server.async_engine import AsyncEngine, RequestStream
from quire.server.context import ServedModel, ServerState
from quire.server.http.errors import rename_error_params
from quire.server.http.sse import json_response, until_disconnect
from quire.server.request.decode import read
from quire.server.request.params import GenerationRequest, prompt_list, truncate_prompt
from quire.server.request.schema import EmbeddingBody

MAX_INPUTS = 2048  # as OpenAI has it
_AT_ONCE = 32  # inputs of one request that are with the engine: they fill a step, and leave room for others
_FORMATS = ("float", "base64")
_NAMES = {"messages": "input", "prompt": "input"}


async def embeddings(state: ServerState, request: Request) -> Response:
    body = await read(request, EmbeddingBody)
    model = state.model
    model.check_model(body.model)
    encoding = body.encoding_format or "float"
    if encoding not in _FORMATS:
        raise InvalidParameter(f"encoding_format must be one of {', '.join(_FORMATS)}.", param="encoding_format")
    if body.dimensions is not None and body.dimensions < 1:
        raise InvalidParameter(f"dimensions is {body.dimensions}; the least is 1.", param="dimensions")
    terms = _terms(body)
    with rename_error_params(_NAMES):
        inputs = await run_in_threadpool(_inputs, body, terms, model)
        vectors = await until_disconnect(request, _embedded(state.engine, inputs, terms, body.dimensions))
    num_tokens = sum(map(len, inputs))
    response = await run_in_threadpool(_answer, vectors, encoding)
    return json_response(
        {
            "object": "list",
            "data": response,
            "model": model.name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


def _terms(body: EmbeddingBody) -> RequestOptions:
    names = ("priority", "cache_salt", "timeout_s")  # the tenant is not the client's to say
    return RequestOptions(**{name: value for name in names if (value := getattr(body, name)) is not None})


def _inputs(body: EmbeddingBody, terms: RequestOptions, model: ServedModel) -> list[list[int]]:
    """Each as ids. A long text takes long to read."""
    generation = GenerationRequest(params=EMBEDDING, terms=terms, grammar=None, stream=False, without_tokens=True)
    inputs = []
    for place, text in enumerate(prompt_list(body.input, param="input", most=MAX_INPUTS)):
        special = body.add_special_tokens is not False
        if isinstance(text, str):
            whole = model.text().encode(model.readable(text, "input"), special)
        else:
            whole = model.checked_ids(text, "input")
        if not whole:
            raise InvalidPrompt(f"input {place} is empty: there is nothing to embed.", param="input")
        ids = truncate_prompt(whole, body.truncate_prompt_tokens, generation, model)
        model.check_least(len(ids), "input", at_least=False)
        inputs.append(ids)
    return inputs


async def _embedded(
    engine: AsyncEngine, inputs: Sequence[list[int]], terms: RequestOptions, dimensions: int | None
) -> list[FloatArray]:
    """All of them, some at a time, in order. One failure is everybody's."""
    vectors: list[FloatArray] = []
    waiting = deque(inputs)
    calls: deque[RequestStream] = deque()
    try:
        while waiting or calls:
            while waiting and len(calls) < _AT_ONCE:
                calls.append(engine.embed(waiting.popleft(), terms=terms))
            vectors.append(_cut(await _vector(calls[0]), dimensions))
            calls.popleft()
    finally:
        for call in calls:
            engine.leave(call)
    return vectors


async def _vector(call: RequestStream) -> FloatArray:
    while not isinstance(update := await call.hear(), RequestOutput):
        pass
    assert update.embedding is not None, update.request_id
    return update.embedding


def _cut(vector: FloatArray, dimensions: int | None) -> FloatArray:
    """Its first dimensions, at length one again."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise InvalidParameter(
            f"dimensions is {dimensions}, but this model's embeddings have {len(vector)}.", param="dimensions"
        )
    return unit(vector[:dimensions])


def _answer(vectors: Sequence[FloatArray], encoding: str) -> list[dict[str, object]]:
    told = [_as_base64(vector) if encoding == "base64" else vector.tolist() for vector in vectors]
    return [{"object": "embedding", "index": place, "embedding": each} for place, each in enumerate(told)]


def _as_base64(vector: FloatArray) -> str:
    """Little-endian float32, as OpenAI's clients read it."""
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()

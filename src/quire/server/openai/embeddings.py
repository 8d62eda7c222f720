"""POST /v1/embeddings: one vector per input, in the order of the inputs."""

import base64
from collections import deque
from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidParameter, InvalidPrompt
from quire.core.ids import FloatArray
from quire.engine.messages import RequestOptions
from quire.engine.outputs import EMBEDDING, unit
from quire.server.async_engine import AsyncEngine, RequestStream
from quire.server.context import ServedModel, ServerState
from quire.server.http.errors import rename_error_params
from quire.server.http.sse import json_response, until_disconnect
from quire.server.request.decode import read
from quire.server.request.params import GenerationRequest, keeps_start, prompt_list, truncate_prompt
from quire.server.request.schema import EmbeddingBody

MAX_INPUTS = 2048  # OpenAI's limit
_AT_ONCE = (
    32  # inputs of one request in the engine at once: enough to fill a step, and other requests still get a share
)
_FORMATS = ("float", "base64")
_PARAM_NAMES = {"messages": "input", "prompt": "input"}


async def embeddings(state: ServerState, request: Request) -> Response:
    body = await read(request, EmbeddingBody)
    model = state.model
    model.check_model(body.model)
    encoding = body.encoding_format or "float"
    if encoding not in _FORMATS:
        raise InvalidParameter(f"encoding_format must be one of {', '.join(_FORMATS)}.", param="encoding_format")
    if body.dimensions is not None and body.dimensions < 1:
        raise InvalidParameter(f"dimensions is {body.dimensions}; the least is 1.", param="dimensions")
    options = _options(body)
    with rename_error_params(_PARAM_NAMES):
        inputs = await model.text_threads.run(_inputs, body, options, model)
        vectors = await until_disconnect(request, _embed(state.engine, inputs, options, body.dimensions))
    num_tokens = sum(map(len, inputs))
    data = await run_in_threadpool(_data, vectors, encoding)
    return json_response(
        {
            "object": "list",
            "data": data,
            "model": model.name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


def _options(body: EmbeddingBody) -> RequestOptions:
    names = ("priority", "cache_salt", "timeout_s")  # not the tenant, which follows from the API key
    return RequestOptions(**{name: value for name in names if (value := getattr(body, name)) is not None})


def _inputs(body: EmbeddingBody, options: RequestOptions, model: ServedModel) -> list[list[int]]:
    """The inputs as token ids. Encoding long texts is slow: call it on a thread."""
    generation = GenerationRequest(
        params=EMBEDDING,
        options=options,
        grammar=None,
        stream=False,
        without_tokens=True,
        keeps_start=keeps_start(body.truncation_side),
    )
    inputs = []
    for place, text in enumerate(prompt_list(body.input, param="input", most=MAX_INPUTS)):
        special = body.add_special_tokens is not False
        if isinstance(text, str):
            truncated = body.truncate_prompt_tokens is not None
            whole = model.prompt_ids(text, "input", add_special_tokens=special, truncated=truncated)
        else:
            whole = model.checked_ids(text, "input")
        if not whole:
            raise InvalidPrompt(f"input {place} is empty: there is nothing to embed.", param="input")
        ids = truncate_prompt(whole, body.truncate_prompt_tokens, generation, model)
        model.check_length(len(ids), "input", at_least=False)
        inputs.append(ids)
    return inputs


async def _embed(
    engine: AsyncEngine, inputs: Sequence[list[int]], options: RequestOptions, dimensions: int | None
) -> list[FloatArray]:
    """The vectors of all inputs, `_AT_ONCE` at a time, in order. One failure fails the request."""
    vectors: list[FloatArray] = []
    waiting = deque(inputs)
    calls: deque[RequestStream] = deque()
    try:
        while waiting or calls:
            while waiting and len(calls) < _AT_ONCE:
                calls.append(engine.submit(waiting.popleft(), EMBEDDING, options=options, pooled=True))
            output = await calls[0].output()
            assert output.embedding is not None, output.request_id
            vectors.append(_truncate(output.embedding, dimensions))
            calls.popleft()
    finally:
        for call in calls:
            call.close()
    return vectors


def _truncate(vector: FloatArray, dimensions: int | None) -> FloatArray:
    """The first dimensions, normalized to length 1."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise InvalidParameter(
            f"dimensions is {dimensions}, but this model's embeddings have {len(vector)}.", param="dimensions"
        )
    return unit(vector[:dimensions])


def _data(vectors: Sequence[FloatArray], encoding: str) -> list[dict[str, object]]:
    """base64: of little-endian float32, the format of OpenAI's clients."""
    data: list[dict[str, object]] = []
    for place, vector in enumerate(vectors):
        binary = encoding == "base64"
        embedding = base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode() if binary else vector.tolist()
        data.append({"object": "embedding", "index": place, "embedding": embedding})
    return data

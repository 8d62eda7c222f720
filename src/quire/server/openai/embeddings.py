"""POST /v1/embeddings: one vector per input, in the order of the inputs."""

import base64
from collections.abc import Sequence

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidParameter
from quire.core.ids import FloatArray
from quire.server.context import ServerState
from quire.server.http.errors import rename_error_params
from quire.server.http.sse import json_response, until_disconnect
from quire.server.prompt_group import embed, input_ids
from quire.server.request.decode import read
from quire.server.request.schema import EmbeddingBody

_FORMATS = ("float", "base64")
_PARAM_NAMES = {"messages": "input", "prompt": "input"}


async def embeddings(state: ServerState, request: Request) -> Response:
    body = await read(request, EmbeddingBody)
    model = state.model
    model.check_model(body.model)
    encoding = body.encoding_format or "float"
    if encoding not in _FORMATS:
        raise InvalidParameter(f"encoding_format must be one of {', '.join(_FORMATS)}.", param="encoding_format")
    with rename_error_params(_PARAM_NAMES):
        inputs = await model.text_threads.run(input_ids, body, model)
        vectors = await until_disconnect(request, embed(state.engine, inputs, body))
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


def _data(vectors: Sequence[FloatArray], encoding: str) -> list[dict[str, object]]:
    """base64: of little-endian float32, the format of OpenAI's clients."""
    data: list[dict[str, object]] = []
    for place, vector in enumerate(vectors):
        binary = encoding == "base64"
        embedding = base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode() if binary else vector.tolist()
        written = msgspec.Raw(msgspec.json.encode(embedding))  # one by one: all at once would hold up other threads
        data.append({"object": "embedding", "index": place, "embedding": written})
    return data

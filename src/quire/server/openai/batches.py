"""OpenAI's batches: POST /v1/batches, retrieve, list, cancel. `server/batch/service.py` runs them."""

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidParameter, shown
from quire.server.batch_store import BatchStore
from quire.server.context import ServerState
from quire.server.http.sse import json_response
from quire.server.openai.files import FilesNotServed, owner_of, page
from quire.server.request.decode import read

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")  # OpenAI's
_NUM_LISTED, _MAX_LISTED = 20, 100


class BatchBody(Struct, kw_only=True):
    """The body of POST /v1/batches: a file with one request per line, all for one endpoint."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


async def create_batch(state: ServerState, request: Request) -> Response:
    body = await read(request, BatchBody)
    batches, owner = batches_of(state), owner_of(request)
    if body.endpoint not in ENDPOINTS:
        raise InvalidParameter(
            f"endpoint is {shown(body.endpoint)}; it may be one of {', '.join(ENDPOINTS)}.", param="endpoint"
        )
    source = batches.files.find(owner, body.input_file_id)
    if source.purpose != "batch":
        raise InvalidParameter(
            f"The file was uploaded for {shown(source.purpose)}; upload it with the purpose batch.",
            param="input_file_id",
        )
    batch = batches.create(owner, source, body.endpoint, body.completion_window, body.metadata)
    return json_response(batch.public())


async def retrieve_batch(state: ServerState, request: Request) -> Response:
    batch = batches_of(state).find(owner_of(request), request.path_params["batch_id"])
    return json_response(batch.public())


async def cancel_batch(state: ServerState, request: Request) -> Response:
    batches = batches_of(state)
    batch = batches.find(owner_of(request), request.path_params["batch_id"])
    batches.cancel(batch)
    return json_response(batch.public())


async def list_batches(state: ServerState, request: Request) -> Response:
    found = batches_of(state).owned(owner_of(request))
    return page(request, [(batch.id, batch.public()) for batch in found], _NUM_LISTED, _MAX_LISTED)


def batches_of(state: ServerState) -> BatchStore:
    if state.batches is None:
        raise FilesNotServed
    return state.batches

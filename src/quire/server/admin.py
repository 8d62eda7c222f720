"""For those who run the server: health, readiness, load, metrics, and, with the admin key, why a request waited.

Health is progress: it follows from the beats of the engine's own loop, never from this process being alive.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import QuireError
from quire.server.context import ServerState
from quire.server.engine_supervisor import Health
from quire.server.http.sse import json_response
from quire.server.metrics import CONTENT_TYPE
from quire.server.request.decode import read

UNHEALTHY_AFTER_S = 30.0  # without a beat; the supervisor kills the engine at the same moment


class UnknownRequest(QuireError):
    """No request of that id is remembered."""

    status = 404
    code = "unknown_request"


class AbortBody(msgspec.Struct, frozen=True):
    """Which requests are to end: the ids that `x-quire-request-id` told."""

    request_ids: list[str]


async def health(desk: ServerState, request: Request) -> Response:
    """Whether the engine lives and its loop turns."""
    state = desk.health
    alive = state is Health.READY or (state is Health.STALLED and desk.supervisor.stalled_s < UNHEALTHY_AFTER_S)
    return json_response({"status": state.value}, 200 if alive else 503)


async def ready(desk: ServerState, request: Request) -> Response:
    """Whether a request sent now would be served."""
    state = "draining" if desk.service.draining else "paused" if desk.admission.paused else desk.health.value
    return json_response({"status": state}, 200 if state == Health.READY.value else 503)


async def load(desk: ServerState, request: Request) -> Response:
    stats = desk.service.stats
    told: dict[str, object] = {"server_load": desk.admission.num_open, "num_requests": desk.service.num_calls}
    if stats is not None:
        held = stats.num_blocks - stats.num_free_blocks - stats.num_idle_blocks
        told |= {
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "num_waiting_tokens": stats.num_waiting_tokens,
            "kv_cache_usage": held / stats.num_blocks if stats.num_blocks else 0.0,
            "waiting_for": stats.waiting_for,
        }
    return json_response(told)


async def metrics(desk: ServerState, request: Request) -> Response:
    return Response(desk.metrics.page(), media_type=CONTENT_TYPE)


async def explain(desk: ServerState, request: Request) -> Response:
    """The story of each prompt that a request brought."""
    request_id = request.path_params["request_id"]
    stories = [await desk.service.ask("explain", number) for number in _numbers(desk, request_id)]
    return json_response({"id": request_id, "requests": [msgspec.Raw(events) for events in stories]})


async def abort(desk: ServerState, request: Request) -> Response:
    body = await read(request, AbortBody)
    numbers = [number for request_id in body.request_ids for number in _numbers(desk, request_id)]
    return json_response({"aborted": sum(desk.service.abort(number) for number in numbers)})


async def reset_prefix_cache(desk: ServerState, request: Request) -> Response:
    return Response(await desk.service.ask("reset_prefix_cache"), media_type="application/json")


async def pause(desk: ServerState, request: Request) -> Response:
    """Nobody new comes in; whoever is inside is served to the end."""
    desk.admission.paused = True
    return json_response({"paused": True})


async def resume(desk: ServerState, request: Request) -> Response:
    desk.admission.paused = False
    return json_response({"paused": False})


def _numbers(desk: ServerState, request_id: str) -> tuple[int, ...]:
    numbers = desk.service.numbers_of(request_id)
    if not numbers:
        raise UnknownRequest(
            "No request of this id is remembered; the id is the one of the header x-quire-request-id.",
            param="request_id",
        )
    return numbers

"""Operations endpoints: health, readiness, load, metrics; with the admin key explain, abort, reset, restart, pause.

Health is progress: it follows from what the engine's loop does, not from this process being alive. What routers ask of
their workers (`/server_info`, `/model_info`, `/get_load`) has SGLang's fields.
"""

from collections.abc import Callable, Iterable
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidParameter, QuireError, shown
from quire.engine.stats import EngineInfo, EngineStats
from quire.server.admission import client_of
from quire.server.context import ServerState
from quire.server.engine_state import EngineState, follow
from quire.server.engine_supervisor import Health
from quire.server.fair_shares import FairShares
from quire.server.http.errors import TooManyStreams, sanitized
from quire.server.http.request_context import context_of
from quire.server.http.sse import EVENTS, KEEP_ALIVE_S, Events, json_response, numbered_event, stream
from quire.server.metrics import CONTENT_TYPE
from quire.server.request.decode import read
from quire.version import __version__

_MAX_DIGITS = 18
MAX_WATCHERS = 32  # streams of the engine's state; with those of clients below their share half as many again
_WATCHER_RETRY_S = 5.0


class UnknownRequest(QuireError):
    """No recent request has that id."""

    status = 404
    code = "unknown_request"


class AbortBody(msgspec.Struct, frozen=True):
    """The requests to abort: ids from the `x-quire-request-id` header."""

    request_ids: list[str]


async def health(state: ServerState, request: Request) -> Response:
    """Whether the engine is alive and its loop makes progress; if not, why, in one line."""
    health = state.health
    alive = health is Health.READY or (health is Health.STALLED and not state.supervisor.hangs)
    body = {"status": health.value}
    if health is not Health.READY and (reason := state.supervisor.reason) is not None:
        body["reason"] = sanitized(reason)
    return json_response(body, 200 if alive else 503)


async def ready(state: ServerState, request: Request) -> Response:
    """Whether a request sent now would be served."""
    status = "draining" if state.engine.draining else "paused" if state.admission.paused else state.health.value
    return json_response({"status": status}, 200 if status == Health.READY.value else 503)


async def load(state: ServerState, request: Request) -> Response:
    stats = state.engine.stats
    body: dict[str, object] = {"server_load": state.admission.num_open, "num_requests": state.engine.num_requests}
    if stats is not None:
        held = stats.num_blocks - stats.num_free_blocks - stats.num_evictable_blocks
        body |= {
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "num_waiting_tokens": stats.num_waiting_tokens,
            "kv_cache_usage": held / stats.num_blocks if stats.num_blocks else 0.0,
            "waiting_for": stats.waiting_for,
        }
    if state.replicas is not None:
        body["replicas"] = [each._asdict() for each in state.replicas.loads()]
    return json_response(body)


async def server_info(state: ServerState, request: Request) -> Response:
    """SGLang's: what a router registers a worker with. Of several models, the first."""
    listed = state.models[0]
    info = listed.info
    engine = {} if info is None else _engine_info(info)
    names = {"model_path": listed.model.name, "served_model_name": listed.model.name}
    return json_response(
        {**names, "tp_size": 1, "dp_size": 1, "context_length": listed.model.max_model_len, **engine,
         "disaggregation_mode": "null", "version": __version__}
    )  # fmt: skip


def _engine_info(info: EngineInfo) -> dict[str, object]:
    return {
        "tp_size": info.tensor_parallel_size,
        "pp_size": info.pipeline_parallel_size,
        "max_running_requests": info.max_num_seqs,
        "max_total_num_tokens": info.num_blocks * info.block_size,
        "page_size": info.block_size,
        "device": info.device,
        "dtype": info.dtype,
        "disable_radix_cache": not info.caches_prefixes,
    }


async def model_info(state: ServerState, request: Request) -> Response:
    """SGLang's. Of several models, the first."""
    model = state.models[0].model
    body: dict[str, object] = {
        "model_path": model.name,
        "tokenizer_path": model.name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }
    if model.summary is not None:
        body["model_type"] = model.summary.spec.family
    return json_response(body)


async def get_load(state: ServerState, request: Request) -> Response:
    return loads([state.engine.stats])


def loads(engines: Iterable[EngineStats | None]) -> Response:
    """SGLang's load of each engine: requests, and the tokens that they hold and wait for."""
    entries = []
    for rank, stats in enumerate(stats for stats in engines if stats is not None):
        held = stats.num_blocks - stats.num_free_blocks - stats.num_evictable_blocks
        entries.append(
            {
                "dp_rank": rank,
                "num_reqs": stats.num_running + stats.num_waiting,
                "num_waiting_reqs": stats.num_waiting,
                "num_tokens": held * stats.block_size + stats.num_waiting_tokens,
            }
        )
    return Response(msgspec.json.encode(entries), media_type="application/json")


async def metrics(state: ServerState, request: Request) -> Response:
    return Response(state.metrics.page(), media_type=CONTENT_TYPE)


async def explain(state: ServerState, request: Request) -> Response:
    """The scheduler's events of each prompt of a request."""
    request_id = request.path_params["request_id"]
    events = [await state.engine.query("explain", number) for number in _numbers(state, request_id)]
    return json_response({"id": request_id, "requests": [msgspec.Raw(each) for each in events]})


async def engine_state(state: ServerState, request: Request) -> Response:
    """What the page /engine shows: the state now, and the steps after `since`. The admin sees the names of all clients
    in the queue, others their own."""
    body = await state.engine_state.describe(read_since(request), own_name(request))
    return Response(body, media_type="application/json")


async def engine_events(state: ServerState, request: Request) -> Response:
    """The same as a stream of differences, which the page /engine reads."""
    own = own_name(request)
    return await stream_states(state.watchers, lambda: state.engine_state, request, own, state.keep_alive_s)


def own_name(request: Request) -> str | None:
    """The one client whose name a request may see. None: all, for the admin."""
    identity = context_of(request.scope).identity
    return None if identity.admin else client_of(identity, request.scope).name


async def stream_states(
    watchers: FairShares,
    find: Callable[[], EngineState],
    request: Request,
    own: str | None,
    keep_alive_s: float = KEEP_ALIVE_S,
) -> Response:
    """A stream of the state that `find` gives: it takes no place in the queue, so streams are counted on their own."""
    since = read_since(request)
    client = client_of(context_of(request.scope).identity, request.scope)
    if request.method == "HEAD":
        return Response(headers=EVENTS.headers)
    if not watchers.has_room(client, MAX_WATCHERS):
        error = TooManyStreams(
            f"{watchers.total} streams of the engine's state are open, {watchers.held(client)} of them by this client; "
            f"the limit is {MAX_WATCHERS}. Close one of them, or try again later."
        )
        error.retry_after_s = _WATCHER_RETRY_S
        raise error

    async def events() -> Events:
        async with aclosing(follow(find, since, own)) as found:
            async for each in found:
                yield numbered_event(each.step, each.body)

    watchers.take(client)
    return await stream(request, events(), lambda: watchers.release(client), keep_alive_s)


def read_since(request: Request) -> int:
    """The newest step that a client has: what it resumes a stream with counts before the address of the stream."""
    header = request.headers.get("last-event-id")
    name, since = ("since", request.query_params.get("since", "-1")) if header is None else ("Last-Event-ID", header)
    if not since.removeprefix("-").isdecimal() or len(since) > _MAX_DIGITS:
        raise InvalidParameter(f"{name} must be the number of a step, not {shown(since)}.", param=name)
    return int(since)


def read_number(request: Request) -> int:
    """The number of a request, in the path."""
    number: str = request.path_params["number"]
    if not number.isdecimal() or len(number) > _MAX_DIGITS:
        raise UnknownRequest("A request has a number; the page /engine shows it.", param="number")
    return int(number)


async def explain_number(state: ServerState, request: Request) -> Response:
    """The scheduler's events of a request, by its number in the engine."""
    story = msgspec.json.decode(await state.engine.query("explain", read_number(request)))
    if "problem" in story:
        raise UnknownRequest(story["problem"]["message"], param="number")
    return json_response(story)


async def abort(state: ServerState, request: Request) -> Response:
    body = await read(request, AbortBody)
    numbers = [number for request_id in body.request_ids for number in _numbers(state, request_id)]
    return json_response({"aborted": sum(state.engine.abort(number) for number in numbers)})


async def reset_prefix_cache(state: ServerState, request: Request) -> Response:
    return Response(await state.engine.query("reset_prefix_cache"), media_type="application/json")


async def rolling_restart(state: ServerState, request: Request) -> Response:
    """Replace the engines, one after the other; requests go on. Responds when all are replaced."""
    if state.replicas is None:
        raise InvalidParameter(
            "A rolling restart is of replicas, and this server has one engine for each model: start it with --replicas "
            "or --ray."
        )
    return json_response({"restarted": await state.replicas.rolling_restart()})


async def pause(state: ServerState, request: Request) -> Response:
    """Refuse new requests; those that are open run to their end."""
    state.admission.paused = True
    return json_response({"paused": True})


async def resume(state: ServerState, request: Request) -> Response:
    state.admission.paused = False
    return json_response({"paused": False})


def _numbers(state: ServerState, request_id: str) -> tuple[int, ...]:
    numbers = state.engine.numbers_of(request_id)
    if not numbers:
        raise UnknownRequest(
            "No recent request has this id; send the id from the header x-quire-request-id.",
            param="request_id",
        )
    return numbers

"""A journal in the page /engine: the recorded decisions are made again, and the page shows the scheduler at any step.

`ReplayPlayer` moves when it is asked for its state, by the same stream as an engine: nothing runs while no page is
open. Forward it repeats the recorded calls, backward it starts again. Depends on no model and no runner. Listens on
this machine only.
"""

import math
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from quire.core.ids import RequestId
from quire.engine.engine_view import EngineView
from quire.sched.journal.replay import Condition, Difference, JournalContents, Replayer
from quire.sched.scheduler import Scheduler
from quire.server.admin import UnknownRequest, read_number, stream_states
from quire.server.engine_state import EngineState
from quire.server.fair_shares import FairShares
from quire.server.http.access import AccessOptions
from quire.server.http.auth import KeyRing
from quire.server.http.errors import HANDLERS
from quire.server.http.middleware import RequestLogger, secure
from quire.server.http.protocol import connection_limits, guarded
from quire.server.http.request_context import RequestRecord
from quire.server.http.sse import json_response
from quire.server.request.decode import read
from quire.server.static_files import static_file, static_routes

HOST = "127.0.0.1"
_MAX_BODY_BYTES = 4096
_SLICE_S = 0.1  # of the time of one description: a longer way to a step takes several
_MAX_SILENCE_S = 0.5  # between two descriptions, of which steps are played: a hidden page closes its stream
_FIRST_SPEED = 20.0  # steps per second
_MOVING_S, _RESTING_S = 0.1, 10.0  # between two events of a stream; a control is answered at once


class ReplayControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the page asks for; None: as it is."""

    playing: bool | None = None
    position: Annotated[int, msgspec.Meta(ge=0)] | None = None  # number of steps
    speed: Annotated[float, msgspec.Meta(gt=0, le=10_000)] | None = None  # steps per second


class ReplayPlayer:
    """A position in a journal: the number of steps that were replayed."""

    def __init__(self, contents: JournalContents, clock: Callable[[], float]) -> None:
        self._contents = contents
        self._clock = clock
        self._num_steps = contents.num_absorbed
        self._playing = False
        self._speed = _FIRST_SPEED
        self._asked_s = clock()
        self._target = 0.0  # the position to go to
        self._difference: Difference | None = None  # at the last step that can be replayed
        self._restart()

    @property
    def scheduler(self) -> Scheduler:
        return self._replayer.scheduler

    def control(self, change: ReplayControl) -> None:
        if change.speed is not None:
            self._speed = change.speed
        if change.position is not None:
            self._target = float(min(change.position, self._num_steps))
        if change.playing is not None:
            self._playing = change.playing
            self._asked_s = self._clock()
        if self._playing and self._target >= self._num_steps and change.position is None:
            self._target = 0.0  # played again from the start

    def describe(self, since: int) -> dict[str, object]:
        """The state at the position, moved by the time since the last call, and the steps after `since`."""
        self._move()
        return {**self._view.describe(since), "replay": self.status()}

    @property
    def moves(self) -> bool:
        return self._playing or self._position != int(self._target)

    def status(self) -> dict[str, object]:
        return {
            "name": self._contents.path.name,
            "position": self._position,
            "target": int(self._target),
            "num_steps": self._num_steps,
            "playing": self._playing,
            "speed": self._speed,
            "notice": self.notice(),
        }

    def notice(self) -> str:
        """What is wrong with the journal, in a sentence; empty if nothing is."""
        difference = self._difference
        if difference is not None:
            return (
                f"The replay ends after {self._num_steps:,} steps: step {difference.step} is not as recorded. "
                f"Recorded: {difference.recorded}. Replayed: {difference.replayed}."
            )
        if self._contents.condition is Condition.COMPLETE:
            return ""
        return f"The journal is {self._contents.condition.value}; {self._num_steps:,} steps of it can be replayed."

    def explain(self, request_id: RequestId) -> tuple[str, ...]:
        """The story of a request that is waiting or running at this position."""
        group = self.scheduler.group(request_id)
        if group is None:
            raise UnknownRequest(f"Request {request_id} is not open at this step.", param="number")
        return self.scheduler.explain(group).lines()

    def _restart(self) -> None:
        self._replayer = Replayer(self._contents)
        self._position = 0
        self._view = EngineView(self, lambda: self._replayer.now_s, watched_s=math.inf, number=0)
        self._view.describe(-1)  # records steps from now on

    def _move(self) -> None:
        """Go towards the target, which moves with the time while the journal is played."""
        now_s = self._clock()
        silence_s, self._asked_s = min(now_s - self._asked_s, _MAX_SILENCE_S), now_s
        if self._playing and self._position >= int(self._target):
            self._target = min(self._target + silence_s * self._speed, float(self._num_steps))
        if int(self._target) < self._position:
            self._restart()
        while self._position < int(self._target) and self._clock() < now_s + _SLICE_S:
            if not self._replayer.advance():
                self._difference = self._replayer.difference
                self._num_steps, self._target = self._position, float(self._position)
                break
            self._position += 1
            self._view.note_step(self._replayer.started_s)
        self._playing &= self._position < self._num_steps


class _Replay:
    """What the handlers get: the player, and the streams of its state."""

    def __init__(self, player: ReplayPlayer) -> None:
        self.player = player
        self.watchers = FairShares()
        self.state = EngineState(self._describe, time.monotonic, lambda: _MOVING_S if player.moves else _RESTING_S)

    async def _describe(self, what: str, since: int) -> bytes:
        return msgspec.json.encode(self.player.describe(since))


async def _engine_events(replay: _Replay, request: Request) -> Response:
    return await stream_states(replay.watchers, lambda: replay.state, request, own=None)


async def _control(replay: _Replay, request: Request) -> Response:
    replay.player.control(await read(request, ReplayControl))
    replay.state.wake()
    return json_response(replay.player.status())


async def _explain(replay: _Replay, request: Request) -> Response:
    return json_response({"lines": replay.player.explain(RequestId(read_number(request)))})


async def _to_engine(replay: _Replay, request: Request) -> Response:
    return RedirectResponse("/engine")


def _app_of(replay: _Replay) -> RequestLogger:
    """The page /engine and its files, its state, and the controls of the player. With the access checks of a server
    without keys: no page of another origin may use it."""
    files = {path: name for path, name in static_routes().items() if path == "/engine" or path.startswith("/pages/")}
    handlers: dict[tuple[str, str], Callable[[_Replay, Request], Awaitable[Response]]] = {
        ("GET", "/"): _to_engine,
        ("GET", "/engine/events"): _engine_events,
        ("GET", "/engine/requests/{number}/explain"): _explain,
        ("POST", "/replay"): _control,
    }
    routes = [Route(path, partial(handler, replay), methods=[method]) for (method, path), handler in handlers.items()]
    routes += [Route(path, partial(static_file, name)) for path, name in files.items()]
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.router.redirect_slashes = False  # a redirect would follow the Host header that the client sent
    options = AccessOptions(max_body_bytes=_MAX_BODY_BYTES, own_host=HOST)
    return secure(app, keys=KeyRing([]), options=options)


def _unobserved(record: RequestRecord) -> None:
    """Requests of one's own page are not logged."""


class ReplayServer(uvicorn.Server):
    """Ends the streams when it stops: they have no end of their own."""

    def __init__(self, config: uvicorn.Config, end_watching: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_watching = end_watching

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_watching()
        await super().shutdown(sockets)


def replay_server(player: ReplayPlayer) -> ReplayServer:
    replay = _Replay(player)
    app = _app_of(replay)
    protocol = guarded(
        connection_limits(_MAX_BODY_BYTES), _unobserved, app, replies_early=True, slow_reader=lambda client: None
    )
    config = uvicorn.Config(
        app, http=protocol, ws="none", lifespan="off", log_config=None, log_level="error", server_header=False,
        proxy_headers=False, access_log=False, timeout_graceful_shutdown=1,
    )  # fmt: skip
    return ReplayServer(config, replay.state.close)

"""Several engines of one model behind one front: which of them gets a request, and what they are as one engine.

A request goes where most of its prompt is likely to be cached, unless that replica has too many others. What a replica
has cached is estimated from the prompts that were sent there. Each replica has an engine process, a client and a
supervisor of its own: when one dies, another begins those of its requests again of which no client has any output, and
the rest fail. Does not depend on HTTP, nor on where the engines are.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import NamedTuple, Unpack

import msgspec

from quire.core.errors import Draining, EngineFailed, QuireError
from quire.core.sampling import SamplingParams
from quire.engine.messages import DEFAULT_OPTIONS, SubmitOptions
from quire.engine.prefix_transfer import EngineRole
from quire.engine.stats import EngineInfo, EngineStats
from quire.sched.prefix_router import CHUNK_TOKENS, PrefixRouter, prefix_hashes
from quire.server.async_engine import AsyncEngine, EngineRestarting, options_for
from quire.server.autoscaling import Autoscaler, ReplicaLimits
from quire.server.engine_supervisor import Health, Supervisor
from quire.server.http.request_context import CURRENT_CONTEXT
from quire.server.prefill_decode import READS_PROMPT, PrefillEngines
from quire.server.request_stream import RequestStream

_OF_ALL = ("reset_prefix_cache", "drain")  # queries that every replica answers
_NOT_COUNTED = ("step", "block_size", "num_running", "num_waiting", "num_waiting_tokens", "num_blocks",
                "num_free_blocks", "num_cached_blocks", "num_evictable_blocks", "num_reserved_blocks",
                "num_host_blocks", "captured_shapes", "captured_bytes", "waiting_for")  # fmt: skip
_SCALE_S = 0.5  # between two decisions about the number of replicas
_RETRY_S = 60.0  # after a further replica could not be started
_POLL_S = 0.05
COUNTERS = tuple(field.name for field in fields(EngineStats) if field.name not in _NOT_COUNTED)

_log = logging.getLogger(__name__)


class ReplicaLoad(NamedTuple):
    """One replica, for `/load`."""

    replica: int
    health: str
    num_requests: int  # open
    num_submitted: int  # since the start of the server
    num_restarts: int
    role: str
    pid: int | None  # of the engine process, if it runs
    num_held_blocks: int | None  # KV blocks that are neither free nor cached; None: not known yet


class ReplicatedEngine:
    """The replicas as one engine. Request numbers tell the replica: number modulo their count."""

    def __init__(self, engines: Sequence[AsyncEngine], prefill: PrefillEngines | None = None) -> None:
        self.engines = engines
        self.prefill = prefill  # if there are prefill engines, these are decode engines
        self._router = PrefixRouter(len(engines))
        self.num_submitted = [0] * len(engines)
        self._earlier = dict.fromkeys(COUNTERS, 0)  # counted by engines that are gone
        self.is_ready: Callable[[int], bool] = lambda rank: True
        for rank, engine in enumerate(engines):
            engine.lost = lambda rank=rank: self._note_loss(rank)  # type: ignore[misc]
            engine.move = self._move

    def _note_loss(self, rank: int) -> None:
        self._router.forget(rank)
        stats = self.engines[rank].stats
        if stats is not None:
            for name in COUNTERS:
                self._earlier[name] += getattr(stats, name)

    def _move(self, stream: RequestStream) -> bool:
        """Begin a request again that was lost with its replica, where its prompt costs least; False if none runs."""
        loads = self._running()
        if not loads:
            return False
        request = stream.state.request
        hashes = prefix_hashes(request.options.partition, request.prompt)
        rank = self._router.choose(loads, hashes)
        self.engines[rank].adopt(stream)
        self._router.note(rank, hashes)
        self.num_submitted[rank] += 1
        return True

    def submit(self, prompt: Sequence[int], params: SamplingParams, **keywords: Unpack[SubmitOptions]) -> RequestStream:
        """Submit a request to the replica where its prompt costs least. If there are prefill engines, and all requests
        wait less so, one of them computes the prompt before."""
        loads = self._loads()
        options = options_for(CURRENT_CONTEXT.get(), keywords.get("options", DEFAULT_OPTIONS))
        hashes = prefix_hashes(options.partition, prompt)
        rank = self._router.choose(loads, hashes)
        engine = self.engines[rank]
        num_cached = CHUNK_TOKENS * self._router.num_known(rank, hashes)
        splits = False
        if self.prefill is not None:
            reads_all = keywords.get("pooled") or keywords.get("without_tokens") or params.prompt_logprobs is not None
            routing = READS_PROMPT if reads_all else self.prefill.route(len(prompt), engine, num_cached, hashes)
            splits, keywords["routing"] = routing
        stream = engine.submit(prompt, params, held=splits, **keywords)
        if not splits:
            engine.expect_prompt(stream, len(prompt) - num_cached)
        note = partial(self._router.note, rank)
        if splits and self.prefill is not None:  # what follows with the same prefix is not sent before it is there
            self.prefill.begin(stream, engine, hashes, partial(note, hashes))
        if engine.info is not None:
            self._router.limit(rank, engine.info.num_blocks * engine.info.block_size)
        note(() if splits else hashes)
        self.num_submitted[rank] += 1
        return stream

    def _loads(self) -> dict[int, int]:
        """Open requests of the replicas that may be chosen: those that are ready, or else all that run."""
        if self.draining:
            raise Draining
        running = self._running()
        if not running:
            raise EngineRestarting("The engines are being started; try again in a moment.")
        return running

    def _running(self) -> dict[int, int]:
        running = {rank: each.num_requests for rank, each in enumerate(self.engines) if each.attached}
        return {rank: load for rank, load in running.items() if self.is_ready(rank)} or running

    def abort(self, number: int) -> bool:
        return self._of(number).abort(number)

    def _of(self, number: int) -> AsyncEngine:
        return self.engines[number % len(self.engines)]

    def fail_all(self, failure: Callable[[], QuireError]) -> None:
        for engine in self.engines:
            engine.fail_all(failure)

    def numbers_of(self, request_id: str) -> tuple[int, ...]:
        return tuple(number for engine in self.engines for number in engine.numbers_of(request_id))

    async def query(self, what: str, number: int = 0) -> bytes:
        """Of the replica that has a request, of all of them, or else of the first that runs."""
        if what == "explain":
            return await self._of(number).query(what, number)
        running = [engine for engine in self.engines if engine.attached] or [self.engines[0]]
        if what not in _OF_ALL:
            return await running[0].query(what, number)
        if what == "reset_prefix_cache":
            for rank in range(len(self.engines)):
                self._router.forget(rank)
            running += [] if self.prefill is None else [each for each in self.prefill.engines if each.attached]
        replies = [msgspec.json.decode(await engine.query(what, number)) for engine in running]
        return msgspec.json.encode({name: sum(reply[name] for reply in replies) for name in replies[0]})

    @property
    def draining(self) -> bool:
        return self.engines[0].draining

    @draining.setter
    def draining(self, value: bool) -> None:
        for engine in self.engines:
            engine.draining = value

    @property
    def attached(self) -> bool:
        return any(engine.attached for engine in self.engines)

    @property
    def num_requests(self) -> int:
        return sum(engine.num_requests for engine in self.engines)

    @property
    def info(self) -> EngineInfo | None:
        """Of the first, with the rows and blocks of all."""
        known = [engine.info for engine in self.engines if engine.info is not None]
        if not known:
            return None
        rows, blocks = sum(info.max_num_seqs for info in known), sum(info.num_blocks for info in known)
        return replace(known[0], max_num_seqs=rows, num_blocks=blocks)

    @property
    def stats(self) -> EngineStats | None:
        """Sums; what earlier engines have counted is in them."""
        known = [engine.stats for engine in self.engines if engine.stats is not None]
        if not known:
            return None
        sums = {
            field.name: sum(getattr(stats, field.name) for stats in known) + self._earlier.get(field.name, 0)
            for field in fields(EngineStats)
            if field.name not in ("step", "block_size", "waiting_for")
        }
        waiting_for = next((stats.waiting_for for stats in known if stats.waiting_for is not None), None)
        step = max(stats.step for stats in known)
        return replace(known[0], **sums, step=step, waiting_for=waiting_for)

    def remove(self, rank: int) -> None:
        """A replica was stopped, and its rows and blocks do not count."""
        self.engines[rank].info = None

    def rows_of(self, ranks: Iterable[int]) -> int:
        """Sequences that these replicas can run."""
        infos = (self.engines[rank].info for rank in ranks)
        return sum(info.max_num_seqs for info in infos if info is not None)


class RestartRunning(QuireError):
    """The replicas are being restarted already."""

    status = 409
    code = "restart_running"


class ReplicaSupervisor:
    """The supervisors of all replicas. One that cannot be started again is given up while another runs.

    With limits, replicas are started while requests wait, and stopped while few come. A replica that is to be stopped
    gets no more requests, and is stopped when those that it has are answered.
    """

    def __init__(
        self,
        supervisors: Sequence[Supervisor],
        engine: ReplicatedEngine,
        prefill: Sequence[Supervisor] = (),
        limits: ReplicaLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.supervisors = supervisors
        self.prefill = prefill  # of prefill engines: without them, requests are served all the same
        self._engine = engine
        self._autoscaler = None if limits is None else Autoscaler(limits)
        self._clock = clock
        self._started = set(range(len(supervisors) if limits is None else limits.min_replicas))
        self._leaving: set[int] = set()  # of these: get no more requests, and are stopped
        self._given_up: set[int] = set()
        self._refused_s: float | None = None  # when a further replica could not be started
        self._tasks: asyncio.TaskGroup | None = None  # while they are watched
        self._watching: dict[int, asyncio.Task[None]] = {}  # by replica
        self._restarting: asyncio.Task[int] | None = None
        self._stopping = False
        engine.is_ready = self._is_ready
        if engine.prefill is not None:
            engine.prefill.is_ready = lambda rank: prefill[rank].health is Health.READY

    def _is_ready(self, rank: int) -> bool:
        return rank not in self._leaving and self.supervisors[rank].health is Health.READY

    @property
    def health(self) -> Health:
        """READY if one is."""
        found = [self.supervisors[rank].health for rank in sorted(self._started)] or [Health.STARTING]
        return Health.READY if Health.READY in found else found[0]

    @property
    def hangs(self) -> bool:
        return all(self.supervisors[rank].hangs for rank in self._started)

    @property
    def reason(self) -> str | None:
        reasons = ((rank, self.supervisors[rank].reason) for rank in sorted(self._started))
        return "; ".join(f"replica {rank}: {reason}" for rank, reason in reasons if reason is not None) or None

    @property
    def num_restarts(self) -> int:
        return sum(each.num_restarts for each in (*self.supervisors, *self.prefill))

    async def first_start(self) -> EngineInfo:
        """Start as many as there are at first, at the same time."""
        self._stopping = False
        async with asyncio.TaskGroup() as tasks:
            for each in (*(self.supervisors[rank] for rank in self._started), *self.prefill):
                tasks.create_task(each.first_start())
        info = self._engine.info
        assert info is not None
        return info

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for rank in self._started:
                self._watching[rank] = tasks.create_task(self._watch_one(rank))
            for rank, each in enumerate(self.prefill):
                tasks.create_task(self._watch_prefill(rank, each))
            if self._autoscaler is not None:
                tasks.create_task(self._scale(self._autoscaler))

    async def _watch_prefill(self, rank: int, supervisor: Supervisor) -> None:
        try:
            await supervisor.watch()
        except QuireError as error:
            _log.error("prefill engine %d is given up: %s", rank, error.message)

    async def _watch_one(self, rank: int) -> None:
        try:
            await self.supervisors[rank].watch()
        except QuireError as error:
            self._given_up.add(rank)
            if self._started <= self._given_up:
                raise
            _log.error("replica %d is given up: %s", rank, error.message)

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*(each.stop() for each in (*self.supervisors, *self.prefill)))

    # Replicas come and go.

    def _start(self, rank: int) -> None:
        assert self._tasks is not None and rank not in self._started, rank
        self._started.add(rank)
        self._watching[rank] = self._tasks.create_task(self._start_and_watch(rank))

    async def _start_and_watch(self, rank: int) -> None:
        try:
            await self.supervisors[rank].first_start()
        except QuireError as error:
            if self.supervisors[rank].health is not Health.STOPPED:
                _log.error("replica %d could not be started: %s", rank, error.message)
                self._started.discard(rank)
                self._refused_s = self._clock()
            return
        await self._watch_one(rank)

    async def _stop_one(self, rank: int) -> None:
        await self.supervisors[rank].stop()
        await self._watching[rank]
        self._engine.remove(rank)
        self._started.discard(rank)
        self._leaving.discard(rank)

    async def _scale(self, autoscaler: Autoscaler) -> None:
        while not self._stopping:
            await asyncio.sleep(_SCALE_S)
            if self._restarting is None and not self._engine.draining and not self._stopping:
                await self._scale_once(autoscaler)

    async def _scale_once(self, autoscaler: Autoscaler) -> None:
        """Start or stop replicas, as the queue asks for. Those that start count as if they were there."""
        serving = self._started - self._leaving - self._given_up
        ready = {rank for rank in serving if self._is_ready(rank)}
        wanted = autoscaler.wanted(len(ready), self._engine.rows_of(ready), self._engine.stats, self._clock())
        for _ in range(wanted - len(serving)):
            self._add_one()
        if wanted < len(ready):  # first one that has not started yet, then the one with fewest requests
            rank = min(serving, key=lambda rank: (rank in ready, self._engine.engines[rank].num_requests, -rank))
            _log.info("replica %d is stopped: %d are enough", rank, wanted)
            self._leaving.add(rank)
        for rank in [each for each in self._leaving if not self._engine.engines[each].num_requests]:
            await self._stop_one(rank)

    def _add_one(self) -> None:
        if self._leaving:
            self._leaving.pop()
            return
        free = set(range(len(self.supervisors))) - self._started - self._given_up
        if free and (self._refused_s is None or self._clock() - self._refused_s >= _RETRY_S):
            _log.info("replica %d is started: requests wait", min(free))
            self._start(min(free))

    async def rolling_restart(self) -> int:
        """Replace all replicas, one after the other, and lose no request; their number. A replica is stopped when it
        has answered what it has, and while another is ready: of one alone, its successor is started first."""
        if self._restarting is not None:
            raise RestartRunning("The replicas are being restarted already; wait until that has ended.")
        if self._tasks is None or self._stopping:
            raise EngineRestarting("The engines are being started; try again in a moment.")
        self._restarting = asyncio.create_task(self._restart_all())  # goes on if the client leaves
        self._restarting.add_done_callback(self._end_restart)
        return await asyncio.shield(self._restarting)

    def _end_restart(self, task: "asyncio.Task[int]") -> None:
        self._restarting = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the rolling restart ended: %s", error)

    async def _restart_all(self) -> int:
        ranks = sorted(self._started - self._leaving - self._given_up)
        for rank in ranks:
            others = [each for each in self._started - {rank} if self._is_ready(each)]
            free = set(range(len(self.supervisors))) - self._started - self._given_up
            successor = rank if others else min(free, default=rank)
            if successor != rank:
                self._start(successor)
                await self._until_ready(successor)
            self._leaving.add(rank)
            while self._engine.engines[rank].num_requests:
                await asyncio.sleep(_POLL_S)
            await self._stop_one(rank)
            if successor == rank:
                self._start(rank)
                await self._until_ready(rank)
        return len(ranks)

    async def _until_ready(self, rank: int) -> None:
        while not self._is_ready(rank):
            if rank not in self._started or self._stopping:
                raise EngineFailed(f"Replica {rank} could not be started; the others go on.")
            await asyncio.sleep(_POLL_S)

    def loads(self) -> list[ReplicaLoad]:
        split = self._engine.prefill
        role = EngineRole.WHOLE if split is None else EngineRole.DECODE
        loads = []
        for rank in sorted(self._started):
            counted = self._engine.num_submitted[rank]
            load = _load_of(rank, self.supervisors[rank], self._engine.engines[rank], counted, role)
            loads.append(load._replace(health="draining") if rank in self._leaving else load)
        for rank, each in enumerate(self.prefill if split is not None else ()):
            assert split is not None
            counted = split.num_submitted[rank]
            loads.append(_load_of(rank, each, split.engines[rank], counted, EngineRole.PREFILL))
        return loads


def _load_of(
    rank: int, supervisor: Supervisor, engine: AsyncEngine, num_submitted: int, role: EngineRole
) -> ReplicaLoad:
    stats = engine.stats
    held = None if stats is None else stats.num_blocks - stats.num_free_blocks - stats.num_evictable_blocks
    pid = supervisor.engine_pid if engine.attached else None
    counts = (engine.num_requests, num_submitted, supervisor.num_restarts)
    return ReplicaLoad(rank, supervisor.health.value, *counts, role.value, pid, held)

"""Several models behind one server: which are loaded, which one is unloaded for another, and the requests that wait.

Each model has a `Server` of its own, with an engine process and a supervisor; unloading it ends the process. One model
is loaded or unloaded at a time, and the model whose request has waited longest is next. Where it does not fit beside
the loaded ones, the least recently used model without a request is unloaded. If all have requests, the one that was
loaded first gets no new ones, after a turn, until it is idle: those wait, and load it again. A request that has begun
is never ended for another model. Does not depend on HTTP.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from quire.core.errors import DeadlineExpired, Draining, EngineFailed, QueueFull, QuireError, shown
from quire.engine.startup import StartupPhase
from quire.engine.stats import EngineInfo
from quire.server.context import ListedModel, ServedModel, make_served_model, unknown_model
from quire.server.fair_shares import Client, FairShares
from quire.server.response_store import ResponseStore
from quire.server.server import Server, ServerConfig, ServerObservers, Tracer, first_error

TURN_S = 5.0  # a model with requests stays loaded at least so long, and twice as long as its load took
RETRY_FAILED_S = 10.0  # until then, requests for a model that could not be loaded get the reason at once
LOAD_WAIT_S = 900.0  # a request waits for its model at most so long
_CHECK_S = 0.25  # engines that were restarted, responses in the background that have ended, models that are idle

_log = logging.getLogger(__name__)


class ModelUnavailable(QuireError):
    """The model of a request could not be loaded, or not in time; the others are served."""

    status = 503
    code = "model_unavailable"
    retry_after_s = RETRY_FAILED_S


class ModelStatus(Enum):
    """`/v1/models` has the values, which are llama.cpp's where it has one."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


class UnloadReason(Enum):
    """Why a model was unloaded."""

    IDLE = "idle"
    EVICTED = "evicted"  # for another model
    FAILED = "failed"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class RoutedModel:
    """One of several models: what to serve, and how long it stays loaded."""

    server: ServerConfig  # its first alias is the name
    num_bytes: int  # expected memory of weights and KV cache
    pinned: bool = False  # loaded at the start, never unloaded
    unload_after_s: float | None = None  # without a request; None: only for another model

    @property
    def name(self) -> str:
        return self.server.aliases[0]


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The models, the first of which is the default, and the limits of all."""

    models: tuple[RoutedModel, ...]
    max_loaded: int | None  # models at a time; None: as memory allows
    memory_bytes: int | None  # of weights and KV caches; None: not bounded
    max_waiting: int = 1024  # requests that wait for models to be loaded


@dataclass(frozen=True, slots=True)
class RouterObservers:
    """Callbacks: phases of a load, a model that is loaded or unloaded, status lines, and the first readiness."""

    phase: Callable[[str, StartupPhase], None]
    changed: Callable[[str, str], None]  # a model, and what happened
    status: Callable[[str], None]
    ready: Callable[[], None]
    tracer: Tracer | None = None


class ModelSlot:
    """One model: its server, the requests that hold it, and those that wait for it."""

    def __init__(self, config: RoutedModel, observers: ServerObservers, store: ResponseStore, now_s: float) -> None:
        self.config = config
        self.name = config.name
        self.server = Server(config.server, observers)
        self.server.state.responses = store
        self.described = _described(config.server)
        self.status = ModelStatus.UNLOADED
        self.failure: QuireError | None = None  # of the last load
        self.failed_s = 0.0
        self.wanted_s: float | None = None  # since when requests wait; None: none does
        self.began_s = self.loaded_s = self.used_s = now_s
        self.was_loaded = False
        self.yielding = False  # it gets no new requests, so that it can be unloaded for another model
        self.unload_after_s = config.unload_after_s  # the last request may have said otherwise
        self.num_leases = self.num_loads = 0
        self.num_unloads = dict.fromkeys(UnloadReason, 0)
        self.num_bytes = config.num_bytes  # expected, or measured
        self.waiters: dict[asyncio.Future[None], None] = {}
        self.running: asyncio.Task[None] | None = None
        self.stopping: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """A request may begin now."""
        return self.status is ModelStatus.LOADED and not self.yielding and self.server.engine.attached

    @property
    def is_idle(self) -> bool:
        """Loaded without a request, also in the background."""
        server = self.server
        busy = self.num_leases or server.engine.num_requests or server.state.admission.num_open
        return self.status is ModelStatus.LOADED and not busy

    @property
    def is_evictable(self) -> bool:
        return self.status is ModelStatus.LOADED and not self.config.pinned

    def may_be_tried(self, now_s: float) -> bool:
        return self.failure is None or now_s - self.failed_s >= RETRY_FAILED_S

    def is_wanted(self, now_s: float) -> bool:
        """To be loaded: requests wait for it, or it is pinned."""
        wanted = self.wanted_s is not None or (self.config.pinned and self.may_be_tried(now_s))
        return self.status is ModelStatus.UNLOADED and wanted

    def has_expired(self, now_s: float) -> bool:
        limit_s = self.unload_after_s
        return limit_s is not None and self.is_evictable and self.is_idle and now_s - self.used_s >= limit_s

    def grant(self) -> None:
        """All requests that wait may begin."""
        waiters, self.waiters = self.waiters, {}
        for waiter in waiters:
            if not waiter.done():
                self.num_leases += 1
                waiter.set_result(None)
        self.wanted_s = None

    def fail_waiting(self, failure: Callable[[], QuireError]) -> None:
        waiters, self.waiters = self.waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(failure())
        self.wanted_s = None

    def unavailable(self, now_s: float) -> ModelUnavailable:
        """Why it cannot be used, after a load that failed."""
        assert self.failure is not None
        error = ModelUnavailable(f"The model {shown(self.name)} could not be loaded: {self.failure.message}")
        error.retry_after_s = max(RETRY_FAILED_S - (now_s - self.failed_s), 1.0)
        return error

    def listed(self, now_s: float) -> ListedModel:
        loaded = self.server.state.loaded
        model = self.described if loaded is None else replace(loaded, created=self.described.created)
        if self.failure is not None and self.status is ModelStatus.UNLOADED:
            return ListedModel(model, None, "failed", self.failure.message)
        if self.status is not ModelStatus.LOADED:
            return ListedModel(model, None, self.status.value)
        left_s = None if self.unload_after_s is None else max(self.unload_after_s - (now_s - self.used_s), 0.0)
        left_s = None if self.config.pinned else left_s
        return ListedModel(model, self.server.engine.info, self.status.value, unload_in_s=left_s)


def _described(config: ServerConfig) -> ServedModel:
    """The model before it is loaded. Its context may become shorter: the memory is not known yet."""
    return make_served_model(
        config.opened,
        config.config.max_model_len or config.opened.checkpoint.spec.max_positions,
        None,
        aliases=config.aliases,
        chat_template=config.chat_template,
        tool_format=config.tool_format,
        reasoning_tags=config.reasoning_tags,
    )


class ModelRouter:
    """Loads and unloads models. `acquire` one before its use, and `release` it."""

    def __init__(self, config: RouterConfig, observers: RouterObservers, clock: Callable[[], float]) -> None:
        self._config = config
        self._observers = observers
        self._clock = clock
        self.store = ResponseStore()  # of all models: a conversation may go on with another
        self.slots = tuple(self._slot(model) for model in config.models)
        self._by_name = {name: slot for slot in self.slots for name in slot.described.names}
        self.waiting = FairShares()  # requests that wait for a model
        self._changed = asyncio.Event()
        self._draining = False
        self._fatal: QuireError | None = None
        self._is_ready = False

    def _slot(self, model: RoutedModel) -> ModelSlot:
        name = model.name
        observers = ServerObservers(
            lambda phase: self._observers.phase(name, phase),
            lambda served, info: self._note_loaded(self._by_name[name], info),
            lambda line: self._observers.status(f"{name}: {line}"),
            self._observers.tracer,
        )
        slot = ModelSlot(model, observers, self.store, self._clock())
        slot.server.state.list_models = self.listed
        return slot

    # Models

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._by_name)

    def find(self, name: str | None) -> ModelSlot:
        """A model by name; None is the first."""
        slot = self.slots[0] if name is None else self._by_name.get(name)
        if slot is None:
            raise unknown_model(str(name), self.names)
        return slot

    def listed(self) -> list[ListedModel]:
        now_s = self._clock()
        return [slot.listed(now_s) for slot in self.slots]

    @property
    def latest(self) -> ModelSlot:
        """The loaded model that was used last; the first if none is loaded."""
        loaded = [slot for slot in self.slots if slot.status is ModelStatus.LOADED]
        return max(loaded, key=lambda slot: slot.used_s, default=self.slots[0])

    # Requests

    def try_acquire(self, slot: ModelSlot) -> bool:
        """Whether a request may begin now; then `release`."""
        if self._draining:
            raise Draining
        if slot.is_open:
            slot.num_leases += 1
            slot.used_s = self._clock()
            return True
        return False

    async def acquire(self, slot: ModelSlot, client: Client, timeout_s: float | None = None) -> None:
        """Wait until a request may begin; then `release`. Raises a `QuireError` if the model cannot be loaded, too many
        requests wait, or the time is over."""
        now_s = self._clock()
        if self.try_acquire(slot):
            return
        if slot.status is ModelStatus.UNLOADED and not slot.may_be_tried(now_s):
            raise slot.unavailable(now_s)
        limit = self._config.max_waiting
        if not self.waiting.has_room(client, limit):
            raise QueueFull(self.waiting.total, limit, "requests for models that are not loaded")
        self.waiting.take(client)
        try:
            await self._wait(slot, LOAD_WAIT_S if timeout_s is None else min(timeout_s, LOAD_WAIT_S))
        except TimeoutError:
            if timeout_s is not None and timeout_s <= LOAD_WAIT_S:
                raise DeadlineExpired from None
            raise ModelUnavailable(
                f"The model {shown(slot.name)} was not loaded within {LOAD_WAIT_S:g} s: others are in use."
            ) from None
        finally:
            self.waiting.release(client)

    async def _wait(self, slot: ModelSlot, limit_s: float) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        slot.waiters[waiter] = None
        if slot.wanted_s is None:
            slot.wanted_s = self._clock()
        self._changed.set()
        try:
            async with asyncio.timeout(limit_s):
                await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(slot)  # granted and cancelled at once
            raise
        finally:
            slot.waiters.pop(waiter, None)
            if not slot.waiters:
                slot.wanted_s = None

    def release(self, slot: ModelSlot) -> None:
        slot.num_leases -= 1
        slot.used_s = self._clock()
        self._changed.set()

    def keep(self, slot: ModelSlot, unload_after_s: float | None) -> None:
        """How long a model stays loaded without a request, from now on; None: until another needs its memory."""
        slot.unload_after_s = unload_after_s
        self._changed.set()

    # Life

    async def run(self) -> None:
        """Load and unload models. Ends only with an error: a pinned model that could not be loaded at the start."""
        while True:
            self._step()
            if self._fatal is not None:
                raise self._fatal
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _CHECK_S)
            self._changed.clear()

    async def stop(self) -> None:
        for slot in self.slots:
            if slot.status in (ModelStatus.LOADING, ModelStatus.LOADED):
                self._start_stop(slot, UnloadReason.STOPPING)
        await asyncio.gather(*(slot.stopping for slot in self.slots if slot.stopping is not None))

    def _step(self) -> None:
        now_s = self._clock()
        for slot in self.slots:
            if self._draining:
                slot.fail_waiting(Draining)
            elif slot.is_open and slot.waiters:
                slot.grant()
                slot.used_s = now_s
        for slot in self.slots:
            if slot.has_expired(now_s):
                self._start_stop(slot, UnloadReason.IDLE)
        self._load_next(now_s)
        if not self._is_ready and all(slot.was_loaded for slot in self.slots if slot.config.pinned):
            self._is_ready = True
            self._observers.ready()

    @property
    def is_ready(self) -> bool:
        """Pinned models are loaded; others are loaded for their requests."""
        pinned = (slot for slot in self.slots if slot.config.pinned)
        return all(slot.status is ModelStatus.LOADED and slot.server.engine.attached for slot in pinned)

    def _load_next(self, now_s: float) -> None:
        """One step towards the model that is next: load it, or make room."""
        if any(slot.status in (ModelStatus.LOADING, ModelStatus.UNLOADING) for slot in self.slots):
            return
        wanted = [slot for slot in self.slots if slot.is_wanted(now_s)]
        if not wanted or self._draining:
            for slot in self.slots:
                slot.yielding = False
            return
        slot = min(wanted, key=lambda each: (not each.config.pinned, each.wanted_s or 0.0))
        evictable = [each for each in self.slots if each.is_evictable]
        if self._fits(slot):
            self._start_load(slot, now_s)
        elif not evictable:
            self._refuse(slot, now_s)
        elif idle := [each for each in evictable if each.is_idle]:
            victim = min(idle, key=lambda each: (not each.yielding, each.used_s))
            self._start_stop(victim, UnloadReason.EVICTED)
        elif not any(each.yielding for each in evictable):
            oldest = min(evictable, key=lambda each: each.loaded_s)
            turn_s = max(TURN_S, 2 * (oldest.loaded_s - oldest.began_s))
            oldest.yielding = now_s - oldest.loaded_s >= turn_s

    def _fits(self, slot: ModelSlot) -> bool:
        loaded = [each for each in self.slots if each.status is not ModelStatus.UNLOADED]
        num_bytes = slot.num_bytes + sum(each.num_bytes for each in loaded)
        limits = self._config
        counted = limits.max_loaded is None or len(loaded) < limits.max_loaded
        return counted and (limits.memory_bytes is None or num_bytes <= limits.memory_bytes)

    def _refuse(self, slot: ModelSlot, now_s: float) -> None:
        """It takes more memory than was expected, and pinned models leave too little."""
        self._note_failure(
            slot,
            QuireError(
                f"it takes {slot.num_bytes} bytes, and pinned models leave less of --models-memory "
                f"{self._config.memory_bytes}."
            ),
        )

    def _start_load(self, slot: ModelSlot, now_s: float) -> None:
        slot.status, slot.failure, slot.began_s = ModelStatus.LOADING, None, now_s
        slot.unload_after_s = slot.config.unload_after_s
        self._observers.changed(slot.name, "loading")
        slot.running = asyncio.create_task(slot.server.run_engine())
        slot.running.add_done_callback(partial(self._note_end, slot))

    def _note_loaded(self, slot: ModelSlot, info: EngineInfo) -> None:
        slot.status, slot.loaded_s = ModelStatus.LOADED, self._clock()
        slot.used_s, slot.was_loaded = slot.loaded_s, True
        slot.num_loads += 1
        used = info.memory
        num_bytes = (used.weights + used.kv + used.graphs + used.workspace) * info.num_ranks
        slot.num_bytes = num_bytes or slot.config.num_bytes
        self._observers.changed(slot.name, f"loaded in {slot.loaded_s - slot.began_s:.1f} s")
        self._changed.set()

    def _note_end(self, slot: ModelSlot, running: "asyncio.Task[None]") -> None:
        """The engine could not be started, or not again; unless it is stopped from here."""
        if slot.status is not ModelStatus.UNLOADING and not running.cancelled():
            self._start_stop(slot, UnloadReason.FAILED)

    def _start_stop(self, slot: ModelSlot, reason: UnloadReason) -> None:
        slot.status = ModelStatus.UNLOADING
        slot.num_unloads[reason] += 1
        slot.stopping = asyncio.create_task(self._stop_engine(slot, reason))

    async def _stop_engine(self, slot: ModelSlot, reason: UnloadReason) -> None:
        assert slot.running is not None
        failure: QuireError | None = None
        slot.running.cancel()
        await slot.server.stop()
        try:
            await first_error(slot.running)
        except asyncio.CancelledError:
            pass
        except QuireError as error:
            failure = error
        except Exception as error:
            _log.exception("the engine of a model failed")
            failure = EngineFailed(f"the engine failed with {type(error).__name__}.")
        slot.server.state.loaded = None
        slot.status, slot.yielding = ModelStatus.UNLOADED, False
        if failure is not None:
            self._note_failure(slot, failure)
        else:
            self._observers.changed(slot.name, f"unloaded: {reason.value}")
        self._changed.set()

    def _note_failure(self, slot: ModelSlot, failure: QuireError) -> None:
        slot.failure, slot.failed_s = failure, self._clock()
        self._observers.changed(slot.name, f"could not be loaded: {failure.message}")
        slot.fail_waiting(lambda: slot.unavailable(self._clock()))
        if slot.config.pinned and not slot.was_loaded:
            self._fatal = failure

    # What is drained

    @property
    def draining(self) -> bool:
        return self._draining

    @draining.setter
    def draining(self, value: bool) -> None:
        """Set by a signal handler. Requests that wait are refused in the next step."""
        self._draining = value
        for slot in self.slots:
            slot.server.engine.draining = value

    @property
    def num_requests(self) -> int:
        return sum(slot.server.engine.num_requests for slot in self.slots)

    def fail_all(self, failure: Callable[[], QuireError]) -> None:
        for slot in self.slots:
            slot.server.engine.fail_all(failure)
            slot.fail_waiting(failure)

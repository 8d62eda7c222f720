"""The processes of ranks 1 and up: started, watched and ended by one thread of the engine's process.

A rank sends a byte twice a second. One that ended, or sends none for some seconds, is the end of all: the others are
killed, so that no collective waits for it, and the engine fails with the reason. The thread that starts the ranks lives
as long as they may: on Linux a process can ask to die with the thread that started it.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from quire.config import EngineConfig
from quire.core.errors import EngineFailed, RankFailed
from quire.core.process import signals_held
from quire.core.sharding import Shard
from quire.core.shared_blocks import SharedBlocks
from quire.core.worker_process import receive_frame, send_frame
from quire.engine.prefix_transfer import EngineRole
from quire.engine.resolved_config import ResolvedConfig

HEARTBEAT_S = 0.5
STALLED_S = 10.0  # without a heartbeat of a rank that was ready
_REASON_WITHIN_S = 2.0  # a rank that ended is found by its connections before its process has


class RankStart(NamedTuple):
    """What a rank must know to load its part of a model."""

    config: EngineConfig  # with the dtype and the device that were chosen
    shard: Shard
    backend: str  # of collectives
    role: EngineRole


def start_message(config: EngineConfig, dtype: str, device: str) -> dict[str, Any]:
    """What rank 0 sends first, as JSON: the settings, with the dtype and the device that were chosen."""
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    return settings | {"dtype": dtype, "device": device, "tenant_weights": {}}


def read_start(message: Any) -> RankStart:
    config = EngineConfig(**message["config"])
    shard = Shard.of(message["rank"], config.tensor_parallel_size, config.pipeline_parallel_size)
    return RankStart(config, shard, message["backend"], EngineRole(message["role"]))


class GpuMemory(NamedTuple):
    """What a rank with its weights finds on its device, in bytes. Ordered by what is free."""

    free: int
    total: int  # 0 on a CPU


def read_sizes(message: Any) -> ResolvedConfig:
    return ResolvedConfig(**message["sizes"] | {"drafters": tuple(message["sizes"]["drafters"])})


class _Rank:
    """One process, with the connections to it: messages, and heartbeats."""

    __slots__ = ("beating", "connection", "heartbeat_s", "heartbeats", "number", "process")

    def __init__(self, number: int, rendezvous: int, clock: Callable[[], float], gpu: str | None) -> None:
        """`gpu`: the only one that the process may see; None: it sees what this one does."""
        self.number = number
        self.connection, theirs = socket.socketpair()
        self.heartbeats, beating = socket.socketpair()
        self.heartbeats.setblocking(False)
        self.heartbeat_s = clock()
        self.beating = False  # whether any has come
        with theirs, beating, signals_held():
            inherited = [theirs.fileno(), beating.fileno(), rendezvous]
            command = [sys.executable, "-m", "quire.engine.rank_main", *map(str, inherited), str(os.getpid())]
            environment = None if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
            self.process = subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL, env=environment)

    def note_heartbeats(self, now_s: float) -> None:
        with contextlib.suppress(BlockingIOError):
            if self.heartbeats.recv(1 << 12):
                self.heartbeat_s, self.beating = now_s, True

    def ended(self) -> str | None:
        """How it ended; None while it runs."""
        status = self.process.poll()
        if status is None:
            return None
        names = {number.value: number.name for number in signal.Signals}
        how = f"by signal {-status}, {names.get(-status, 'unknown')}" if status < 0 else f"with status {status}"
        return f"Rank {self.number} (process {self.process.pid}) ended {how}."


class _Watch:
    """What the thread works on. Holds no reference to `RankProcesses`, which may be dropped while it runs."""

    def __init__(
        self, num_followers: int, rendezvous: int, clock: Callable[[], float], gpus: Sequence[str] | None
    ) -> None:
        self.ranks: list[_Rank] = []
        self.at_end: Callable[[], None] = lambda: None
        self.started, self.ended = threading.Event(), threading.Event()
        self.ready = False  # stalls count from then on: imports and loading may hold a process for long
        self.failure: str | None = None
        self._closing = False
        self._wakeup, self._woken = socket.socketpair()
        self._clock = clock
        self._num_followers, self._rendezvous, self._gpus = num_followers, rendezvous, gpus

    def run(self) -> None:
        try:
            for number in range(1, self._num_followers + 1):
                gpu = None if self._gpus is None else self._gpus[number]
                self.ranks.append(_Rank(number, self._rendezvous, self._clock, gpu))
            self.started.set()
            while not self._closing and self.failure is None:
                self.failure = self._look()
        except OSError as error:  # no process can be started
            self.failure = f"A rank could not be started: {error}."
        finally:
            self._end_all()
            self.at_end()
            self.started.set()
            self.ended.set()

    def _look(self) -> str | None:
        """Wait for a while. Returns what is wrong, if anything is."""
        before_s = self._clock()
        select.select([self._woken, *(rank.heartbeats for rank in self.ranks)], [], [], HEARTBEAT_S)
        if self._closing:
            return None
        now_s = self._clock()
        for rank in self.ranks:
            rank.note_heartbeats(now_s)
            if not self.ready or now_s - before_s > 2 * HEARTBEAT_S:  # this process stood still: the others may have
                rank.heartbeat_s = now_s
            if (ended := rank.ended()) is not None:
                return ended
            silent_s = now_s - rank.heartbeat_s
            if silent_s > STALLED_S:
                return f"Rank {rank.number} (process {rank.process.pid}) sent no heartbeat for {silent_s:.0f} s."
        time.sleep(HEARTBEAT_S / 10)  # the end of a connection comes before that of its process
        return None

    def _end_all(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.process.wait()
            rank.heartbeats.close()
            with contextlib.suppress(OSError):
                rank.connection.shutdown(socket.SHUT_RDWR)  # a thread that reads from it gets its end

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._wakeup.send(b"!")


class RankProcesses:
    """The followers of rank 0. They end with this object, and with this process."""

    def __init__(
        self,
        size: int,
        rendezvous: int,
        clock: Callable[[], float] = time.monotonic,
        gpus: Sequence[str] | None = None,
    ) -> None:
        """`gpus`: names of one GPU for each rank, of which a process sees its own only."""
        self._watch = _Watch(size - 1, rendezvous, clock, gpus)
        thread = threading.Thread(target=self._watch.run, name="quire-ranks", daemon=True)
        thread.start()
        self._watch.started.wait()
        self._closed = weakref.finalize(self, _close, self._watch)
        self.check()

    @property
    def connections(self) -> list[socket.socket]:
        return [rank.connection for rank in self._watch.ranks]

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._watch.ranks]

    @property
    def beating(self) -> bool:
        """Whether each has sent a heartbeat: then it will end with this process, whatever state it is in."""
        return all(rank.beating for rank in self._watch.ranks)

    def call_at_end(self, function: Callable[[], None]) -> None:
        """On the thread that has ended the others: what this rank waits for will not come."""
        self._watch.at_end = function

    def send_start(self, config: EngineConfig, dtype: str, device: str, backend: str, role: EngineRole) -> None:
        """The ranks find the model and load their part of its weights; `wait_loaded` waits for that."""
        settings = start_message(config, dtype, device)
        for number in range(1, len(self.connections) + 1):
            self._send(number, {"config": settings, "rank": number, "backend": backend, "role": role.value})

    def send_sizes(self, resolved: ResolvedConfig) -> None:
        """The ranks allocate their KV stores, and join the process group."""
        for number in range(1, len(self.connections) + 1):
            self._send(number, {"sizes": asdict(resolved)})

    def send_blocks(self, shared: SharedBlocks) -> None:
        """The KV blocks of the ranks of an engine with a role are in memory of rank 0."""
        for number in range(1, len(self.connections) + 1):
            self._send(number, {"blocks": [*shared.place, shared.block_bytes]})

    def send_compiled(self) -> None:
        """Kernels are compiled: the other ranks find them on disk."""
        for number in range(1, len(self.connections) + 1):
            self._send(number, {"compiled": True})

    def _send(self, number: int, message: object) -> None:
        try:
            send_frame(self.connections[number - 1], message)
        except OSError:
            raise RankFailed(self.why_lost() or f"Rank {number} cannot be reached.") from None

    def wait_loaded(self) -> list[GpuMemory]:
        """Until each has its weights in memory. An error that a rank sends is raised."""
        found = []
        for number, connection in enumerate(self.connections, 1):
            message = receive_frame(connection)
            if not isinstance(message, dict):
                raise RankFailed(self.why_lost() or f"Rank {number} ended while it was starting.")
            if "error" in message:
                raise EngineFailed(f"Rank {number} could not start: {message['error']}")
            found.append(GpuMemory(*message["loaded"]))
        return found

    def note_ready(self) -> None:
        self._watch.ready = True

    def check(self) -> None:
        """Raises if a rank has ended or stalled."""
        if self._watch.failure is not None:
            raise RankFailed(self._watch.failure)

    def why_lost(self) -> str | None:
        """Why the ranks ended, if they did; waits a moment for the thread to find it."""
        self._watch.ended.wait(_REASON_WITHIN_S)
        return self._watch.failure

    def close(self) -> None:
        """Idempotent."""
        self._closed()


def _close(watch: _Watch) -> None:
    watch.close()
    watch.ended.wait()

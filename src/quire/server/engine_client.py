"""What the rest of the server needs of an engine and of its supervisor: one engine, or the replicas of one model."""

from collections.abc import Callable, Sequence
from typing import Protocol, Unpack

from quire.core.errors import QuireError
from quire.core.sampling import SamplingParams
from quire.engine.messages import SubmitOptions
from quire.engine.stats import EngineInfo, EngineStats
from quire.server.engine_supervisor import Health
from quire.server.request_stream import RequestStream


class EngineClient(Protocol):
    """An `AsyncEngine`, or a `ReplicatedEngine`."""

    draining: bool

    @property
    def info(self) -> EngineInfo | None: ...

    @property
    def stats(self) -> EngineStats | None: ...

    @property
    def attached(self) -> bool: ...

    @property
    def num_requests(self) -> int: ...

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, **keywords: Unpack[SubmitOptions]
    ) -> RequestStream: ...

    def abort(self, number: int) -> bool: ...

    def fail_all(self, failure: Callable[[], QuireError]) -> None: ...

    def numbers_of(self, request_id: str) -> tuple[int, ...]: ...

    async def query(self, what: str, number: int = 0) -> bytes: ...


class EngineSupervision(Protocol):
    """A `Supervisor`, or a `ReplicaSupervisor`."""

    @property
    def health(self) -> Health: ...

    @property
    def hangs(self) -> bool: ...

    @property
    def reason(self) -> str | None: ...

    @property
    def num_restarts(self) -> int: ...

    async def first_start(self) -> EngineInfo: ...

    async def watch(self) -> None: ...

    async def stop(self) -> None: ...

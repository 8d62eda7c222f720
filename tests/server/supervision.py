"""For tests with engine processes: a supervisor that is started, watched and stopped, and waiting for a condition."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from quire.server.engine_supervisor import Supervisor
from quire.server.replicas import ReplicaSupervisor

_WITHIN_S = 60.0  # an engine may start in the meantime


@asynccontextmanager
async def watched(supervisor: Supervisor | ReplicaSupervisor) -> AsyncIterator[None]:
    """Its engines have started, and are replaced when they end, until the block ends."""
    await supervisor.first_start()
    watching = asyncio.create_task(supervisor.watch())
    try:
        yield
    finally:
        await supervisor.stop()
        await watching


async def until(holds: Callable[[], bool], *, every_s: float = 0.01) -> None:
    async with asyncio.timeout(_WITHIN_S):
        while not holds():
            await asyncio.sleep(every_s)

"""One line now and then on how the server does; nothing while it does nothing."""

import asyncio
from collections.abc import Callable

from quire.server.metrics import Metrics
from quire.server.service import Service

EVERY_S = 10.0


class StatusLine:
    """Compares what was counted with what was counted before."""

    def __init__(self, service: Service, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._service = service
        self._metrics = metrics
        self._clock = clock
        self._before = self._counts()
        self._before_s = clock()

    async def tell(self, write: Callable[[str], None]) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            line = self.line()
            if line is not None:
                write(line)

    def line(self) -> str | None:
        """What happened since the last line; None if nothing did."""
        now, now_s = self._counts(), self._clock()
        prompt, cached, generated = (new - old for new, old in zip(now, self._before, strict=True))
        seconds = max(now_s - self._before_s, 1e-3)
        self._before, self._before_s = now, now_s
        stats = self._service.stats
        if stats is None or not (prompt or generated or stats.num_running or stats.num_waiting):
            return None
        held = stats.num_blocks - stats.num_free_blocks - stats.num_idle_blocks
        hits = f" · prefix hit {100 * cached / prompt:.0f} %" if prompt else ""
        return (
            f"gen {generated / seconds:,.1f} tok/s · prompt {prompt / seconds:,.0f} tok/s · run {stats.num_running} · "
            f"wait {stats.num_waiting} · kv {100 * held / max(stats.num_blocks, 1):.0f} %{hits}"
        )

    def _counts(self) -> tuple[int, int, int]:
        gauges = self._metrics.engine
        return gauges.total("prompt_tokens"), gauges.total("cached_tokens"), gauges.total("sampled_tokens")

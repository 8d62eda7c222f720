"""Start-up phases of an engine and callbacks for their progress."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.catalog.store import Report, ignore


class StartupPhase(NamedTuple):
    """One line of the start-up report."""

    name: str
    seconds: float
    detail: str


@dataclass(slots=True)
class StartupReporter:
    """Callbacks: downloads, weights as they load, and each phase when it is done."""

    fetching: Report = ignore
    loading: Callable[[int, int], None] = lambda done, total: None
    finished: Callable[[StartupPhase], None] = lambda phase: None
    _since: float = field(default_factory=time.monotonic)

    def done(self, name: str, detail: str) -> None:
        now = time.monotonic()
        self.finished(StartupPhase(name, now - self._since, detail))
        self._since = now

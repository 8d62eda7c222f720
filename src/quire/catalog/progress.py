"""Progress of a fetch, as values. The command line displays them."""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple


class FetchPhase(Enum):
    """The phase of a fetch."""

    WAITING = "waiting for another fetch"
    DOWNLOADING = "downloading"
    UNPACKING = "unpacking"
    VERIFYING = "verifying"


class FetchProgress(NamedTuple):
    """How far a phase has come. A total of 0 is unknown."""

    phase: FetchPhase
    done_bytes: int
    total_bytes: int


Report = Callable[[FetchProgress], None]


def ignore(progress: FetchProgress) -> None:
    """A report that does nothing."""

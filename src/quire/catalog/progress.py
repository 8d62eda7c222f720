"""What a fetch tells whoever watches it. Draws nothing: the command line makes bars of this."""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple


class FetchPhase(Enum):
    """What is being done with a model's bytes."""

    WAITING = "waiting for another fetch"
    DOWNLOADING = "downloading"
    UNPACKING = "unpacking"
    VERIFYING = "verifying"


class FetchProgress(NamedTuple):
    """How far a phase has come. A total of 0 means that nobody knows it."""

    phase: FetchPhase
    done_bytes: int
    total_bytes: int


Report = Callable[[FetchProgress], None]


def ignore(progress: FetchProgress) -> None:
    """The report of those who do not watch."""

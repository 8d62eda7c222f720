"""How kernels come to be compiled before they are launched: what is said between those who do it and those who ask."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple


class Compiled(NamedTuple):
    """Kernels that are ready ahead."""

    num_kernels: int
    num_made: int  # compiled for it; others were found compiled
    workers: str  # who compiled them side by side
    errors: tuple[str, ...]  # what could not be compiled is tried again when it is launched

    def describe(self) -> str:
        num_found = max(self.num_kernels - self.num_made, 0)
        made = f"{self.num_made} compiled in {self.workers}" if self.num_made else ""
        found = f"{num_found} found compiled" if num_found or not made else ""
        left = f"{len(self.errors)} left for later: {self.errors[0]}" if self.errors else ""
        return ", ".join(filter(None, (made, found, left)))


Finish = Callable[[], Compiled]  # waits until all is compiled


class CompilingAhead(NamedTuple):
    """For kernels that are compiled when they are first launched."""

    first: Callable[[], None]  # compile one, with all that comes before the first; may be called in a thread
    # All that a function would launch, so many at once: begun when it is entered, and over when it is left.
    launched: Callable[[Callable[[], None], int], AbstractContextManager[Finish]]

"""How kernels come to be compiled before they are launched: what is said between those who do it and those who ask."""

from collections.abc import Callable
from typing import NamedTuple


class Compiled(NamedTuple):
    """Kernels that were compiled, or found compiled, ahead."""

    num_kernels: int
    errors: tuple[str, ...]  # what could not be compiled is tried again when it is launched

    def describe(self) -> str:
        left = f", {len(self.errors)} left for later: {self.errors[0]}" if self.errors else ""
        return f"{self.num_kernels} compiled or found compiled{left}"


class CompilingAhead(NamedTuple):
    """For kernels that are compiled when they are first launched."""

    first: Callable[[], None]  # compile one, with all that comes before the first; may be called in a thread
    launched: Callable[[Callable[[], None], int], Compiled]  # all that a function would launch, in so many threads

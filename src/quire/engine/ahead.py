"""Kernels that are compiled ahead of the first step, side by side. Knows neither the kernels nor the steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

from quire.engine.phases import Watch
from quire.kernels.ahead import CompilingAhead


class Ahead:
    """From its beginning the first kernel is being compiled, beside all that is made ready for a rehearsal."""

    __slots__ = ("_compiling", "_first")

    def __init__(self, compiling: CompilingAhead) -> None:
        self._compiling = compiling
        # Not a daemon: whoever refuses a model and leaves must wait for it, or it is torn out of the compiler's code.
        self._first = Thread(target=compiling.first, name="quire-first-kernel")
        self._first.start()

    @contextmanager
    def compiling(self, play: Callable[[], None], num_at_once: int, watch: Watch) -> Iterator[None]:
        """What `play` would launch, which launches nothing, is compiled beside what is done inside."""
        self._first.join()
        with self._compiling.launched(play, num_at_once) as finish:
            watch.done("rehearsal", "finds the kernels that steps launch")
            yield
            watch.done("kernels", finish().describe())

"""Kernels that are compiled ahead of the first step, side by side. Knows neither the kernels nor the steps."""

from collections.abc import Callable
from threading import Thread

from quire.engine.phases import Watch
from quire.kernels.ahead import CompilingAhead


class Ahead:
    """From its beginning the first kernel is being compiled, beside the loading of weights."""

    __slots__ = ("_compiling", "_first")

    def __init__(self, compiling: CompilingAhead | None) -> None:
        """None: on this device there is nothing to compile."""
        self._compiling = compiling
        self._first: Thread | None = None
        if compiling is not None:
            self._first = Thread(target=compiling.first, name="quire-first-kernel", daemon=True)
            self._first.start()

    def compile(self, play: Callable[[], None], num_at_once: int, watch: Watch) -> None:
        """What `play` would launch, which launches nothing."""
        if self._compiling is None or self._first is None:
            return
        self._first.join()
        watch.done("kernels", self._compiling.launched(play, num_at_once).describe())

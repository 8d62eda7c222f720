"""Whether a step had better be built launch by launch than replayed in a larger shape that is recorded, and whether a
missing shape should be recorded now. Knows costs and shapes, and records nothing itself.

A step that is built waits for the host only as long as the device has nothing else to do. A shape is worth recording
once doing without it has cost as much as recording it does: whoever does so never loses more than twice what he would
have lost knowing what comes.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from quire.runner.shapes import Shape

_BUILDS = 2  # times that everything is launched to record it; a step that is built is launched once
_NOTICED = 1.03  # times as long as if it were built: a step that takes longer is built


class Regrets:
    """What was lost for want of each shape, in seconds, and until when the device is busy."""

    __slots__ = ("_busy_until_s", "_clock", "_lost_s", "_quickest_s", "decode_s", "token_s")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.token_s: float | None = None  # what a token more costs a step; while it is not known nothing is worth it
        self.decode_s = 0.0  # what a step takes at the least
        self._clock = clock
        self._busy_until_s = 0.0
        self._quickest_s: dict[bool, float] = {}  # recording, with chunks and without
        self._lost_s: defaultdict[Shape, float] = defaultdict(float)

    def took(self, shape: Shape, seconds: float) -> None:
        """So long did it take to record one. The quickest counts: others compiled something, or computed for long."""
        kind = bool(shape.chunks)
        self._quickest_s[kind] = min(seconds, self._quickest_s.get(kind, seconds))

    def begins(self, shape: Shape) -> None:
        """The device will compute this, when it is done with what it has."""
        if self.token_s is not None:
            begins_s = max(self._busy_until_s, self._clock())
            self._busy_until_s = begins_s + max(self.decode_s, self.token_s * shape.size)

    def rests(self) -> None:
        """The device has nothing to do."""
        self._busy_until_s = 0.0

    def better_built(self, step: Shape, shape: Shape) -> bool:
        """Whether a step with chunks takes noticeably longer in a shape that holds it than built."""
        built_s = self._built_s(step)
        if not step.chunks or built_s is None or self.token_s is None:
            return False
        return self.token_s * shape.size > _NOTICED * built_s

    def worth(self, step: Shape, ran_as: Shape | None, missing: Iterable[Shape]) -> Shape | None:
        """The missing shape to record now, when a step runs as another or (None) is built."""
        recording_s, built_s = self._quickest_s.get(bool(step.chunks)), self._built_s(step)
        if recording_s is None or built_s is None or self.token_s is None:
            return None
        longest_s = _NOTICED * built_s if step.chunks else float("inf")
        useful = (shape for shape in missing if shape.holds(step) and self.token_s * shape.size <= longest_s)
        wanted = min(useful, key=Shape.order, default=None)
        if wanted is None:
            return None
        computing_s = self.token_s * wanted.size
        took_s = built_s if ran_as is None else self.token_s * ran_as.size
        self._lost_s[wanted] += max(took_s - computing_s, 0.0)
        return wanted if self._lost_s[wanted] >= recording_s + computing_s else None  # what is recorded is also done

    def _built_s(self, step: Shape) -> float | None:
        """How long this step would keep the device if it were built now; None if that is not known."""
        recording_s = self._quickest_s.get(bool(step.chunks))
        if recording_s is None or self.token_s is None:
            return None
        busy_s = max(self._busy_until_s - self._clock(), 0.0)
        return self.token_s * step.size + max(recording_s / _BUILDS - busy_s, 0.0)

"""Whether a missing shape of steps should be recorded now. Knows costs and shapes, and records nothing itself.

A shape is worth it once doing without it has cost as much as recording it does. Whoever does so never loses more than
twice what he would have lost knowing what comes.
"""

from collections import defaultdict
from collections.abc import Iterable

from quire.runner.shapes import Shape

_BUILDS = 2  # times that everything is launched to record it; a step that is built is launched once
_LITTLE = 1.5  # times as long as it could take a step may take, rather than keep the host from all else
_UNSEEN = 2  # times as long as building takes a step computes that the next can be built behind
_LEAST = 1.03  # times as long as it could take such a step may take


class Regrets:
    """What was lost for want of each shape, in seconds."""

    __slots__ = ("_lost_s", "_quickest_s", "token_s")

    def __init__(self) -> None:
        self.token_s: float | None = None  # what a token more costs a step; while it is not known nothing is worth it
        self._quickest_s: dict[bool, float] = {}  # recording, with chunks and without
        self._lost_s: defaultdict[Shape, float] = defaultdict(float)

    def took(self, shape: Shape, seconds: float) -> None:
        """So long did it take to record one. The quickest counts: others compiled something as well."""
        kind = bool(shape.chunks)
        self._quickest_s[kind] = min(seconds, self._quickest_s.get(kind, seconds))

    def better_built(self, step: Shape, shape: Shape) -> bool:
        """Whether a step takes longer in a shape that holds it than built launch by launch: much longer, or, where
        steps compute so long that nobody waits for the host, a little."""
        recording_s = self._quickest_s.get(bool(step.chunks))
        if recording_s is None or self.token_s is None:
            return False
        building_s, own_s, padded_s = recording_s / _BUILDS, self.token_s * step.size, self.token_s * shape.size
        if own_s >= _UNSEEN * building_s:
            return padded_s > _LEAST * own_s
        return padded_s > _LITTLE * max(building_s, own_s)

    def worth(self, step: Shape, ran_as: Shape | None, missing: Iterable[Shape]) -> Shape | None:
        """The missing shape to record now, when a step runs as another or (None) is built launch by launch."""
        recording_s = self._quickest_s.get(bool(step.chunks))
        wanted = min((shape for shape in missing if shape.holds(step)), key=Shape.order, default=None)
        if wanted is None or recording_s is None or self.token_s is None:
            return None
        if ran_as is not None:
            lost_s = self.token_s * (ran_as.size - wanted.size)
        else:  # meanwhile the device computes the step before
            lost_s = recording_s / _BUILDS - self.token_s * step.size
        self._lost_s[wanted] += max(lost_s, 0.0)
        computing_s = self.token_s * wanted.tokens  # what is recorded is also done
        return wanted if self._lost_s[wanted] >= recording_s + computing_s else None

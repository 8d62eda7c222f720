"""Shapes of steps, and which are worth recording, the most useful first. Knows sizes alone.

Whether a step had better be built launch by launch than replayed in a larger shape that is recorded, and whether a
missing shape should be recorded now. Knows costs and shapes, and records nothing itself.

A step that is built waits for the host only as long as the device has nothing else to do. A shape is worth recording
once doing without it has cost as much as recording it does: whoever does so never loses more than twice what he would
have lost knowing what comes.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

_FEW_CHUNKS = 4  # most steps begin or go on with a prompt or two
_LONG = 2048  # tokens of one prompt, for which there are other kernels than for several
_CROWDS = (16, 64)  # of chunks
_CROWDED = 8  # tokens of a chunk in a crowd, at the least
_FEWEST_TOKENS = 16
_BESIDE = (32, 16, 8, 64, 48, 128, 96, 256)  # rows that decode beside a prompt, when they are fewer than there can be
_FINE = (128, 1024)  # tokens between which there are more sizes: where a chunk is cut that decodes have to wait for
_TELLING_ROWS = (16, 32, 64, 128, 192)  # up to each of them products or decodes have a kernel of their own
_SPARE_TOKENS = 256  # that a shape may have beyond twice what a step needs: as dear as building it


class StepSize(NamedTuple):
    """How much a step computes."""

    rows: int  # that cruise, one token each
    chunks: int = 0
    tokens: int = 0  # of all chunks

    def holds(self, step: "StepSize") -> bool:
        if step.chunks == 0:
            return self.chunks == 0 and self.rows >= step.rows
        enough = self.rows >= step.rows and self.chunks >= step.chunks and self.tokens >= step.tokens
        return enough and self.size <= 2 * step.size + _SPARE_TOKENS

    @property
    def size(self) -> int:
        """Tokens that are computed."""
        return self.rows + self.tokens

    def order(self) -> tuple[int, int]:
        """The smaller the better, for a step that it holds."""
        return self.size, self.chunks


class GraphShapes(NamedTuple):
    """What is worth recording, the most useful first."""

    first: list[StepSize]  # before anything runs
    soon: list[StepSize]
    later: list[StepSize]

    @property
    def telling(self) -> list[StepSize]:
        """A few that between them launch what the first and the soon do, the dearest to compile before others."""
        decodes = sorted(shape for shape in self.soon if not shape.chunks)
        few = decodes[:1] + [shape for shape in decodes[1:] if shape.rows in _TELLING_ROWS]
        short = [shape for shape in self.first if shape.tokens <= _LONG]
        return sorted(short + few, key=StepSize.order, reverse=True)


def shapes_to_record(max_rows: int, max_tokens: int) -> GraphShapes:
    """For steps of up to so many rows, and of up to so many tokens in all.

    First what can stand in for every other decode, one row alone, and a prompt that begins while many decode; soon
    decodes by halves and a prompt alone; later a prompt beside fewer rows, with less to spare, and many at once.
    """
    assert max_rows > 0 and max_tokens >= 0, (max_rows, max_tokens)
    decodes = [StepSize(rows) for rows in _by_use(row_sizes(max_rows))]
    doubling = doubling_sizes(max_tokens)
    beside = rows_beside(max_rows)[:-1]
    fine = {rows: prompt_sizes(rows, max_tokens) for rows in (0, *beside, max_rows)}
    halves = {rows: [size for size in fine[rows] if (rows + size).bit_count() == 1] for rows in beside}
    later = [
        *(shape for rows in beside for shape in _prompts(rows, halves[rows], max_rows)),
        *(shape for rows in beside for shape in _prompts(rows, fine[rows], max_rows)),
        *(shape for crowd in _CROWDS for rows in (max_rows, 0) for shape in _crowds(rows, crowd, doubling, max_rows)),
        *(shape for rows in (0, max_rows) for shape in _prompts(rows, fine[rows], max_rows)),
    ]
    first = list(dict.fromkeys([*decodes[:2], *_prompts(max_rows, doubling, max_rows)]))
    soon = list(dict.fromkeys([*decodes[2:], *_prompts(0, doubling, max_rows)]))
    return GraphShapes(first, soon, [shape for shape in dict.fromkeys(later) if shape not in (*first, *soon)])


def _prompts(rows: int, sizes: list[int], max_rows: int) -> list[StepSize]:
    """A prompt or a few beside so many rows."""
    counts = {size: (1, _FEW_CHUNKS) if size >= _LONG else (_FEW_CHUNKS,) for size in sizes}
    return [StepSize(rows, min(count, max_rows), size) for size in sizes for count in counts[size]]


def _crowds(rows: int, crowd: int, sizes: list[int], max_rows: int) -> list[StepSize]:
    return [StepSize(rows, crowd, size) for size in sizes if crowd <= max_rows and size >= _CROWDED * crowd]


def row_sizes(max_rows: int) -> tuple[int, ...]:
    """Powers of two, then by sixteens from 32 and by thirty-twos from 256: never twice what is needed."""
    sizes = {1, 2, 4, 8, 16, *range(32, 256, 16), *range(256, max_rows, 32)}
    return (*sorted(size for size in sizes if size < max_rows), max_rows)


def rows_beside(max_rows: int) -> list[int]:
    """Up to how many rows decode beside a prompt, the most useful first; the last are as many as there can be."""
    return [*(rows for rows in _BESIDE if rows < max_rows), max_rows]


def prompt_sizes(rows: int, max_tokens: int) -> list[int]:
    """Tokens of prompts beside so many rows, ascending; the last are all that a step may compute. None if nothing.

    Products are computed in tiles of so many tokens: a step that ends where its last tile does wastes nothing. So it is
    rows and prompts together that make a power of two, or a middle or a quarter between two of them.
    """
    if not max_tokens:
        return []
    powers = [1 << exponent for exponent in range(_FEWEST_TOKENS.bit_length() - 1, (rows + max_tokens).bit_length())]
    middles = [power * 3 // 2 for power in powers]
    quarters = [power * 5 // 4 for power in powers if power in range(*_FINE)]
    sizes = (total - rows for total in (*powers, *middles, *quarters))
    return [*sorted(size for size in sizes if _FEWEST_TOKENS <= size < max_tokens), max_tokens]


def doubling_sizes(max_tokens: int) -> list[int]:
    """Tokens of prompts, ascending; the last are all that a step may compute. None if nothing."""
    if not max_tokens:
        return []
    powers = (1 << exponent for exponent in range(_FEWEST_TOKENS.bit_length() - 1, max_tokens.bit_length()))
    return [*(power for power in powers if power < max_tokens), max_tokens]


def _by_use(sizes: tuple[int, ...]) -> list[int]:
    """The largest can stand in for every other and the smallest is what one user sees; then by halves between them."""
    first = [sizes[-1], sizes[0]]
    ordered: list[int] = []
    spans = [[size for size in sizes if size not in first]]
    while spans:
        span = spans.pop(0)
        if span:
            middle = len(span) // 2
            ordered.append(span[middle])
            spans += [span[middle + 1 :], span[:middle]]
    return list(dict.fromkeys(first)) + ordered


_BUILDS = 2  # times that everything is launched to record it; a step that is built is launched once
_NOTICED = 1.03  # times as long as if it were built: a step that takes longer is built


class CapturePolicy:
    """What was lost for want of each shape, in seconds, and until when the device is busy."""

    __slots__ = ("_busy_until_s", "_clock", "_lost_s", "_quickest_s", "decode_s", "token_s")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.token_s: float | None = None  # what a token more costs a step; while it is not known nothing is worth it
        self.decode_s = 0.0  # what a step takes at the least
        self._clock = clock
        self._busy_until_s = 0.0
        self._quickest_s: dict[bool, float] = {}  # recording, with chunks and without
        self._lost_s: defaultdict[StepSize, float] = defaultdict(float)

    def took(self, shape: StepSize, seconds: float) -> None:
        """So long did it take to record one. The quickest counts: others compiled something, or computed for long."""
        kind = bool(shape.chunks)
        self._quickest_s[kind] = min(seconds, self._quickest_s.get(kind, seconds))

    def begins(self, shape: StepSize) -> None:
        """The device will compute this, when it is done with what it has."""
        if self.token_s is not None:
            begins_s = max(self._busy_until_s, self._clock())
            self._busy_until_s = begins_s + max(self.decode_s, self.token_s * shape.size)

    def rests(self) -> None:
        """The device has nothing to do."""
        self._busy_until_s = 0.0

    def better_built(self, step: StepSize, shape: StepSize) -> bool:
        """Whether a step with chunks takes noticeably longer in a shape that holds it than built."""
        built_s = self._built_s(step)
        if not step.chunks or built_s is None or self.token_s is None:
            return False
        return self.token_s * shape.size > _NOTICED * built_s

    def worth(self, step: StepSize, ran_as: StepSize | None, missing: Iterable[StepSize]) -> StepSize | None:
        """The missing shape to record now, when a step runs as another or (None) is built."""
        recording_s, built_s = self._quickest_s.get(bool(step.chunks)), self._built_s(step)
        if recording_s is None or built_s is None or self.token_s is None:
            return None
        longest_s = _NOTICED * built_s if step.chunks else float("inf")
        useful = (shape for shape in missing if shape.holds(step) and self.token_s * shape.size <= longest_s)
        wanted = min(useful, key=StepSize.order, default=None)
        if wanted is None:
            return None
        computing_s = self.token_s * wanted.size
        took_s = built_s if ran_as is None else self.token_s * ran_as.size
        self._lost_s[wanted] += max(took_s - computing_s, 0.0)
        return wanted if self._lost_s[wanted] >= recording_s + computing_s else None  # what is recorded is also done

    def _built_s(self, step: StepSize) -> float | None:
        """How long this step would keep the device if it were built now; None if that is not known."""
        recording_s = self._quickest_s.get(bool(step.chunks))
        if recording_s is None or self.token_s is None:
            return None
        busy_s = max(self._busy_until_s - self._clock(), 0.0)
        return self.token_s * step.size + max(recording_s / _BUILDS - busy_s, 0.0)

"""Which step shapes get a CUDA graph, and when: the list of shapes, and the capture policy. Captures nothing itself.

The capture policy is ski rental: a shape is captured once its absence has cost as much as its capture, so the total
loss is at most 2x the offline optimum. An eager step costs host time only while the device has nothing else to do.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

_FEW_CHUNKS = 4  # most steps hold chunks of a prompt or two
_LONG = 2048  # tokens of one prompt: a long one has other kernels than several short ones
_MANY_CHUNKS = (16, 64)  # chunks of a step with many short prompts
_MIN_CHUNK_TOKENS = 8  # per chunk of such a step
_MIN_TOKENS = 16
_BESIDE = (32, 16, 8, 64, 48, 128, 96, 256)  # decoding rows beside a prompt, below the maximum
_FINE = (128, 1024)  # tokens between which sizes are finer: chunks that are cut for the inter-token latency
_KERNEL_ROWS = (16, 32, 64, 128, 192)  # up to each of these, GEMMs or decode attention have kernels of their own
_SPARE_TOKENS = 256  # padding beyond 2x the step that costs as much as an eager launch


class StepSize(NamedTuple):
    """How much a step computes."""

    rows: int  # decoding, one token each
    chunks: int = 0
    tokens: int = 0  # of all chunks

    def holds(self, step: "StepSize") -> bool:
        if step.chunks == 0:
            return self.chunks == 0 and self.rows >= step.rows
        enough = self.rows >= step.rows and self.chunks >= step.chunks and self.tokens >= step.tokens
        return enough and self.size <= 2 * step.size + _SPARE_TOKENS

    @property
    def size(self) -> int:
        """Tokens that the step computes."""
        return self.rows + self.tokens

    def order(self) -> tuple[int, int]:
        """Sort key: the smallest shape that holds a step is the best for it."""
        return self.size, self.chunks


class GraphShapes(NamedTuple):
    """The shapes worth capturing, the most useful first."""

    first: list[StepSize]  # before the first request
    soon: list[StepSize]
    later: list[StepSize]

    @property
    def representative(self) -> list[StepSize]:
        """A few shapes that together launch every kernel of `first` and `soon`, slowest compile first."""
        decodes = sorted(shape for shape in self.soon if not shape.chunks)
        few = decodes[:1] + [shape for shape in decodes[1:] if shape.rows in _KERNEL_ROWS]
        short = [shape for shape in self.first if shape.tokens <= _LONG]
        return sorted(short + few, key=StepSize.order, reverse=True)


def shapes_to_capture(max_rows: int, max_tokens: int) -> GraphShapes:
    """For steps of up to `max_rows` rows and `max_tokens` tokens in total.

    First: the largest decode (holds every other), one row alone, and a prompt beside all rows. Soon: decodes by
    halves, and a prompt alone. Later: a prompt beside fewer rows with less padding, and many short prompts.
    """
    assert max_rows > 0 and max_tokens >= 0, (max_rows, max_tokens)
    decodes = [StepSize(rows) for rows in _by_usefulness(row_sizes(max_rows))]
    doubling = doubling_sizes(max_tokens)
    beside = rows_beside(max_rows)[:-1]
    fine = {rows: prompt_sizes(rows, max_tokens) for rows in (0, *beside, max_rows)}
    halves = {rows: [size for size in fine[rows] if (rows + size).bit_count() == 1] for rows in beside}
    later = [
        *(shape for rows in beside for shape in _prompts(rows, halves[rows], max_rows)),
        *(shape for rows in beside for shape in _prompts(rows, fine[rows], max_rows)),
        *(
            shape
            for count in _MANY_CHUNKS
            for rows in (max_rows, 0)
            for shape in _many_chunks(rows, count, doubling, max_rows)
        ),
        *(shape for rows in (0, max_rows) for shape in _prompts(rows, fine[rows], max_rows)),
    ]
    first = list(dict.fromkeys([*decodes[:2], *_prompts(max_rows, doubling, max_rows)]))
    soon = list(dict.fromkeys([*decodes[2:], *_prompts(0, doubling, max_rows)]))
    return GraphShapes(first, soon, [shape for shape in dict.fromkeys(later) if shape not in (*first, *soon)])


def _prompts(rows: int, sizes: list[int], max_rows: int) -> list[StepSize]:
    """One prompt, or a few, beside this number of rows."""
    counts = {size: (1, _FEW_CHUNKS) if size >= _LONG else (_FEW_CHUNKS,) for size in sizes}
    return [StepSize(rows, min(count, max_rows), size) for size in sizes for count in counts[size]]


def _many_chunks(rows: int, count: int, sizes: list[int], max_rows: int) -> list[StepSize]:
    return [StepSize(rows, count, size) for size in sizes if count <= max_rows and size >= _MIN_CHUNK_TOKENS * count]


def row_sizes(max_rows: int) -> tuple[int, ...]:
    """Powers of two, then steps of 16 from 32 and of 32 from 256: never twice what is needed."""
    sizes = {1, 2, 4, 8, 16, *range(32, 256, 16), *range(256, max_rows, 32)}
    return (*sorted(size for size in sizes if size < max_rows), max_rows)


def rows_beside(max_rows: int) -> list[int]:
    """Numbers of rows that decode beside a prompt, the most useful first; the last is the maximum."""
    return [*(rows for rows in _BESIDE if rows < max_rows), max_rows]


def prompt_sizes(rows: int, max_tokens: int) -> list[int]:
    """Prompt tokens beside `rows` rows, ascending; the last is the limit of a step. Empty if that is 0.

    GEMMs run in tiles of tokens, and a step that ends on a tile boundary wastes nothing. So rows and prompt tokens
    together are a power of two, or the middle or the first quarter between two of them.
    """
    if not max_tokens:
        return []
    powers = [1 << exponent for exponent in range(_MIN_TOKENS.bit_length() - 1, (rows + max_tokens).bit_length())]
    middles = [power * 3 // 2 for power in powers]
    quarters = [power * 5 // 4 for power in powers if power in range(*_FINE)]
    sizes = (total - rows for total in (*powers, *middles, *quarters))
    return [*sorted(size for size in sizes if _MIN_TOKENS <= size < max_tokens), max_tokens]


def doubling_sizes(max_tokens: int) -> list[int]:
    """Prompt tokens, ascending by doubling; the last is the limit of a step. Empty if that is 0."""
    if not max_tokens:
        return []
    powers = (1 << exponent for exponent in range(_MIN_TOKENS.bit_length() - 1, max_tokens.bit_length()))
    return [*(power for power in powers if power < max_tokens), max_tokens]


def _by_usefulness(sizes: tuple[int, ...]) -> list[int]:
    """The largest holds every other, the smallest serves a single user; then by halves between them."""
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


_LAUNCHES_PER_CAPTURE = 2  # a capture launches everything twice, an eager step once
_TOLERANCE = 1.03  # a replay may take this much longer than the eager step


class CapturePolicy:
    """Seconds lost by the absence of each shape, and until when the device is busy."""

    __slots__ = ("_busy_until_s", "_clock", "_lost_s", "_quickest_s", "decode_s", "token_s")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.token_s: float | None = None  # cost of one more token; nothing is captured while it is unknown
        self.decode_s = 0.0  # the minimum time of a step
        self._clock = clock
        self._busy_until_s = 0.0
        self._quickest_s: dict[bool, float] = {}  # capture, with chunks and without
        self._lost_s: defaultdict[StepSize, float] = defaultdict(float)

    def note_capture(self, shape: StepSize, seconds: float) -> None:
        """A capture took so long. The quickest counts: slower ones compiled something or computed for long."""
        kind = bool(shape.chunks)
        self._quickest_s[kind] = min(seconds, self._quickest_s.get(kind, seconds))

    def note_launch(self, shape: StepSize) -> None:
        """The device runs this next, after what is queued."""
        if self.token_s is not None:
            begins_s = max(self._busy_until_s, self._clock())
            self._busy_until_s = begins_s + max(self.decode_s, self.token_s * shape.size)

    def note_idle(self) -> None:
        """The device is idle."""
        self._busy_until_s = 0.0

    def is_faster_eager(self, step: StepSize, shape: StepSize) -> bool:
        """Whether a step with chunks is faster eagerly than as a replay of this shape."""
        eager_s = self._eager_s(step)
        if not step.chunks or eager_s is None or self.token_s is None:
            return False
        return self.token_s * shape.size > _TOLERANCE * eager_s

    def shape_to_capture(self, step: StepSize, ran_as: StepSize | None, missing: Iterable[StepSize]) -> StepSize | None:
        """The missing shape to capture now, when a step replays another shape or (None) runs eagerly."""
        capture_s, eager_s = self._quickest_s.get(bool(step.chunks)), self._eager_s(step)
        if capture_s is None or eager_s is None or self.token_s is None:
            return None
        longest_s = _TOLERANCE * eager_s if step.chunks else float("inf")
        useful = (shape for shape in missing if shape.holds(step) and self.token_s * shape.size <= longest_s)
        best = min(useful, key=StepSize.order, default=None)
        if best is None:
            return None
        computing_s = self.token_s * best.size
        took_s = eager_s if ran_as is None else self.token_s * ran_as.size
        self._lost_s[best] += max(took_s - computing_s, 0.0)
        return best if self._lost_s[best] >= capture_s + computing_s else None  # a capture also computes

    def _eager_s(self, step: StepSize) -> float | None:
        """How long the step would take eagerly, launched now; None if that is unknown."""
        capture_s = self._quickest_s.get(bool(step.chunks))
        if capture_s is None or self.token_s is None:
            return None
        busy_s = max(self._busy_until_s - self._clock(), 0.0)
        return self.token_s * step.size + max(capture_s / _LAUNCHES_PER_CAPTURE - busy_s, 0.0)

"""Which step shapes get a CUDA graph, and when: the list of shapes, and the capture policy. Captures nothing itself.

A few shapes are captured before the first request, so that every step fits one with bounded padding. The others are
captured when the engine is idle, and between steps of a busy one by ski rental: a shape is captured once its absence
has cost as much as the pause of its capture, so the total loss is at most 2x the offline optimum. A capture launches
nothing, so the device computes the steps in flight meanwhile: the pause is what remains of it after those.
"""

import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

# Chunks of a step, from this many tokens on. Unused ones cost nothing that can be measured (ledger, section 55), but
# rows and chunks together have logits.
_CHUNKS = ((0, 16), (1024, 64))
_LONG = 2048  # tokens of one prompt: a long one has other kernels than several short ones
_MOST_CHUNKS = 256  # of a step with very many short prompts
_MIN_CHUNK_TOKENS = 8  # per chunk of such a step
_MIN_TOKENS = 16
_BESIDE = (32, 16, 8, 64, 48, 128, 96, 256)  # decoding rows beside a prompt, below the maximum
_FIRST_BESIDE = (32, 64, 128)  # of those: with sizes by doubling, a step computes at most about twice what it needs
_FIRST_DECODES = (32, 8, 64, 128, 256)  # padding rows cost a decode little: it reads all weights anyway
_FINE = (128, 1024)  # tokens between which sizes are finer: chunks that are cut for the inter-token latency
_KERNEL_ROWS = (8, 16, 32, 64, 128, 192)  # up to each of these, GEMMs or decode attention have kernels of their own
_SPARE_TOKENS = 256  # padding beyond 2x the step that costs as much as an eager launch
_QUERIES = (4, 8)  # lines of a row with drafts, at most: with 4 query heads per key head, 4 take a tile as 1 does
_VERIFYING_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_FEW_DRAFTS = 8  # of a step in which few rows have any
_SPARE_DRAFTS = 64  # padding beyond 2x a verifying step: such steps wait for memory
MAX_VERIFIED = 512  # lines of a verifying step: their logits take a GiB with a vocabulary of 256,000 and two copies
MAX_QUERIES = max(_QUERIES)


class StepSize(NamedTuple):
    """How much a step computes."""

    rows: int  # decoding, one token each
    chunks: int = 0
    tokens: int = 0  # of all chunks
    drafts: int = 0  # of all rows
    queries: int = 1  # tokens of one row, at most

    def holds(self, step: "StepSize") -> bool:
        if bool(self.drafts) != bool(step.drafts):
            return False
        if step.drafts:
            enough = self.rows >= step.rows and self.drafts >= step.drafts and self.queries >= step.queries
            return enough and self.size <= 2 * step.size + _SPARE_DRAFTS
        if step.chunks == 0:
            return self.chunks == 0 and self.rows >= step.rows
        enough = self.rows >= step.rows and self.chunks >= step.chunks and self.tokens >= step.tokens
        return enough and self.size <= 2 * step.size + _SPARE_TOKENS

    @property
    def size(self) -> int:
        """Tokens that the step computes."""
        return self.rows + self.tokens + self.drafts

    def order(self) -> tuple[int, int]:
        """Sort key: the smallest shape that holds a step is the best for it."""
        return self.size, self.chunks


class GraphShapes(NamedTuple):
    """The shapes worth capturing, the most useful first."""

    first: list[StepSize]  # before the first request
    later: list[StepSize]
    representative: list[StepSize]  # a few that together launch every kernel of all others, slowest compile first


def shapes_to_capture(max_rows: int, max_tokens: int) -> GraphShapes:
    """For steps of up to `max_rows` rows and `max_tokens` tokens in total.

    First: the largest decode (holds every other), one row alone, a few between; prompts beside a few numbers of rows,
    by doubling. Later: decodes by halves, a prompt alone, a prompt beside other numbers of rows and with less padding,
    and very many short prompts.
    """
    assert max_rows > 0 and max_tokens >= 0, (max_rows, max_tokens)
    decodes = [StepSize(rows) for rows in _by_usefulness(row_sizes(max_rows))]
    doubling = doubling_sizes(max_tokens)
    beside = rows_beside(max_rows)[:-1]
    fine = {rows: prompt_sizes(rows, max_tokens) for rows in (0, *beside, max_rows)}
    halves = {rows: [size for size in fine[rows] if (rows + size).bit_count() == 1] for rows in (*beside, max_rows)}
    first = [
        *decodes[:2],
        *(StepSize(rows) for rows in _FIRST_DECODES if rows < max_rows),
        *sorted(  # the largest first: the memory of its activations serves all others
            (
                shape
                for rows in (*(rows for rows in _FIRST_BESIDE if rows < max_rows), max_rows)
                for shape in _prompts(rows, _first_sizes(rows, halves[rows], max_tokens), max_rows)
            ),
            key=StepSize.order,
            reverse=True,
        ),
    ]
    later = [
        *decodes,
        *_prompts(0, doubling, max_rows),
        *(shape for rows in beside for shape in _prompts(rows, halves[rows], max_rows)),
        *(shape for rows in beside for shape in _prompts(rows, fine[rows], max_rows)),
        *(shape for rows in (max_rows - _MOST_CHUNKS, 0) for shape in _most_chunks(rows, doubling, max_rows)),
        *(shape for rows in (0, max_rows) for shape in _prompts(rows, [*doubling, *fine[rows]], max_rows)),
    ]
    first = list(dict.fromkeys(first))
    others = [shape for shape in dict.fromkeys(later) if shape not in first]
    kernel_rows = {StepSize(rows) for rows in (1, *_KERNEL_ROWS, max_rows) if rows <= max_rows}
    short = {shape for shape in _prompts(max_rows, doubling, max_rows) if shape.tokens <= _LONG}
    return GraphShapes(first, others, sorted(kernel_rows | short, key=StepSize.order, reverse=True))


def verifying_shapes(max_rows: int) -> list[StepSize]:
    """Steps whose rows have drafts, without chunks: 1, 2, 3, 4 or 7 of each row; and where rows are many, of a few."""
    few, many = _QUERIES
    shapes: list[StepSize] = []
    for rows in (*(rows for rows in _VERIFYING_ROWS if rows < max_rows), max_rows):
        each = [(rows * (few - 1), few), (rows, few), (rows * (many - 1), many), (rows * few, many), (2 * rows, few)]
        fewer = (_FEW_DRAFTS, rows // 4, rows // 2)
        each += [(drafts, many) for drafts in fewer if _FEW_DRAFTS <= drafts < rows]
        shapes += [StepSize(rows, drafts=min(drafts, MAX_VERIFIED - rows), queries=queries) for drafts, queries in each]
    return [shape for shape in dict.fromkeys(shapes) if shape.drafts > 0]


def _first_sizes(rows: int, halves: list[int], max_tokens: int) -> list[int]:
    """The limit of a step, and powers of two with the rows, without one that the limit holds as well."""
    return [*(size for size in halves if size + rows < max_tokens), max_tokens] if max_tokens else []


def _prompts(rows: int, sizes: list[int], max_rows: int) -> list[StepSize]:
    """One prompt, or several, beside this number of rows."""
    several = {size: max(count for least, count in _CHUNKS if size >= least) for size in sizes}
    counts = {size: (1, several[size]) if size >= _LONG else (several[size],) for size in sizes}
    return [StepSize(rows, min(count, max_rows), size) for size in sizes for count in counts[size]]


def _most_chunks(rows: int, sizes: list[int], max_rows: int) -> list[StepSize]:
    if max_rows < _MOST_CHUNKS:
        return []
    return [StepSize(rows, _MOST_CHUNKS, size) for size in sizes if size >= _MIN_CHUNK_TOKENS * _MOST_CHUNKS]


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


class ShapeTable:
    """Shapes by size, in which the smallest that holds a step is found by bisection. Decodes are apart."""

    __slots__ = ("_decodes", "_mixed", "_verifying")

    def __init__(self) -> None:
        self._decodes: list[StepSize] = []
        self._mixed: list[StepSize] = []
        self._verifying: list[StepSize] = []  # decodes with drafts

    def replace(self, shapes: Iterable[StepSize]) -> None:
        ordered = sorted(shapes, key=StepSize.order)
        self._decodes = [shape for shape in ordered if not shape.chunks and not shape.drafts]
        self._mixed = [shape for shape in ordered if shape.chunks]
        self._verifying = [shape for shape in ordered if shape.drafts]

    def smallest(self, step: StepSize) -> StepSize | None:
        shapes = self._mixed if step.chunks else self._verifying if step.drafts else self._decodes
        start = bisect_left(shapes, step.size, key=lambda shape: shape.size)
        return next((shape for shape in islice(shapes, start, None) if shape.holds(step)), None)


_MAX_KEPT = 4096  # slow launches; arbitrary, never tuned


@dataclass(slots=True)
class LaunchCounts:
    """How steps were launched since the start, and what capturing took."""

    replayed: int = 0  # steps that ran as a CUDA graph
    eager: int = 0  # steps launched kernel by kernel
    eager_s: float = 0.0  # host time of these launches
    captured: int = 0  # shapes
    capture_s: float = 0.0  # host time of captures
    captured_bytes: int = 0  # device memory that captures took, by what was free before and after
    # The latest steps for which an eager launch or a capture took the host time: step and seconds.
    slow: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_MAX_KEPT))

    @property
    def slow_s(self) -> float:
        return self.eager_s + self.capture_s

    def note_step(self, step: int, slow_s_before: float) -> None:
        """The step was launched; `slow_s` was so much before."""
        if self.slow_s > slow_s_before:
            self.slow.append((step, self.slow_s - slow_s_before))

    def slow_between(self, start: int, stop: int) -> tuple[float, ...]:
        """The seconds of each slow launch among the steps [start, stop)."""
        return tuple(seconds for step, seconds in self.slow if start <= step < stop)


_TOLERANCE = 1.03  # a replay may take this much longer than the eager step
_BURST_S = 0.1  # pauses that may follow each other at once; beyond, their share of the time is limited


class CapturePolicy:
    """Seconds lost by the absence of each shape, until when the device is busy, and how long captures may pause steps.

    An eager step takes its computing time or that of its launches, whichever is longer: they overlap. The host time of
    the launches counts in full unless the device is busy with other steps for all of it: what is hidden of it is taken
    from the time in which the next step would be launched.
    """

    __slots__ = (
        "_allowance_s", "_busy_until_s", "_clock", "_lost_s", "_now_s", "_quickest_s", "_share", "decode_s", "token_s",
    )  # fmt: skip

    def __init__(self, share: float = 1.0, clock: Callable[[], float] = time.perf_counter) -> None:
        """`share`: of the time, at most, in which captures may pause steps that would otherwise run as they are."""
        self.token_s: float | None = None  # cost of one more token; nothing is captured while it is unknown
        self.decode_s = 0.0  # the minimum time of a step
        self._share = share
        self._clock = clock
        self._now_s = clock()
        self._allowance_s = _BURST_S
        self._busy_until_s = 0.0
        self._quickest_s: dict[bool, float] = {}  # capture, with chunks and without
        self._lost_s: defaultdict[StepSize, float] = defaultdict(float)

    def note_capture(self, shape: StepSize, seconds: float) -> None:
        """A capture took so long. The quickest counts: slower ones loaded kernels."""
        kind = bool(shape.chunks)
        self._quickest_s[kind] = min(seconds, self._quickest_s.get(kind, seconds))

    def note_launch(self, shape: StepSize) -> None:
        """The device runs this next, after what is queued."""
        if self.token_s is not None:
            self._busy_until_s = max(self._busy_until_s, self._clock()) + self._computing_s(shape)

    def is_faster_eager(self, step: StepSize, shape: StepSize) -> bool:
        """Whether a step with chunks is faster eagerly than as a replay of this shape."""
        launches_s = self._quickest_s.get(bool(step.chunks))
        if not step.chunks or launches_s is None or self.token_s is None:
            return False
        return self._computing_s(shape) > _TOLERANCE * self._eager_s(step, launches_s)

    def is_worth_capturing(self, step: StepSize, ran_as: StepSize | None, missing: StepSize) -> bool:
        """Whether to capture the missing shape now, for a step that replays another one or (None) runs eagerly."""
        capture_s = self._quickest_s.get(bool(step.chunks))
        if capture_s is None or self.token_s is None:
            return False
        took_s = self._eager_s(step, capture_s) if ran_as is None else self._computing_s(ran_as)
        computing_s = self._computing_s(missing)
        if computing_s > _TOLERANCE * took_s or (ran_as is not None and computing_s >= took_s):
            return False
        self._lost_s[missing] += max(took_s - computing_s, 0.0)
        pause_s = max(capture_s - self._busy_s(), 0.0)
        if self._lost_s[missing] < pause_s:
            return False
        return self._may_pause(max(pause_s + computing_s - took_s, 0.0))

    def _eager_s(self, step: StepSize, launches_s: float) -> float:
        computing_s = self._computing_s(step)
        return computing_s if self._busy_s() >= launches_s else max(computing_s, launches_s)

    def _may_pause(self, longer_s: float) -> bool:
        """Whether captures may make this step so much longer now. If so, it is counted; the last may exceed the
        allowance, which the time after it has to make up for."""
        now_s = self._clock()
        self._allowance_s = min(_BURST_S, self._allowance_s + self._share * (now_s - self._now_s))
        self._now_s = now_s
        if self._allowance_s < 0 < longer_s:
            return False
        self._allowance_s -= longer_s
        return True

    def _computing_s(self, shape: StepSize) -> float:
        assert self.token_s is not None
        return max(self.decode_s, self.token_s * shape.size)

    def _busy_s(self) -> float:
        return max(self._busy_until_s - self._clock(), 0.0)

"""CUDA graphs of whole steps, captured by shape and replayed. The host only uploads which rows and chunks take part.

A step has two graphs: the model, by shape, and sampling, by the number of rows and by whether any of them draws at
random. Rows with other sampling parameters (penalties, masks, logprobs) are sampled outside the second graph. A step
replays the smallest captured shape that holds it; unused places hold the padding row. A step that no captured shape
holds without much waste is launched eagerly by the caller.

Capturing launches nothing, and waits for the device only where the driver needs memory for a graph. So it happens
between steps while others are in flight.

Ranks of one model choose the same shape for every step, since a collective adds tensors of one shape. So all have
captured the same shapes, or none has: each capture is agreed on, and clocks have no say in which shape is replayed.

A graph repeats the same launches on the same addresses, so the captured work reads its inputs from tensors that stay
in place and never branches on their values. On a CPU nothing is captured: a replay calls the work again.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from functools import partial
from itertools import product
from math import inf
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import IntArray, Row
from quire.core.process import gc_postponed
from quire.kernels.row_interface import PADDING, SamplingStage
from quire.kernels.transfers import upload
from quire.runner.graph_shapes import CapturePolicy, LaunchCounts, ShapeTable, StepSize

Replay = Callable[[], Tensor]
Least = Callable[[int], int]  # the least of the numbers of all ranks

_log = logging.getLogger(__name__)
_TIMED, _TIMED_S = 5, 0.05  # replays, of which the median counts, and the time that they may take together


class _Outcome(IntEnum):
    """Of a capture, from worst to best."""

    NO_MEMORY = 0
    NEEDS_RUN = 1  # or cannot be captured at all
    CAPTURED = 2


class GraphCapturer:
    """Captures work for one device. All graphs share one memory pool: only one of them runs at a time."""

    __slots__ = ("_device", "_least", "_pool", "_stream")

    def __init__(self, device: torch.device, least: Least | None = None) -> None:
        """`least`: with several ranks, which capture the same work: all of them, or none."""
        self._device = device
        self._least: Least = least or (lambda number: number)
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        # One for all captures: libraries keep a workspace for each stream.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def capture(self, work: Replay) -> Replay:
        """Capture the work, which does not run. Call between steps.

        Where it cannot be captured unless it ran before (a library initializes something at its first call), it runs
        once, after all that is in flight, and is captured then.
        """
        replay, outcome, error = self._try(work)
        agreed = self._least(outcome)
        if agreed == _Outcome.NEEDS_RUN:
            _log.info("captured again after a run: %s", error or "another rank needs it")
            work()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
                self._pool = torch.cuda.graph_pool_handle()  # the allocator may still take the other for one in use
            replay, outcome, error = self._try(work)
            agreed = self._least(outcome)
        if agreed != _Outcome.CAPTURED:
            raise error or torch.OutOfMemoryError("another rank could not capture a CUDA graph")
        assert replay is not None
        return replay

    def agree(self, fits: bool) -> bool:
        """Whether it does on every rank."""
        return bool(self._least(fits))

    def _try(self, work: Replay) -> tuple[Replay | None, _Outcome, RuntimeError | None]:
        try:
            return self._capture(work), _Outcome.CAPTURED, None
        except torch.OutOfMemoryError as error:
            return None, _Outcome.NO_MEMORY, error
        except RuntimeError as error:
            return None, _Outcome.NEEDS_RUN, error

    def _capture(self, work: Replay) -> Replay:
        """`torch.cuda.graph` without what it does first: a synchronization, a garbage collection, empty caches.

        No garbage is collected meanwhile either: freeing the graphs of an engine that was dropped would end the
        capture. "relaxed": a kernel may be loaded at its first launch.
        """
        if self._device.type != "cuda":
            return work
        graph = torch.cuda.CUDAGraph()
        with gc_postponed(), torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                result = work()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def free_bytes(self) -> int:
        """Free memory of the device; 0 where nothing is captured."""
        return torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else 0


def seconds_of(replay: Replay, device: torch.device, at_most_s: float = _TIMED_S) -> float:
    """The time of one replay on the device: the median of a few, fewer of a long one."""
    replay()
    seconds = [_seconds_once(replay, device)]
    while len(seconds) < _TIMED and sum(seconds) < at_most_s:
        seconds.append(_seconds_once(replay, device))
    return median(seconds)


def _seconds_once(replay: Replay, device: torch.device) -> float:
    if device.type != "cuda":
        begun_s = time.perf_counter()
        replay()
        return time.perf_counter() - begun_s
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begun.record()
    replay()
    done.record()
    done.synchronize()
    return float(begun.elapsed_time(done)) / 1000


class StepTimes(NamedTuple):
    """Times of captured steps whose rows have no context yet."""

    decode_s: float  # a step with one row
    token_s: float  # per token of the largest step


class ChunkInputs(NamedTuple):
    """What the host knows of a step's chunks, on the device. The last entries may be padding."""

    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    token_rows: Tensor  # [tokens] int64
    starts: Tensor  # [chunks + 1] int64: where each chunk starts among the tokens, and where the last ends
    ends: Tensor  # [chunks] int64: how many tokens of the sequence are computed after the chunk
    rows: Tensor  # [chunks] int64
    emitting: Tensor  # [chunks] int64: the row that gets a token from the chunk, or PADDING


class ChunkArrays(NamedTuple):
    """The same on the host, without padding."""

    tokens: IntArray
    positions: NDArray[np.int64]
    token_rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    rows: NDArray[np.int64]
    emitting: NDArray[np.int64]


def shape_of(rows: IntArray, chunks: ChunkArrays | None) -> StepSize:
    return StepSize(len(rows)) if chunks is None else StepSize(len(rows), len(chunks.rows), len(chunks.tokens))


class PlacedInput:
    """An input of captured work. It stays in place, and is uploaded when it changes."""

    __slots__ = ("_device", "_placed", "tensor")

    def __init__(self, size: int, fill: int, device: torch.device) -> None:
        self._device = device
        self._placed: NDArray[np.int64] = np.full(size, fill, dtype=np.int64)
        self.tensor = torch.full((size,), fill, dtype=torch.int64, device=device)

    def place(self, array: NDArray[np.int64]) -> None:
        if not np.array_equal(array, self._placed):
            self.tensor.copy_(upload(array, self._device), non_blocking=True)
            self._placed = array


# The model on decoding rows [rows] int64 and on chunks; it leaves its logits in the buffer that sampling reads.
Forward = Callable[[Tensor, ChunkInputs | None], Tensor]
# The same on rows with drafts: rows [rows] int64, starts of their tokens [rows + 1] int64, and the shape.
Verify = Callable[[Tensor, Tensor, StepSize], Tensor]
# The outcome [5, rows] int64 of sampling a token for as many rows as the shape has, none of which needs more than these
# stages. Of a shape with drafts [5, queries, rows].
Sample = Callable[[StepSize, SamplingStage], Tensor]

_SAMPLING_GRAPHS_AT_ONCE = 4  # captured at a time, where many are missing: steps wait meanwhile


class GraphedSteps:
    """The captured graphs, by shape of step."""

    __slots__ = (
        "_captured", "_capturer", "_device", "_fits", "_forward", "_graphs", "_has_ranks", "_inputs", "_kept_bytes",
        "_missing", "_missing_sampling", "_missing_shapes", "_padding_row", "_policy", "_rows", "_sample",
        "_sampling_graphs", "_starts", "_stopped", "_verify", "counts",
    )  # fmt: skip

    def __init__(
        self,
        forward: Forward,
        sample: Sample,
        shapes: list[StepSize],
        padding_row: Row,
        device: torch.device,
        *,
        capture_share: float = 1.0,  # of the time, at most, in which captures may pause steps
        kept_bytes: int = 0,  # of device memory that captures leave free
        verify: Verify | None = None,  # for shapes with drafts
        least: Least | None = None,  # with several ranks
    ) -> None:
        """`shapes`: what is worth capturing, the most useful first."""
        self.counts = LaunchCounts()
        self._forward = forward
        self._verify = verify
        self._sample = sample
        self._padding_row = padding_row
        self._device = device
        self._capturer = GraphCapturer(device, least)
        self._has_ranks = least is not None
        self._missing = shapes
        self._missing_shapes, self._captured = ShapeTable(), ShapeTable()  # the same, and those of `_graphs`, by size
        self._kept_bytes = kept_bytes
        self._graphs: dict[StepSize, Replay] = {}
        self._sampling_graphs: dict[tuple[StepSize, SamplingStage], Replay] = {}
        self._stopped = False
        self._note_missing()
        self._policy = CapturePolicy(capture_share)
        self._fits: dict[StepSize, StepSize | None] = {}  # by size of step, until another shape is captured
        max_rows = max(shape.rows for shape in shapes)
        self._rows = PlacedInput(max_rows, padding_row, device)
        self._starts = PlacedInput(max_rows + 1, 0, device)
        self._inputs = torch.zeros(max(map(_num_inputs, shapes)), dtype=torch.int64, device=device)

    @property
    def capturer(self) -> GraphCapturer:
        """For more graphs in the same memory."""
        return self._capturer

    @property
    def complete(self) -> bool:
        return not self._missing and not self.lacks_sampling

    @property
    def next_missing(self) -> StepSize | None:
        """The most useful shape that is not captured yet."""
        return self._missing[0] if self._missing else None

    def row_inputs(self, shape: StepSize) -> tuple[Tensor, Tensor]:
        """Where a step of this shape with drafts has its rows, and the starts of their tokens."""
        return self._rows.tensor[: shape.rows], self._starts.tensor[: shape.rows + 1]

    def capture(self, shape: StepSize | None) -> None:
        """Capture this missing shape, and a few missing sampling graphs. Call between steps."""
        begun_s, free = time.perf_counter(), self._capturer.free_bytes()
        if not self._capturer.agree(self._device.type != "cuda" or free >= self._kept_bytes):
            raise torch.OutOfMemoryError(f"{free} bytes are free, and {self._kept_bytes} are kept for eager steps")
        self._place_rows(np.empty(0, dtype=np.int32))
        shape = shape if shape in self._missing else None  # it may have been told twice
        if shape is not None:
            self._missing.remove(shape)
            self._note_missing()  # before a capture can fail
            self._graphs[shape] = self._capturer.capture(self._work(shape))
            self._fits.clear()
            self._note_missing()
        own = set() if shape is None else {_sampled(shape)}
        missing = sorted(self._missing_sampling, key=lambda graph: (graph[0] not in own, graph))
        for sampled, stages in missing[:_SAMPLING_GRAPHS_AT_ONCE]:
            self._sampling_graphs[sampled, stages] = self._capturer.capture(partial(self._sample, sampled, stages))
        self._note_missing()
        took_s = time.perf_counter() - begun_s
        if shape is not None:
            self._policy.note_capture(shape, took_s)
        self.counts.captured = len(self._graphs)
        self.counts.capture_s += took_s
        self.counts.captured_bytes += max(free - self._capturer.free_bytes(), 0)

    def count(self, capture: Callable[[], None]) -> None:
        """Capture other work, and count its time and memory with that of the shapes."""
        begun_s, free = time.perf_counter(), self._capturer.free_bytes()
        capture()
        self.counts.capture_s += time.perf_counter() - begun_s
        self.counts.captured_bytes += max(free - self._capturer.free_bytes(), 0)

    def dry_run(self, shapes: list[StepSize]) -> None:
        """Run these shapes once without capturing, so that the caller sees which kernels they launch. Between steps."""
        self._place_rows(np.empty(0, dtype=np.int32))
        for sampled, stages in product({_sampled(shape) for shape in shapes}, SamplingStage):
            self._sample(sampled, stages)
        for shape in shapes:
            self._work(shape)()

    def _work(self, shape: StepSize) -> Replay:
        """The model on a shape that holds padding only."""
        if shape.drafts:
            assert self._verify is not None, "shapes with drafts are verified"
            self._place_starts(np.zeros(0, dtype=np.int64))
            return partial(self._verify, *self.row_inputs(shape), shape)
        self._place_chunks(shape, None)
        chunks = None
        if shape.chunks:
            chunks = ChunkInputs(*torch.split(self._inputs[: _num_inputs(shape)], list(_sizes(shape))))
        return partial(self._forward, self._rows.tensor[: shape.rows], chunks)

    @property
    def lacks_sampling(self) -> bool:
        """Whether sampling graphs are missing and may be captured."""
        return not self._stopped and bool(self._missing_sampling)

    def worth_capturing(self, step: StepSize) -> StepSize | None:
        """The missing shape whose absence, with this step, has cost as much as its capture will."""
        best = self._missing_shapes.smallest(step)
        if best is None:
            return None
        ran_as = self._fitting(step)
        return best if self._policy.is_worth_capturing(step, ran_as, best) else None

    def _note_missing(self) -> None:
        """Update what every step reads, when it changes."""
        sampled = {_sampled(shape) for shape in self._graphs}
        self._missing_sampling = set(product(sampled, SamplingStage)) - self._sampling_graphs.keys()
        self._missing_shapes.replace(self._missing)
        self._captured.replace(self._graphs)

    def step_times(self) -> StepTimes | None:
        """Times of captured steps of padding; None without a decode and a step with chunks. Call between steps."""
        decodes = [shape for shape in self._graphs if not shape.chunks and not shape.drafts]
        mixed = [shape for shape in self._graphs if shape.chunks]
        if not decodes or not mixed:
            return None
        smallest, largest = min(decodes), max(mixed, key=StepSize.order)
        self._place_rows(np.empty(0, dtype=np.int32))
        self._place_chunks(largest, None)
        at_most_s = inf if self._has_ranks else _TIMED_S  # each rank replays as often as the others
        decode_s, largest_s = (
            seconds_of(self._graphs[shape], self._device, at_most_s) for shape in (smallest, largest)
        )
        token_s = largest_s / largest.size
        self._policy.decode_s, self._policy.token_s = decode_s, token_s
        return StepTimes(decode_s, token_s)

    def stop_capturing(self) -> None:
        """Capture nothing more; the captured graphs stay."""
        self._missing.clear()
        self._note_missing()
        self._stopped = True

    def drop_sampling_graphs(self) -> None:
        """Drop the sampling graphs: they read tensors that are no longer in use."""
        self._sampling_graphs.clear()
        self._note_missing()

    def forward(self, rows: IntArray, chunks: ChunkArrays | None = None) -> StepSize | None:
        """Replay the model for these rows and chunks. Returns the shape that ran; None if none fits and nothing ran."""
        shape = self._fitting(shape_of(rows, chunks))
        if shape is None:
            return None
        self._place_rows(rows)
        self._place_chunks(shape, chunks)
        self._graphs[shape]()
        self._policy.note_launch(shape)
        self.counts.replayed += 1
        return shape

    def verify(self, rows: IntArray, counts: NDArray[np.int64]) -> StepSize | None:
        """The same for rows with this many drafts each."""
        step = StepSize(len(rows), drafts=int(counts.sum()), queries=1 + int(counts.max()))
        shape = self._fitting(step)
        if shape is None:
            return None
        self._place_rows(rows)
        self._place_starts(1 + counts)
        self._graphs[shape]()
        self._policy.note_launch(shape)
        self.counts.replayed += 1
        return shape

    def note_eager(self, step: StepSize) -> None:
        """A step was launched eagerly."""
        self._policy.note_launch(step)

    def sample(self, shape: StepSize, num_rows: int, num_chunks: int, stages: SamplingStage) -> Tensor | None:
        """Replay sampling after a step; the next replay overwrites the outcome. None if it is not captured.

        [5, num_rows + num_chunks] int64; [5, queries, num_rows] of a shape with drafts.
        """
        replay = self._sampling_graphs.get((_sampled(shape), stages))
        if replay is None:
            return None
        outcome = replay()
        if shape.drafts:
            return outcome[:, :, :num_rows]
        if not num_chunks:
            return outcome[:, :num_rows]
        return torch.cat([outcome[:, :num_rows], outcome[:, shape.rows : shape.rows + num_chunks]], dim=1)

    def _fitting(self, step: StepSize) -> StepSize | None:
        """The captured shape to run a step as. Cached for decodes, which have few sizes."""
        if step in self._fits:
            return self._fits[step]
        fitting = self._captured.smallest(step)
        if fitting is not None and not self._has_ranks and self._policy.is_faster_eager(step, fitting):
            fitting = None
        if not step.chunks:
            self._fits[step] = fitting
        return fitting

    def _place_rows(self, rows: IntArray) -> None:
        """Upload the rows, unless the same rows took part in the last step, which is usual."""
        self._rows.place(_filled(rows, len(self._rows.tensor), self._padding_row))

    def _place_starts(self, lengths: NDArray[np.int64]) -> None:
        """Upload where the tokens of each row start, of rows with this many; padding rows have none."""
        starts = np.concatenate([[0], lengths.cumsum()])
        self._starts.place(_filled(starts, len(self._starts.tensor), starts[-1]))

    def _place_chunks(self, shape: StepSize, chunks: ChunkArrays | None) -> None:
        """Upload the chunks in the layout of a shape; None: padding."""
        if not shape.chunks:
            return
        arrays: tuple[NDArray[np.integer], ...] = chunks or (_NONE,) * len(ChunkInputs._fields)
        num_tokens = 0 if chunks is None else len(chunks.tokens)
        # Padding: token 0 at position 0 of the padding row; empty chunks behind the last token.
        fills = (0, 0, self._padding_row, num_tokens, 0, self._padding_row, PADDING)
        parts = zip(arrays, _sizes(shape), fills, strict=True)
        filled = np.concatenate([_filled(array, size, fill) for array, size, fill in parts])
        self._inputs[: len(filled)].copy_(upload(filled, self._device), non_blocking=True)


_NONE: NDArray[np.int64] = np.empty(0, dtype=np.int64)


def _sizes(shape: StepSize) -> tuple[int, ...]:
    """Lengths of the fields of ChunkInputs."""
    chunks, tokens = shape.chunks, shape.tokens
    return (tokens, tokens, tokens, chunks + 1, chunks, chunks, chunks)


def _sampled(shape: StepSize) -> StepSize:
    """What sampling after a shape depends on: the number of rows that get a token, and their drafts."""
    return shape if shape.drafts else StepSize(shape.rows + shape.chunks)


def _num_inputs(shape: StepSize) -> int:
    return sum(_sizes(shape)) if shape.chunks else 0


def _filled(array: NDArray[np.integer], size: int, fill: int) -> NDArray[np.int64]:
    whole = np.full(size, fill, dtype=np.int64)
    whole[: len(array)] = array
    return whole

"""Steps that are recorded by shape and replayed. The host says who takes part; nothing else is built for such a step.

A step is recorded in two parts: the model, by shape, and the choice of tokens for whoever asks for nothing unusual, by
the number of them and by whether any of them draws. For others the second part is not replayed. A step runs as the
smallest recorded shape that holds it, the places that are left filled with nobody. What no recorded shape holds,
without holding much more, is nobody's here: whoever asks builds it in the plain way.

Work that is recorded once and replayed: on a GPU as a CUDA graph, elsewhere by doing it again.

A graph repeats the same launches on the same addresses: the work must read its inputs from tensors that stay in place,
and must not look at what they hold.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import IntArray, Row
from quire.core.process import postponed
from quire.kernels.row_interface import PADDING, SamplingStage
from quire.kernels.transfers import upload
from quire.runner.graph_shapes import CapturePolicy, StepSize

Replay = Callable[[], Tensor]

_TIMED = 5  # replays whose median counts


class GraphRecorder:
    """Records work for one device. What its graphs need between their launches they share: only one runs at a time."""

    __slots__ = ("_device", "_pool")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def record(self, work: Replay) -> Replay:
        """To be called between steps. On a GPU the work is launched twice and done once meanwhile."""
        if self._device.type != "cuda":
            return work
        work()  # compiles, and lets libraries take their workspaces, which a capture must not
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Two streams, because a capture that fails would leave its own as the current one. No garbage, because freeing
        # the graphs of an engine that nobody has any more would end the capture.
        with (
            postponed(),
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            result = work()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def seconds_of(replay: Replay, device: torch.device) -> float:
    """How long it takes from its beginning to its end on the device: the median of a few."""
    replay()
    return median(_seconds_once(replay, device) for _ in range(_TIMED))


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
    """How fast steps are whose rows have read nothing yet."""

    decode_s: float  # of a step with one row
    token_s: float  # for each token of a step with as many as there can be


class ChunkInputs(NamedTuple):
    """All that the host knows of a step's chunks. The last entries may be nobody's."""

    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    token_rows: Tensor  # [tokens] int64
    starts: Tensor  # [chunks + 1] int64: where each begins among the tokens, and where the last ends
    ends: Tensor  # [chunks] int64: how many tokens of its sequence are computed with it
    rows: Tensor  # [chunks] int64
    speaking: Tensor  # [chunks] int64: the row that gets a token with it, or PADDING


class ChunkArrays(NamedTuple):
    """The same on the host, without anybody in the last entries."""

    tokens: IntArray
    positions: NDArray[np.int64]
    token_rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    rows: NDArray[np.int64]
    speaking: NDArray[np.int64]


def shape_of(rows: IntArray, chunks: ChunkArrays | None) -> StepSize:
    return StepSize(len(rows)) if chunks is None else StepSize(len(rows), len(chunks.rows), len(chunks.tokens))


# The model on rows [rows] int64 that cruise, and on chunks; what it says lies where whoever chooses looks for it.
Forward = Callable[[Tensor, ChunkInputs | None], Tensor]
# The outcome [5, count] int64 of choosing a token for each of so many, none of whom goes beyond these stages.
Choose = Callable[[int, SamplingStage], Tensor]

_CHOICES_AT_ONCE = 4  # are recorded, where many are missing: steps wait for it


class GraphedSteps:
    """The recorded shapes of one step."""

    __slots__ = (
        "_choices", "_choose", "_device", "_fits", "_forward", "_gave_up", "_here", "_inputs", "_missing",
        "_missing_choices", "_missing_decodes", "_nobody", "_recorded", "_recorder", "_regrets", "_rows",
    )  # fmt: skip

    def __init__(
        self, forward: Forward, choose: Choose, shapes: list[StepSize], nobody: Row, device: torch.device
    ) -> None:
        """`shapes`: what is worth recording, the most useful first."""
        self._forward = forward
        self._choose = choose
        self._nobody = nobody
        self._device = device
        self._recorder = GraphRecorder(device)
        self._missing = shapes
        self._recorded: dict[StepSize, Replay] = {}
        self._choices: dict[tuple[int, SamplingStage], Replay] = {}
        self._gave_up = False
        self._note_missing()
        self._regrets = CapturePolicy()
        self._fits: dict[StepSize, StepSize | None] = {}  # for steps, until another shape is recorded
        max_rows = max(shape.rows for shape in shapes)
        self._rows = torch.full((max_rows,), nobody, dtype=torch.int64, device=device)
        self._here: NDArray[np.int64] = np.full(max_rows, nobody, dtype=np.int64)  # what `_rows` holds
        self._inputs = torch.zeros(max(map(_num_inputs, shapes)), dtype=torch.int64, device=device)

    @property
    def complete(self) -> bool:
        return not self._missing and not self.forgot

    @property
    def next_missing(self) -> StepSize | None:
        """The most useful one that is not recorded."""
        return self._missing[0] if self._missing else None

    def record(self, shape: StepSize | None) -> None:
        """This one that is missing, and a few choices that are missing of others. Between steps."""
        begun_s = time.perf_counter()
        self._place_rows(np.empty(0, dtype=np.int32))
        if shape is not None:
            self._missing.remove(shape)
            self._note_missing()  # before anything can fail
            self._recorded[shape] = self._recorder.record(self._work(shape))
            self._fits.clear()
            self._note_missing()
        own = set() if shape is None else {shape.rows + shape.chunks}
        missing = sorted(self._missing_choices, key=lambda choice: (choice[0] not in own, choice))
        for count, stages in missing[:_CHOICES_AT_ONCE]:
            self._choices[count, stages] = self._recorder.record(partial(self._choose, count, stages))
        self._note_missing()
        if shape is not None:
            self._regrets.took(shape, time.perf_counter() - begun_s)
        self._regrets.rests()

    def dry_run(self, shapes: list[StepSize]) -> None:
        """Go through these once and record nothing: for whoever would see what they launch. Between steps."""
        self._place_rows(np.empty(0, dtype=np.int32))
        for count, stages in product({shape.rows + shape.chunks for shape in shapes}, SamplingStage):
            self._choose(count, stages)
        for shape in shapes:
            self._work(shape)()

    def _work(self, shape: StepSize) -> Replay:
        """The model on a shape with nobody in it."""
        self._place_chunks(shape, None)
        return partial(self._forward, self._rows[: shape.rows], self._views(shape) if shape.chunks else None)

    @property
    def forgot(self) -> bool:
        """Whether choices that were recorded are missing again, and may be recorded."""
        return not self._gave_up and bool(self._missing_choices)

    def worth_recording(self, step: StepSize) -> StepSize | None:
        """The missing shape whose want, with this step, has cost as much as recording it will."""
        ran_as = self._fitting(step)
        if ran_as is not None and ran_as.size == step.size:
            return None
        return self._regrets.worth(step, ran_as, self._missing if step.chunks else self._missing_decodes)

    def _note_missing(self) -> None:
        """What every step asks for, found when it changes."""
        counts = {shape.rows + shape.chunks for shape in self._recorded}
        self._missing_choices = set(product(counts, SamplingStage)) - self._choices.keys()
        self._missing_decodes = [shape for shape in self._missing if not shape.chunks]

    def pace(self) -> StepTimes | None:
        """Of the recorded steps, with nobody in them; None without a decode and a step with chunks. Between steps."""
        decodes = [shape for shape in self._recorded if not shape.chunks]
        mixed = [shape for shape in self._recorded if shape.chunks]
        if not decodes or not mixed:
            return None
        smallest, largest = min(decodes), max(mixed, key=StepSize.order)
        self._place_rows(np.empty(0, dtype=np.int32))
        self._place_chunks(largest, None)
        decode_s, largest_s = (seconds_of(self._recorded[shape], self._device) for shape in (smallest, largest))
        token_s = largest_s / largest.size
        self._regrets.decode_s, self._regrets.token_s = decode_s, token_s
        return StepTimes(decode_s, token_s)

    def give_up(self) -> None:
        """Record nothing more; what is recorded stays."""
        self._missing.clear()
        self._note_missing()
        self._gave_up = True

    def forget_choices(self) -> None:
        """How tokens are chosen was recorded with tensors that are out of use."""
        self._choices.clear()
        self._note_missing()

    def forward(self, rows: IntArray, chunks: ChunkArrays | None = None) -> StepSize | None:
        """Replay the model for these rows and chunks. The shape that it ran as; None if none fits, and nothing ran."""
        shape = self._fitting(shape_of(rows, chunks))
        if shape is None:
            return None
        self._place_rows(rows)
        self._place_chunks(shape, chunks)
        self._recorded[shape]()
        self._regrets.begins(shape)
        return shape

    def built(self, step: StepSize) -> None:
        """One was launched that is not replayed."""
        self._regrets.begins(step)

    def choose(self, shape: StepSize, num_rows: int, num_chunks: int, stages: SamplingStage) -> Tensor | None:
        """Replay the choice after a step of so many; the next overwrites its outcome. None if it is not recorded.

        [5, num_rows + num_chunks] int64.
        """
        replay = self._choices.get((shape.rows + shape.chunks, stages))
        if replay is None:
            return None
        outcome = replay()
        if not num_chunks:
            return outcome[:, :num_rows]
        return torch.cat([outcome[:, :num_rows], outcome[:, shape.rows : shape.rows + num_chunks]], dim=1)

    def _fitting(self, step: StepSize) -> StepSize | None:
        """Remembered for decodes, of which there are few."""
        if step in self._fits:
            return self._fits[step]
        holding = (shape for shape in self._recorded if shape.holds(step))
        fitting = min(holding, key=StepSize.order, default=None)
        if fitting is not None and self._regrets.better_built(step, fitting):
            fitting = None
        if not step.chunks:
            self._fits[step] = fitting
        return fitting

    def _place_rows(self, rows: IntArray) -> None:
        """Nothing is sent if the same rows took part in the last step, which is usual."""
        wanted = np.full_like(self._here, self._nobody)
        wanted[: len(rows)] = rows
        if not np.array_equal(wanted, self._here):
            self._rows.copy_(upload(wanted, self._device), non_blocking=True)
            self._here = wanted

    def _place_chunks(self, shape: StepSize, chunks: ChunkArrays | None) -> None:
        """The chunks in the layout of a shape; None: nobody's."""
        if not shape.chunks:
            return
        arrays: tuple[NDArray[np.integer], ...] = chunks or (_NONE,) * len(ChunkInputs._fields)
        num_tokens = 0 if chunks is None else len(chunks.tokens)
        # No token, the first place, no row; chunks of no tokens behind the last.
        fills = (0, 0, self._nobody, num_tokens, 0, self._nobody, PADDING)
        parts = zip(arrays, _sizes(shape), fills, strict=True)
        filled = np.concatenate([_filled(array, size, fill) for array, size, fill in parts])
        self._inputs[: len(filled)].copy_(upload(filled, self._device), non_blocking=True)

    def _views(self, shape: StepSize) -> ChunkInputs:
        return ChunkInputs(*torch.split(self._inputs[: _num_inputs(shape)], list(_sizes(shape))))


_NONE: NDArray[np.int64] = np.empty(0, dtype=np.int64)


def _sizes(shape: StepSize) -> tuple[int, ...]:
    """Of the fields of ChunkInputs."""
    _, chunks, tokens = shape
    return (tokens, tokens, tokens, chunks + 1, chunks, chunks, chunks)


def _num_inputs(shape: StepSize) -> int:
    return sum(_sizes(shape)) if shape.chunks else 0


def _filled(array: NDArray[np.integer], size: int, fill: int) -> NDArray[np.int64]:
    whole = np.full(size, fill, dtype=np.int64)
    whole[: len(array)] = array
    return whole

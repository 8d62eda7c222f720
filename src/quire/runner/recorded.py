"""Steps that are recorded by shape and replayed. The host says who takes part; nothing else is built for such a step.

A step runs as the smallest recorded shape that holds it, the places that are left filled with nobody. What no recorded
shape holds, without holding much more, is nobody's here: whoever asks builds it in the plain way.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import IntArray, Row
from quire.kernels.choosing import PADDING
from quire.kernels.host_copies import upload
from quire.runner.replay import Recorder, Replay, seconds_of

_SPARE_TOKENS = 256  # that a shape may have beyond twice what a step needs: as dear as building it


class Shape(NamedTuple):
    """How much a step computes."""

    rows: int  # that cruise, one token each
    chunks: int = 0
    tokens: int = 0  # of all chunks

    def holds(self, step: "Shape") -> bool:
        if step.chunks == 0:
            return self.chunks == 0 and self.rows >= step.rows
        enough = self.rows >= step.rows and self.chunks >= step.chunks and self.tokens >= step.tokens
        return enough and self.rows + self.tokens <= 2 * (step.rows + step.tokens) + _SPARE_TOKENS


class Pace(NamedTuple):
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


# The outcome [5, rows + chunks] int64 of rows [rows] int64 that cruise, and of chunks.
Step = Callable[[Tensor, ChunkInputs | None], Tensor]


class RecordedSteps:
    """The recorded shapes of one step."""

    __slots__ = (
        "_chosen", "_device", "_here", "_inputs", "_missing", "_nobody", "_recorded", "_recorder", "_rows", "_step",
    )  # fmt: skip

    def __init__(self, step: Step, shapes: list[Shape], nobody: Row, device: torch.device) -> None:
        """`shapes`: what is worth recording, the most useful first."""
        self._step = step
        self._nobody = nobody
        self._device = device
        self._recorder = Recorder(device)
        self._missing = shapes
        self._recorded: dict[Shape, Replay] = {}
        self._chosen: dict[Shape, Shape | None] = {}  # for steps, until another shape is recorded
        max_rows = max(shape.rows for shape in shapes)
        self._rows = torch.full((max_rows,), nobody, dtype=torch.int64, device=device)
        self._here: NDArray[np.int64] = np.full(max_rows, nobody, dtype=np.int64)  # what `_rows` holds
        self._inputs = torch.zeros(max(map(_num_inputs, shapes)), dtype=torch.int64, device=device)

    @property
    def num_missing(self) -> int:
        return len(self._missing)

    def record_next(self) -> Shape | None:
        """Record the most useful shape that is missing; None if none is. To be called between steps."""
        if not self._missing:
            return None
        shape = self._missing.pop(0)
        self._place_rows(np.empty(0, dtype=np.int32))
        self._place_chunks(shape, None)
        rows = self._rows[: shape.rows]
        chunks = self._views(shape) if shape.chunks else None
        self._recorded[shape] = self._recorder.record(lambda: self._step(rows, chunks))
        self._chosen.clear()
        return shape

    def pace(self) -> Pace | None:
        """Of the recorded steps, with nobody in them; None without a decode and a step with chunks. Between steps."""
        decodes = [shape for shape in self._recorded if not shape.chunks]
        mixed = [shape for shape in self._recorded if shape.chunks]
        if not decodes or not mixed:
            return None
        smallest, largest = min(decodes), max(mixed, key=lambda shape: shape.rows + shape.tokens)
        self._place_rows(np.empty(0, dtype=np.int32))
        self._place_chunks(largest, None)
        decode_s, largest_s = (seconds_of(self._recorded[shape], self._device) for shape in (smallest, largest))
        return Pace(decode_s, largest_s / (largest.rows + largest.tokens))

    def forget(self) -> None:
        """What was recorded reads tensors that are out of use."""
        self._missing = [*self._recorded, *self._missing]
        self._recorded.clear()
        self._chosen.clear()

    def launch(self, rows: IntArray, chunks: ChunkArrays | None = None) -> Tensor | None:
        """The outcome of these rows and chunks, which the next launch overwrites; None if no shape fits.

        [5, rows + chunks] int64.
        """
        step = Shape(len(rows)) if chunks is None else Shape(len(rows), len(chunks.rows), len(chunks.tokens))
        shape = self._fitting(step)
        if shape is None:
            return None
        self._place_rows(rows)
        if chunks is None:
            return self._recorded[shape]()[:, : len(rows)]
        self._place_chunks(shape, chunks)
        outcome = self._recorded[shape]()
        return torch.cat([outcome[:, : len(rows)], outcome[:, shape.rows : shape.rows + len(chunks.rows)]], dim=1)

    def _fitting(self, step: Shape) -> Shape | None:
        if step not in self._chosen:
            fitting = [shape for shape in self._recorded if shape.holds(step)]
            self._chosen[step] = min(fitting, key=lambda shape: (shape.rows + shape.tokens, shape.chunks), default=None)
        return self._chosen[step]

    def _place_rows(self, rows: IntArray) -> None:
        """Nothing is sent if the same rows took part in the last step, which is usual."""
        wanted = np.full_like(self._here, self._nobody)
        wanted[: len(rows)] = rows
        if not np.array_equal(wanted, self._here):
            self._here = wanted
            self._rows.copy_(upload(wanted, self._device), non_blocking=True)

    def _place_chunks(self, shape: Shape, chunks: ChunkArrays | None) -> None:
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

    def _views(self, shape: Shape) -> ChunkInputs:
        return ChunkInputs(*torch.split(self._inputs[: _num_inputs(shape)], list(_sizes(shape))))


_NONE: NDArray[np.int64] = np.empty(0, dtype=np.int64)


def _sizes(shape: Shape) -> tuple[int, ...]:
    """Of the fields of ChunkInputs."""
    _, chunks, tokens = shape
    return (tokens, tokens, tokens, chunks + 1, chunks, chunks, chunks)


def _num_inputs(shape: Shape) -> int:
    return sum(_sizes(shape)) if shape.chunks else 0


def _filled(array: NDArray[np.integer], size: int, fill: int) -> NDArray[np.int64]:
    whole = np.full(size, fill, dtype=np.int64)
    whole[: len(array)] = array
    return whole

"""The sampling parameters of every row, on the device; and on the host, which features each row needs.

The host knows the features of a batch without a synchronisation: a greedy batch costs an argmax, and a batch without
top-k or top-p is never sorted. State that only some rows need has slots (`SlotPool`), so that vocabulary-wide tables
hold no more rows than necessary. Does not depend on logits.
"""

from collections.abc import Sequence as Many
from enum import IntFlag, auto
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import IntArray, Row
from quire.core.sampling import RowSampling
from quire.core.step import Masks, RowStart
from quire.kernels.row_interface import EndColumns, SamplingTable
from quire.kernels.transfers import upload

_USUAL_ENDS = 4  # end tokens per row before the table grows
# Below this temperature the likeliest token always wins in float32; still a normal float32.
_LOWEST_TEMPERATURE = 1e-30


class SlotPool:
    """The slot of each row. The number of slots doubles on demand, up to one per row."""

    __slots__ = ("_device", "_free", "_slot_of", "capacity")

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device = device
        self.capacity = 0
        self._free: list[int] = []
        self._slot_of: NDArray[np.int64] = np.full(max_rows, -1, dtype=np.int64)

    def take(self, row: Row) -> int:
        assert self._slot_of[row] < 0, f"row {row} already holds slot {self._slot_of[row]}"
        if not self._free:
            capacity = min(max(1, 2 * self.capacity), len(self._slot_of))
            assert capacity > self.capacity, "more slots taken than there are rows"
            self._free.extend(reversed(range(self.capacity, capacity)))
            self.capacity = capacity
        slot = self._free.pop()
        self._slot_of[row] = slot
        return slot

    def release(self, row: Row) -> None:
        """Release a row's slot, if it has one."""
        if self._slot_of[row] >= 0:
            self._free.append(int(self._slot_of[row]))
            self._slot_of[row] = -1

    def places(self, rows: IntArray) -> NDArray[np.int64]:  # [n]; -1 for rows without one
        found: NDArray[np.int64] = self._slot_of[rows]
        return found

    def of(self, rows: IntArray) -> Tensor:  # [n] int64, on the device
        slots = self.places(rows)
        assert (slots >= 0).all(), f"rows without a slot among {rows}"
        return upload(slots, self._device)


def grown(table: Tensor, sizes: tuple[int, ...], fill: float = 0) -> Tensor:
    """The table with at least these sizes; what is new holds `fill`."""
    sizes = tuple(max(old, new) for old, new in zip(table.shape, sizes, strict=True))
    if sizes == tuple(table.shape):
        return table
    larger = torch.full(sizes, fill, dtype=table.dtype, device=table.device)
    larger[tuple(slice(0, old) for old in table.shape)] = table
    return larger


class SamplingFeature(IntFlag):
    """The sampling features that a row may need."""

    RANDOM = auto()  # temperature above 0
    TOP_K = auto()
    TOP_P = auto()
    MIN_P = auto()
    LOGIT_BIAS = auto()  # logit bias, allowed ids, bad words of one token
    BAD_WORDS = auto()  # of several tokens
    MIN_TOKENS = auto()
    PENALTIES = auto()
    LOGPROBS = auto()


LOGIT_PROCESSORS = (
    SamplingFeature.LOGIT_BIAS | SamplingFeature.BAD_WORDS | SamplingFeature.MIN_TOKENS | SamplingFeature.PENALTIES
)  # features that change logits before a token is selected


class SamplingBatch(NamedTuple):
    """The rows that get a token in this step."""

    rows: Tensor  # [n] int64, on the device
    host_rows: IntArray  # the same, on the host
    positions: Tensor  # [n] int64: the index that the new token will have in its sequence

    def slice(self, start: int, stop: int) -> "SamplingBatch":
        return SamplingBatch(self.rows[start:stop], self.host_rows[start:stop], self.positions[start:stop])


class DraftedLines(NamedTuple):
    """The lines of a step with drafts, which are computed as if all drafts were accepted: one for the next token of
    each row, and one after each of its drafts. On the host, as the step was planned."""

    rows: IntArray  # [n]
    counts: NDArray[np.int64]  # [n]: drafts
    lines: NDArray[np.int64]  # [n + drafts]
    line_rows: IntArray  # the row of each line
    places: NDArray[np.int64]  # its index in `rows`
    numbers: NDArray[np.int64]  # the drafts before it

    @staticmethod
    def of(rows: IntArray, counts: NDArray[np.int64]) -> "DraftedLines":
        """Each row has its lines behind those of the row before it."""
        places = np.repeat(np.arange(len(rows)), 1 + counts)
        lines = np.arange(len(places))
        starts = np.cumsum(1 + counts) - 1 - counts
        return DraftedLines(rows, counts, lines, rows[places], places, lines - starts[places])

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first line of each row."""
        first: NDArray[np.int64] = self.lines[self.numbers == 0]
        return first

    def without(self, masks: Masks, masked: tuple[Row, ...]) -> NDArray[np.int64]:
        """The lines after drafts of masked rows that have fewer masks than lines."""
        num_masks = np.bincount(masks.rows, minlength=int(self.rows.max()) + 1)
        missing = (self.numbers > 0) & (self.numbers >= num_masks[self.line_rows])
        lines: NDArray[np.int64] = self.lines[missing & np.isin(self.line_rows, masked)]
        return lines


class BatchSubset(NamedTuple):
    """The rows of a batch that need a feature."""

    at: Tensor  # [m] int64: their indices in the batch
    batch: SamplingBatch
    whole: bool  # all rows of the batch

    def of(self, tensor: Tensor) -> Tensor:
        """Their entries of a tensor whose first axis is the batch."""
        return tensor if self.whole else tensor.index_select(0, self.at)

    def put(self, tensor: Tensor, values: Tensor) -> Tensor:
        """The tensor with their entries replaced."""
        return values if self.whole else tensor.index_copy(0, self.at, values)


class SamplingParamsTable:
    """A table with one line per row; the names below are its columns."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.features: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self.host_top_k: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self.host_num_logprobs: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self.host_num_candidates: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        integers = torch.zeros(max_rows, 7, dtype=torch.int64, device=device)
        self.seed, self.index, self.top_k, _, self.min_tokens, self.num_prompt, self.max_length = integers.unbind(1)
        floats = torch.zeros(max_rows, 6, dtype=torch.float64, device=device)
        self.temperature, self.top_p, self.min_p, self.repetition, self.presence, self.frequency = floats.unbind(1)
        self.table = SamplingTable(integers, floats)  # its columns come first
        self.end_ids = torch.full((max_rows, _USUAL_ENDS), -1, dtype=torch.int64, device=device)  # padded with -1

    def assign(self, starts: Many[RowStart]) -> None:
        """Write the rows that start in a step, in two copies to the device."""
        if not starts:
            return
        for row_start in starts:
            sampling = row_start.sampling
            self.features[row_start.row] = _features(sampling)
            self.host_top_k[row_start.row] = sampling.top_k or self.vocab_size
            self.host_num_logprobs[row_start.row] = sampling.num_logprobs or 0
            self.host_num_candidates[row_start.row] = min(sampling.num_candidates, self.vocab_size)
        most_ends = max(len(row_start.sampling.end_ids) for row_start in starts)
        num_rows, width = self.end_ids.shape
        if most_ends > width:
            width = max(most_ends, 2 * width)
            self.end_ids = grown(self.end_ids, (num_rows, width), fill=-1)
        num_integers = self.table.integers.shape[1]
        integers = np.array(
            [
                (row.row, *self._integers(row), *row.sampling.end_ids, *(-1,) * (width - len(row.sampling.end_ids)))
                for row in starts
            ],
            dtype=np.int64,
        )
        lines = upload(integers, self.device)
        rows = lines[:, 0]
        self.table.integers[rows] = lines[:, 1 : 1 + num_integers]
        self.end_ids[rows] = lines[:, 1 + num_integers :]
        self.table.floats[rows] = upload(np.array([_floats(row_start.sampling) for row_start in starts]), self.device)

    def _integers(self, row_start: RowStart) -> tuple[int, ...]:
        sampling = row_start.sampling
        return (
            sampling.seed,
            row_start.branch,
            sampling.top_k or self.vocab_size,
            int(sampling.temperature > 0),
            sampling.min_tokens,
            row_start.num_prompt,
            row_start.max_length,
        )

    def release(self, row: Row) -> None:
        self.features[row] = 0

    def union(self, rows: IntArray) -> SamplingFeature:
        """The features that any of these rows needs."""
        return SamplingFeature(int(np.bitwise_or.reduce(self.features[rows], initial=0)))

    @property
    def ends(self) -> EndColumns:
        return EndColumns(self.max_length, self.end_ids)

    def subset(self, batch: SamplingBatch, feature: SamplingFeature) -> BatchSubset | None:
        """The rows of the batch that need any of these features; None if there are none."""
        at = np.flatnonzero(self.features[batch.host_rows] & int(feature))
        if len(at) == 0:
            return None
        places = upload(at, self.device)
        if len(at) == len(batch.host_rows):
            return BatchSubset(places, batch, whole=True)
        rows = batch.rows.index_select(0, places)
        positions = batch.positions.index_select(0, places)
        return BatchSubset(places, SamplingBatch(rows, batch.host_rows[at], positions), whole=False)


def _floats(sampling: RowSampling) -> tuple[float, ...]:
    return (
        max(sampling.temperature, _LOWEST_TEMPERATURE),
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )


def _features(sampling: RowSampling) -> SamplingFeature:
    needed = {
        SamplingFeature.RANDOM: sampling.temperature > 0,
        SamplingFeature.TOP_K: sampling.top_k > 0,
        SamplingFeature.TOP_P: sampling.top_p < 1,
        SamplingFeature.MIN_P: sampling.min_p > 0,
        SamplingFeature.LOGIT_BIAS: bool(sampling.logit_bias)
        or sampling.allowed_ids is not None
        or any(len(word) == 1 for word in sampling.bad_words),
        SamplingFeature.BAD_WORDS: any(len(word) > 1 for word in sampling.bad_words),
        SamplingFeature.MIN_TOKENS: sampling.min_tokens > 0 and bool(sampling.end_ids),
        SamplingFeature.PENALTIES: sampling.penalized,
        SamplingFeature.LOGPROBS: sampling.num_logprobs is not None,
    }
    features = SamplingFeature(0)
    for feature, is_needed in needed.items():
        if is_needed:
            features |= feature
    return features

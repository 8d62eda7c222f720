"""Pipeline stages: which rows decode in a step, so that several steps can be in the pipe at the same time.

A row computes a token only when its last one is known, and with M stages that is M steps later. So the decoding rows
are divided among M steps: a step takes its share of those that wait longest, and the other rows pause. No row is in two
steps in flight. Rows that start and end keep the shares even, and no row belongs to a fixed share. Prompts need no
division: their tokens are known.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import IndexArray
from quire.core.step import ChunkOutput
from quire.sched.plan_builder import PlanBuilder


class PausedRows(NamedTuple):
    """Rows that skip a step: their last token is still to come, or they are beyond the share of the step."""

    in_flight: IndexArray
    deferred: IndexArray


class MicroBatches:
    """The last step of every row."""

    __slots__ = ("_last_steps", "_num_stages")

    def __init__(self, max_rows: int, num_stages: int) -> None:
        self._num_stages = num_stages
        self._last_steps: NDArray[np.int64] = np.full(max_rows, -1, dtype=np.int64)  # in which it gets a token

    @property
    def active(self) -> bool:
        return self._num_stages > 1

    def divide(self, decoding: IndexArray, last_absorbed: int) -> PausedRows:
        """Of the decoding rows those that skip the next step."""
        last_steps = self._last_steps[decoding]
        order = np.argsort(last_steps, kind="stable")
        known = last_steps[order] <= last_absorbed
        share = -(-len(decoding) // self._num_stages)
        return PausedRows(decoding[order[~known]], decoding[order[known][share:]])

    def note(self, builder: PlanBuilder, decoding: IndexArray) -> None:
        """The step is taken. decoding: all rows that decode, those that pause in it as well."""
        paused = np.isin(decoding, builder.paused)
        self._last_steps[decoding[~paused]] = builder.step
        self._last_steps[[chunk.row for chunk in builder.chunks if ChunkOutput.SAMPLE in chunk.output]] = builder.step

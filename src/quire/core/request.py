"""What a client asked, and the life of each continuation of it.

    WAITING ──seat──▶ RUNNING ──leave──▶ LEAVING ──release──▶ FINISHED
       ▲  └──────────────── finish ───────────┼──────────────────▲
       └────────────── release (preempted) ───┘

A waiting sequence owns nothing. A running one owns a row and its blocks. A leaving one computes nothing more,
but steps in flight may still touch its row and blocks; they go back when the last of those steps is absorbed.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from quire.core.ids import IntArray, RequestId, Row, SequenceId
from quire.core.sampling import RowSampling
from quire.core.step import FinishReason


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request, as the engine's door lets it in."""

    id: RequestId
    prompt: IntArray
    max_tokens: int
    sampling: RowSampling
    num_sequences: int = 1

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.max_tokens


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"
    FINISHED = "finished"


class Sequence:
    """One continuation of a request."""

    __slots__ = (
        "cruise_length",
        "cruise_step",
        "due_step",
        "finish_reason",
        "id",
        "index",
        "num_planned",
        "num_preemptions",
        "release_step",
        "request",
        "row",
        "seated_step",
        "state",
        "tokens",
    )

    def __init__(self, request: Request, sequence_id: SequenceId, index: int) -> None:
        self.request = request
        self.id = sequence_id
        self.index = index
        self.state = State.WAITING
        self.tokens = request.prompt  # prompt and generated, as of the last time it sat down or finished
        self.finish_reason: FinishReason | None = None
        self.num_preemptions = 0
        self._clear_seat()

    def _clear_seat(self) -> None:
        self.row: Row | None = None
        self.seated_step = -1
        self.num_planned = 0  # known tokens computed by the steps planned so far, until it cruises
        self.cruise_step: int | None = None  # in step s it computes position cruise_length + s - cruise_step
        self.cruise_length = 0
        self.due_step = -1  # the step in which it next needs a block or has no more to compute
        self.release_step = -1

    # The arrows.

    def seat(self, row: Row, step: int) -> None:
        assert self.state is State.WAITING, self
        self.state = State.RUNNING
        self.row = row
        self.seated_step = step

    def leave(self, release_step: int, reason: FinishReason | None) -> None:
        """Stop computing. With a reason it is finished; with none it was preempted and will come back."""
        assert self.state is State.RUNNING, self
        self.state = State.LEAVING
        self.release_step = release_step
        self.finish_reason = reason

    def finish(self, reason: FinishReason) -> None:
        """Decide the outcome of a sequence that no longer computes: one that waits, or one preempted and leaving."""
        assert self.state in (State.WAITING, State.LEAVING) and self.finish_reason is None, self
        self.finish_reason = reason
        if self.state is State.WAITING:
            self.state = State.FINISHED

    def release(self, generated: IntArray) -> None:
        """The last step that touched it is absorbed: it owns nothing any more."""
        assert self.state is State.LEAVING, self
        if self.finish_reason is None:
            self.tokens = np.concatenate([self.tokens, generated])
            self.num_preemptions += 1
            self.state = State.WAITING
        else:
            self.state = State.FINISHED
        self._clear_seat()

    # What follows from the numbers.

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        """Known tokens at its last sitting down (not those sampled since)."""
        return len(self.tokens)

    @property
    def cruising(self) -> bool:
        return self.cruise_step is not None

    def position_at(self, step: int) -> int:
        """The position a cruising sequence computes in a step."""
        assert self.cruise_step is not None, self
        return self.cruise_length + step - self.cruise_step

    def step_of(self, position: int) -> int:
        """The step in which a cruising sequence computes a position."""
        assert self.cruise_step is not None, self
        return self.cruise_step + position - self.cruise_length

    @property
    def last_position(self) -> int:
        """The last position whose computation gives a token: the token at max_length - 1 is never computed."""
        return self.request.max_length - 2

    def __repr__(self) -> str:
        return f"Sequence({self.id}, {self.state.value}, row={self.row}, tokens={len(self.tokens)})"

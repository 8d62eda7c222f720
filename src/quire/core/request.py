"""What a client asked, and the life of each continuation of it.

    WAITING ──seat──▶ RUNNING ──leave──▶ LEAVING ──release──▶ FINISHED
       ▲  └──────────────── finish ───────────┼──────────────────▲
       └────────────── release (preempted) ───┘

A waiting sequence owns nothing. A running one owns a row and its blocks. A leaving one computes nothing more,
but steps in flight may still touch its row and blocks; they go back when the last of those steps is absorbed.
The sequences of one request are a family: admitted, preempted and counted as one.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from quire.core.events import EventKind, RequestEvent, WaitCause
from quire.core.ids import IntArray, RequestId, Row, SequenceId
from quire.core.sampling import RowSampling
from quire.core.step import FinishReason

MOST_EVENTS = 64  # a family's story keeps its beginning and its latest events


class EarlyStopping(Enum):
    """When a beam search may end, as Hugging Face defines it."""

    WHEN_FULL = "when_full"  # early_stopping=True: as soon as there are `width` finished hypotheses
    WHEN_UNLIKELY = "when_unlikely"  # False: when the best running beam, at its present length, could not win any more
    NEVER = "never"  # "never": when no running beam could win at any length


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search in the place of sampling."""

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.WHEN_UNLIKELY
    num_returned: int = 1


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request, as the engine's door lets it in."""

    id: RequestId
    prompt: IntArray
    max_tokens: int
    sampling: RowSampling
    num_sequences: int = 1  # rows it occupies: continuations, or the width of its beam
    beam: BeamParams | None = None
    partition: str = ""  # who may share its cached prefix: API-key identity and cache salt
    tenant: str = ""  # who pays for its service
    priority: int = 0  # its class: lower comes first, as clients of other engines know it
    deadline_s: float | None = None  # on the engine's clock; it must be seated before

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.max_tokens


class BlockOwner(NamedTuple):
    """On whose behalf blocks are looked up, kept and evicted."""

    request: RequestId
    partition: str
    priority: int


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"
    FINISHED = "finished"


class RequestGroup:
    """A request inside the engine."""

    __slots__ = (
        "arrived_s",
        "events",
        "has_first_token",
        "num_cached",
        "num_preemptions",
        "order",
        "owner",
        "request",
        "seated_s",
        "sequences",
        "was_assigned",
    )  # fmt: skip

    def __init__(self, request: Request, first_id: int, arrived_s: float) -> None:
        self.request = request
        self.owner = BlockOwner(request.id, request.partition, request.priority)
        self.order = first_id  # families are numbered as they arrive
        self.arrived_s = arrived_s
        self.sequences = tuple(Sequence(self, SequenceId(first_id + i), i) for i in range(request.num_sequences))
        self.num_preemptions = 0
        self.was_assigned = False
        self.has_first_token = False  # a member has emitted a token
        self.seated_s: float | None = None  # when it first sat down
        self.num_cached = 0  # prompt tokens that its first sitting down found in the cache
        self.events: list[RequestEvent] = []

    @property
    def answers(self) -> tuple["Sequence", ...]:
        """The members a client hears of: of beams, as many as are to be returned."""
        beam = self.request.beam
        return self.sequences if beam is None else self.sequences[: beam.num_returned]

    @property
    def unfinished(self) -> tuple["Sequence", ...]:
        return tuple([sequence for sequence in self.sequences if sequence.finish_reason is None])

    @property
    def finished(self) -> bool:
        return None not in [sequence.finish_reason for sequence in self.sequences]

    def note(self, event: RequestEvent) -> None:
        """Remember what happened; of a wait, only when its cause changes."""
        if event.what is EventKind.WAITED and self.waits_for is event.cause:
            return
        if len(self.events) == MOST_EVENTS:
            del self.events[MOST_EVENTS // 2]
        self.events.append(event)

    @property
    def waits_for(self) -> WaitCause | None:
        last = self.events[-1] if self.events else None
        return last.cause if last is not None and last.what is EventKind.WAITED else None

    def __repr__(self) -> str:
        return f"Family({self.request.id}, {[sequence.state.value for sequence in self.sequences]})"


class Sequence:
    """One continuation of a request."""

    __slots__ = (
        "assigned_step",
        "caught_up",
        "finish_reason",
        "group",
        "id",
        "index",
        "last_position",
        "num_computed",
        "num_had",
        "num_planned",
        "release_step",
        "request",
        "row",
        "score",
        "state",
        "tokens",
    )

    def __init__(self, group: RequestGroup, sequence_id: SequenceId, index: int) -> None:
        self.group = group
        self.request = group.request
        self.id = sequence_id
        self.index = index
        self.last_position = group.request.max_length - 2  # whose computation gives a token
        self.state = SequenceState.WAITING
        self.tokens: IntArray = group.request.prompt  # as of its last sitting down, or the end; a beam's: always
        self.score: float | None = None  # of a finished beam
        self.finish_reason: FinishReason | None = None
        self.num_had = 0  # positions computed or found by the time of a preemption: whatever it computes again
        self._clear_seat()

    def _clear_seat(self) -> None:
        self.row: Row | None = None
        self.assigned_step = -1
        self.num_planned = 0  # known tokens computed by the steps planned so far, until it cruises
        self.num_computed = 0  # of those, the ones whose step is absorbed
        self.caught_up = False  # all that it knew when it sat down is computed
        self.release_step = -1

    # The arrows.

    def assign(self, row: Row, step: int, num_computed: int) -> None:
        """Sit down with so many tokens found in the cache."""
        assert self.state is SequenceState.WAITING, self
        self.state = SequenceState.RUNNING
        self.row = row
        self.assigned_step = step
        self.num_planned = num_computed
        self.num_computed = num_computed

    def leave(self, release_step: int, reason: FinishReason | None) -> None:
        """Stop computing. With a reason it is finished; with none it was preempted and will come back."""
        assert self.state is SequenceState.RUNNING, self
        self.state = SequenceState.LEAVING
        self.release_step = release_step
        self.finish_reason = reason

    def finish(self, reason: FinishReason) -> None:
        """Decide the outcome of a sequence that no longer computes: one that waits, or one preempted and leaving."""
        assert self.state in (SequenceState.WAITING, SequenceState.LEAVING) and self.finish_reason is None, self
        self.finish_reason = reason
        if self.state is SequenceState.WAITING:
            self.state = SequenceState.FINISHED

    def release(self, generated: IntArray) -> None:
        """The last step that touched it is absorbed: it owns nothing any more."""
        assert self.state is SequenceState.LEAVING, self
        if self.finish_reason is None:
            self.tokens = np.concatenate([self.tokens, generated])
            self.state = SequenceState.WAITING
        else:
            self.state = SequenceState.FINISHED
        self._clear_seat()

    # What follows from the numbers.

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        """Known tokens at its last sitting down (not those sampled since)."""
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Sequence({self.id}, {self.state.value}, row={self.row}, tokens={len(self.tokens)})"

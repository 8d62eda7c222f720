"""A request inside the engine: its parameters, its events, its group of sequences, and the states of a sequence.

    WAITING ──assign──▶ RUNNING ──stop──▶ RELEASING ──release──▶ FINISHED
       ▲  └──────────────── finish ───────────┼──────────────────▲
       └────────────── release (preempted) ───┘

A waiting sequence owns nothing. A running one owns a row and its blocks. A releasing one computes nothing more, but
steps in flight may still touch its row and blocks; both are released when the last of these steps is absorbed. The
sequences of one request are a group: admitted, preempted and counted as one. Does not depend on queues or blocks.
"""

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from quire.core.ids import IntArray, RequestId, Row, SequenceId
from quire.core.sampling import RowSampling
from quire.core.step import FinishReason

MAX_EVENTS = 64  # kept per request: the first half and the latest


class WaitCause(Enum):
    """What a waiting request waits for. Clients read the values."""

    ORDER = "order"  # other requests come first: class, fair share, lane, deadline or arrival
    BUDGET = "budget"  # the step's token budget was used up
    ROWS = "seats"  # every row was assigned
    BLOCKS = "blocks"  # the KV cache had too few blocks
    PRESSURE = "pressure"  # a running row was denied a block: nothing is admitted
    PREFIX = "prefix"  # another request computes the same prefix: waiting is cheaper than computing it twice


class EventKind(Enum):
    """The kinds of event. Clients read the values."""

    ARRIVED = "arrived"
    WAITED = "waited"  # `cause` says for what; noted when the cause changes
    ADMITTED = "seated"  # it got a row; `tokens` of the prefix were found in the cache
    MISSED = "missed"  # `tokens` of the prompt were not found; `detail` is the reason for the first of them
    ROUTED = "routed"  # `detail` says why its prompt went to a prefill engine, or did not
    TRANSFERRED = "transferred"  # `tokens` were copied from a prefill engine; else `detail` is the reason
    FIRST_TOKEN = "first_token"
    PREEMPTED = "preempted"  # by `other`; `tokens` had been computed
    FORKED = "forked"  # `tokens` were shared with its sibling
    FINISHED = "finished"  # `detail` is the reason


class RequestEvent(NamedTuple):
    """One event of a request."""

    step: int
    what: EventKind
    tokens: int = 0
    other: RequestId | None = None
    cause: WaitCause | None = None
    detail: str = ""


class EarlyStopping(Enum):
    """When a beam search may end, as Hugging Face defines it."""

    WHEN_FULL = "when_full"  # early_stopping=True: as soon as there are `width` finished hypotheses
    WHEN_UNLIKELY = "when_unlikely"  # False: when the best running beam, at its present length, cannot win any more
    NEVER = "never"  # "never": when no running beam can win at any length


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search instead of sampling."""

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.WHEN_UNLIKELY
    num_returned: int = 1


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request."""

    id: RequestId
    prompt: IntArray
    max_tokens: int
    sampling: RowSampling
    num_sequences: int = 1  # rows it occupies: continuations, or the beam width
    beam: BeamParams | None = None
    partition: str = ""  # requests of one partition share cached prefixes: API-key identity and cache salt
    tenant: str = ""  # its share of service is counted for this tenant
    priority: int = 0  # its class: lower comes first, as in vLLM
    deadline_s: float | None = None  # on the engine's clock; it must be admitted before

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.max_tokens


def partition_name(tenant: str, cache_salt: str) -> str:
    """One name for tenant and salt; no two pairs have the same."""
    return f"{len(tenant)}:{tenant}{cache_salt}" if tenant or cache_salt else ""


@lru_cache(maxsize=1024)
def tenant_of(partition: str) -> str:
    """The tenant in the name of a partition."""
    length, colon, rest = partition.partition(":")
    return rest[: int(length)] if colon and length.isdecimal() else ""


class BlockOwner(NamedTuple):
    """The request for which blocks are looked up, cached and evicted."""

    request: RequestId
    partition: str
    priority: int


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    RELEASING = "releasing"
    FINISHED = "finished"


class RequestGroup:
    """The sequences of one request, admitted, preempted and counted as one."""

    __slots__ = (
        "admitted_s",
        "arrived_s",
        "caught_up_s",
        "drafts_by",
        "events",
        "has_first_token",
        "num_accepted",
        "num_cached",
        "num_drafted",
        "num_preemptions",
        "num_uncached",
        "order",
        "owner",
        "request",
        "sequences",
        "was_assigned",
    )  # fmt: skip

    def __init__(self, request: Request, first_id: int, arrived_s: float) -> None:
        self.request = request
        self.owner = BlockOwner(request.id, request.partition, request.priority)
        self.order = first_id  # groups are numbered as they arrive
        self.arrived_s = arrived_s
        self.sequences = tuple(Sequence(self, SequenceId(first_id + i), i) for i in range(request.num_sequences))
        self.num_preemptions = 0
        self.was_assigned = False
        self.has_first_token = False  # one of its sequences has emitted a token
        self.admitted_s: float | None = None  # when it first got rows
        self.caught_up_s: float | None = None  # when all that its sequences knew at its last admission was computed
        self.num_drafted = 0  # drafts verified
        self.num_accepted = 0  # tokens gained by them
        self.drafts_by: dict[str, tuple[int, int]] = {}  # both by drafter
        self.num_cached = 0  # prompt tokens found in the cache at its first admission
        self.num_uncached = len(request.prompt)  # that the cache did not hold when it came: which lane it waits in
        self.events: list[RequestEvent] = []

    @property
    def returned(self) -> tuple["Sequence", ...]:
        """The sequences whose output the client gets: all, or the best `num_returned` beams."""
        beam = self.request.beam
        return self.sequences if beam is None else self.sequences[: beam.num_returned]

    @property
    def unfinished(self) -> tuple["Sequence", ...]:
        return tuple([sequence for sequence in self.sequences if sequence.finish_reason is None])

    @property
    def finished(self) -> bool:
        return None not in [sequence.finish_reason for sequence in self.sequences]

    def forget_sequences(self) -> None:
        """It is finished and nothing refers to it any more. Group and sequences refer to each other: apart, they are
        freed now, and not by a full collection, which may be an hour away (`core/process.py`)."""
        assert self.finished, self
        self.sequences = ()

    def note_drafts(self, drafter: str, drafted: int, gained: int) -> None:
        self.num_drafted += drafted
        self.num_accepted += gained
        before = self.drafts_by.get(drafter, (0, 0))
        self.drafts_by[drafter] = before[0] + drafted, before[1] + gained

    def note(self, event: RequestEvent) -> None:
        """Record an event; a wait only when its cause changes."""
        if event.what is EventKind.WAITED and self.waits_for is event.cause:
            return
        if len(self.events) == MAX_EVENTS:
            del self.events[MAX_EVENTS // 2]
        self.events.append(event)

    @property
    def waits_for(self) -> WaitCause | None:
        last = self.events[-1] if self.events else None
        return last.cause if last is not None and last.what is EventKind.WAITED else None

    def __repr__(self) -> str:
        return f"RequestGroup({self.request.id}, {[sequence.state.value for sequence in self.sequences]})"


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
        "num_computed_before",
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
        self.last_position = group.request.max_length - 2  # the last position whose computation gives a token
        self.state = SequenceState.WAITING
        self.tokens: IntArray = group.request.prompt  # at its last row assignment, or the end; a beam's: always
        self.score: float | None = None  # of a finished beam
        self.finish_reason: FinishReason | None = None
        self.num_computed_before = 0  # positions computed or cached when it was preempted: it computes them again
        self._clear_row()

    def _clear_row(self) -> None:
        self.row: Row | None = None
        self.assigned_step = -1
        self.num_planned = 0  # known tokens computed by the steps planned so far, until it decodes
        self.num_computed = 0  # of those, the ones whose step is absorbed
        self.caught_up = False  # every token known at its row assignment is computed
        self.release_step = -1

    # Transitions.

    def assign(self, row: Row, step: int, num_computed: int) -> None:
        """Get a row, with `num_computed` tokens found in the cache."""
        assert self.state is SequenceState.WAITING, self
        self.state = SequenceState.RUNNING
        self.row = row
        self.assigned_step = step
        self.num_planned = num_computed
        self.num_computed = num_computed

    def stop(self, release_step: int, reason: FinishReason | None) -> None:
        """Stop computing: finished if there is a reason, preempted if there is none. Steps up to `release_step` may
        still touch the row."""
        assert self.state is SequenceState.RUNNING, self
        self.state = SequenceState.RELEASING
        self.release_step = release_step
        self.finish_reason = reason

    def finish(self, reason: FinishReason) -> None:
        """Set the outcome of a sequence that does not compute: waiting, or preempted and not yet released."""
        assert self.state in (SequenceState.WAITING, SequenceState.RELEASING) and self.finish_reason is None, self
        self.finish_reason = reason
        if self.state is SequenceState.WAITING:
            self.state = SequenceState.FINISHED

    def release(self, generated: IntArray) -> None:
        """The last step that touched it is absorbed: its row and blocks are free."""
        assert self.state is SequenceState.RELEASING, self
        if self.finish_reason is None:
            self.tokens = np.concatenate([self.tokens, generated])
            self.state = SequenceState.WAITING
        else:
            self.state = SequenceState.FINISHED
        self._clear_row()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        """Known tokens at its last row assignment, without those sampled since."""
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Sequence({self.id}, {self.state.value}, row={self.row}, tokens={len(self.tokens)})"

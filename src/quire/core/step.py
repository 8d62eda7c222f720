"""The bridge: the one language between those who decide and those who compute.

A `StepPlan` is a difference. A row that has caught up *cruises*: it computes one token in every step without
being mentioned, until a plan pauses or unseats it, or until it ends on the device (an end token, or its length).
An ended row is inert: it computes nothing and emits nothing until it is unseated.

A runner applies a plan in this order: moves, leaves, seats, tells, grants; then it runs the chunks and every cruising
row that is not paused. Moves are carried one after the other as they are listed, before this step writes anything. A
chunk whose output holds SAMPLE has reached the last known token: its row emits a token in this step and cruises from
the next one. A chunk whose output holds CANDIDATES has reached it too, but its row is *tethered*: it gives back its
likeliest next tokens and computes nothing more until it is told which of them (or what else) follows. A chunk whose
output holds POOLED adds its hidden states to its row's sum; with the last known token the sum is given back, and the
row has ended without a token.
"""

from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import NamedTuple, Protocol

import numpy as np

from quire.core.ids import FloatArray, IntArray, Row, SequenceId
from quire.core.moves import Move
from quire.core.sampling import RowSampling


class ChunkOutput(Flag):
    """What a chunk must give back."""

    NONE = 0
    SAMPLE = auto()
    PROMPT_LOGPROBS = auto()
    CANDIDATES = auto()
    POOLED = auto()


class FinishReason(Enum):
    """How a sequence ended. The values are what clients read."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"  # there was no token to choose
    NOTHING_LEFT = "nothing_left"  # the same, and by the request's own doing; the engine finds out, never a runner
    EXPIRED = "expired"  # its deadline passed before it was seated
    FAILED = "failed"  # a step failed because of it, or its own admission did
    OUT_OF_MEMORY = "out_of_memory"  # a step was too large for the device, and it was the largest


class RowStart(NamedTuple):
    """A sequence sits down: all the runner needs to know of it until it leaves."""

    row: Row
    sequence: SequenceId
    branch: int  # which of its request's sequences; random numbers depend on it
    tokens: IntArray  # every known token: the prompt, and what was generated before a preemption
    num_prompt: int
    max_length: int  # prompt and completion together; the row ends when it knows so many tokens
    sampling: RowSampling


def _none() -> IntArray:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Grants:
    """The table of row `rows[i]` grows by `blocks[i]`. A row named several times gets its blocks in this order."""

    rows: IntArray = field(default_factory=_none)
    blocks: IntArray = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class AppendTokens:
    """A tethered row's known tokens grow by these."""

    row: Row
    tokens: tuple[int, ...]


class Chunk(NamedTuple):
    """Compute positions [start, start + length) of the row's known tokens."""

    row: Row
    start: int
    length: int
    output: ChunkOutput


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass, as a difference to the one before."""

    step: int
    moves: tuple[Move, ...] = ()
    leaves: tuple[Row, ...] = ()
    starts: tuple[RowStart, ...] = ()
    tells: tuple[AppendTokens, ...] = ()
    grants: Grants = field(default_factory=Grants)
    chunks: tuple[Chunk, ...] = ()
    pauses: tuple[Row, ...] = ()
    masked: tuple[Row, ...] = ()  # rows that choose a token in this step under a mask, which comes beside the plan
    num_decoding: int = 0  # rows that compute one token; some may have ended on the device meanwhile
    num_padding: int = 0  # tokens computed into the null block and thrown away (static regimes alone)
    reset: bool = False  # a step was lost: every row of the runner is empty, and its step numbers go on from here

    @property
    def num_tokens(self) -> int:
        return self.num_decoding + sum(chunk.length for chunk in self.chunks)


class TopLogprobs(NamedTuple):
    """The log-probability of one token, its rank (1 is the likeliest), and the likeliest alternatives."""

    token: int
    logprob: float
    rank: int
    ids: IntArray
    logprobs: FloatArray


class PromptLogprobs(NamedTuple):
    """Scores of prompt tokens start, start + 1, … of one row."""

    row: Row
    start: int
    scores: tuple[TopLogprobs, ...]


class FinishedRow(NamedTuple):
    """A row that ended on the device with the token it emitted in this step (none if it failed, or was pooled)."""

    row: Row
    reason: FinishReason


class Candidates(NamedTuple):
    """The likeliest next tokens of a tethered row, likeliest first, with their log-probabilities."""

    ids: IntArray
    logprobs: FloatArray


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave: row `rows[i]` emitted `tokens[i]`."""

    step: int
    rows: IntArray = field(default_factory=_none)
    tokens: IntArray = field(default_factory=_none)
    ended: tuple[FinishedRow, ...] = ()
    logprobs: dict[Row, TopLogprobs] = field(default_factory=dict)
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    candidates: dict[Row, Candidates] = field(default_factory=dict)
    pooled: dict[Row, FloatArray] = field(default_factory=dict)  # the sum of the row's hidden states


class Masks(NamedTuple):
    """What masked rows may choose in a step: row `rows[i]` token t, if bit t % 32 of `bits[i, t // 32]` is set."""

    rows: IntArray
    bits: IntArray  # [rows, words]


class StepLost(Exception):
    """A step whose result will never come: every step in flight is lost with it."""

    def __init__(self, message: str, *, cache_intact: bool = True, too_large: bool = False) -> None:
        super().__init__(message)
        self.cache_intact = cache_intact  # what earlier steps wrote can still be read
        self.too_large = too_large  # there was no memory for it


class Pending(Protocol):
    """A step under way. `wait`, like `launch`, may raise `StepLost`."""

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """A body behind the bridge. Steps complete in the order of their launch."""

    def launch(self, plan: StepPlan, masks: Masks | None = None) -> Pending: ...

"""The interface between the scheduler, which plans steps, and a runner, which computes them.

A `StepPlan` goes in, a `StepResult` comes back. One step is one forward pass over a ragged batch. Both messages hold
row numbers, block ids and token ids: no tensors, no requests, no clock. Scheduler and runner share nothing else.

**Rows.** A runner has a fixed number of rows, one per running sequence. A row is in one of these states:

    state         enters it by                           computes in a step
    ----------    -----------------------------------    -----------------------------------------------
    empty         the start; a plan releases the row     nothing
    prefilling    a plan starts the row                  its chunk, if the plan names one
    decoding      a chunk with SAMPLE is computed        one token, unless the plan pauses it; and drafts
    host-driven   a chunk with CANDIDATES is computed    nothing, until the plan appends tokens and a chunk
    ended         a stop token, the length limit, an     nothing; it emits nothing and is released later
                  error, or the end of a pooled prompt

**A plan is a diff.** A decoding row computes one token in every step without being named, so a steady decode step
is an almost empty plan. The scheduler plans step N + 1 before it has seen the result of step N (run-ahead), so a plan
may count a row that has already ended on the device. Such a row writes to the null block.

**Order of application.** A runner applies `moves`, `releases`, `starts`, `appends` and `grants`, in this order. Then it
computes the chunks and every decoding row that is not paused. Moves are executed in the listed order,
before the step writes anything. Step numbers increase by one; `reset` starts again from empty rows.

**Chunks.** A prompt is computed in one or more chunks (chunked prefill), which continue at the last position computed,
or at the end of the prefix found in the cache. A chunk's `output` is what its last position returns:

    SAMPLE        the chunk reaches the last known token: the row emits a token now and decodes from the next step on
    CANDIDATES    the same for a host-driven row: it returns its most probable next tokens; the scheduler chooses
    POOLED        hidden states are added to the row's sum; with the last known token the sum is returned, and the row
                  has ended without a token

**Drafts** (speculative decoding). `StepPlan.drafts` lets decoding rows verify drafts: the runner proposes up to that
many next tokens, computes them behind the row's last token in the same forward pass, and samples position after
position for as long as the token sampled is the one drafted. So a row emits 1 to 1 + drafts tokens, exactly those it
would emit in as many steps without drafts: a token is a function of its logits and its position. A row without a
proposal decodes as usual. The host counts on one token per row and step until it has the result, and grants blocks up
to where a row can be at most. Keys and values of rejected drafts lie behind the row's length, where nothing reads them,
until the row overwrites them. Both sides count the steps to a row's length limit by the minimum; a row that ends
earlier says so in the result. Host-driven and pooled rows have no drafts.

**Masked rows.** A row under a grammar samples from what a mask allows, and the mask depends on its last token. So a
step with masked rows is launched in two parts: `launch` starts the forward pass, `Pending.sample` the sampling of all
its rows. In between the host absorbs the step before and computes the masks, while the device runs the forward pass.
A masked row with drafts has a mask for each of its positions: that of its next token, that after its first draft, and
so on. `Pending.drafted` says which tokens these are. The row stops at the first position without a mask: where its
grammar does not allow the draft before it, or ends. `StepPlan.forced` names tokens that a grammar forces: a row that
has come to them drafts them (jump forward).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from quire.core.ids import FloatArray, IntArray, Row, SequenceId
from quire.core.moves import Move
from quire.core.sampling import RowSampling


class ChunkOutput(Flag):
    """What a chunk returns."""

    NONE = 0
    SAMPLE = auto()
    PROMPT_LOGPROBS = auto()
    CANDIDATES = auto()
    POOLED = auto()


class FinishReason(Enum):
    """How a sequence ended. Clients read the values."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"  # there was no token to sample: the logits were not finite
    NOTHING_LEFT = "nothing_left"  # its own constraints left no token; the engine sets this, never a runner
    GRAMMAR_FAILED = "grammar_failed"  # its grammar exceeded a limit; the engine sets this, too
    EXPIRED = "expired"  # its deadline passed before it was admitted
    FAILED = "failed"  # its step or its admission failed
    OUT_OF_MEMORY = "out_of_memory"  # a step was too large for the device, and this was its largest request


_NO_TOKENS: IntArray = np.empty(0, dtype=np.int32)
NO_ENTRIES: Mapping[Any, Any] = {}  # never changed


class RowStart(NamedTuple):
    """A sequence gets an empty row: all that the runner knows of it until the row is released."""

    row: Row
    sequence: SequenceId
    branch: int  # index of the sequence in its request; random numbers depend on it
    tokens: IntArray  # every known token: the prompt, and the tokens generated before a preemption
    num_prompt: int
    max_length: int  # prompt and completion together; the row ends when it holds this many tokens
    sampling: RowSampling
    continuation: IntArray = _NO_TOKENS  # what earlier requests went on with after these tokens: for drafts


def _none() -> IntArray:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Grants:
    """The block table of row `rows[i]` grows by `blocks[i]`. A row that occurs twice gets its blocks in this order."""

    rows: IntArray = field(default_factory=_none)
    blocks: IntArray = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Decoding row `rows[i]` may verify up to `counts[i]` drafts in this step. No row occurs twice."""

    rows: IntArray = field(default_factory=_none)
    counts: IntArray = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.rows)


NO_GRANTS, NO_DRAFTS = Grants(), Drafts()


class ForcedTokens(NamedTuple):
    """The grammar of a row forces a text. Tokenized, these are its tokens from position `start` on: likely ones, since
    the same text may be sampled in other tokens."""

    row: Row
    start: int
    tokens: IntArray

    def after(self, num_tokens: int) -> IntArray:
        """Those that may follow this many tokens of the row."""
        return self.tokens[num_tokens - self.start :] if num_tokens >= self.start else self.tokens[:0]


@dataclass(frozen=True, slots=True)
class AppendTokens:
    """The tokens of a host-driven row grow by these."""

    row: Row
    tokens: tuple[int, ...]


class Chunk(NamedTuple):
    """Compute positions [start, start + length) of the row's tokens and write their keys and values."""

    row: Row
    start: int
    length: int
    output: ChunkOutput


class StepPlan(NamedTuple):
    """One forward pass, as a difference to the one before."""

    step: int
    moves: tuple[Move, ...] = ()  # block copies: copy-on-write, demotion to the host, promotion from it
    releases: tuple[Row, ...] = ()  # rows that become empty
    starts: tuple[RowStart, ...] = ()
    appends: tuple[AppendTokens, ...] = ()
    grants: Grants = NO_GRANTS
    chunks: tuple[Chunk, ...] = ()
    pauses: tuple[Row, ...] = ()  # decoding rows that skip this step
    drafts: Drafts = NO_DRAFTS  # rows that may verify drafts
    forced: tuple[ForcedTokens, ...] = ()  # of some of these rows
    masked: tuple[Row, ...] = ()  # rows that sample in this step under a mask: `Pending.sample` brings the masks
    num_decoding: int = 0  # decoding rows of this step, among them rows that ended since the last result
    num_padding: int = 0  # tokens computed into the null block and thrown away (static regimes only)
    reset: bool = False  # a step was lost: every row is empty, and step numbers go on from this one

    @property
    def repeats(self) -> bool:
        """Whether it names nothing but blocks: the rows that are decoding compute one token each."""
        return self.only_decodes and not len(self.drafts)

    @property
    def only_decodes(self) -> bool:
        """Whether it names nothing but blocks and drafts: the same rows decode as before."""
        named = self.moves or self.releases or self.starts or self.appends or self.chunks or self.pauses or self.masked
        return not (named or self.num_padding or self.reset)

    @property
    def num_tokens(self) -> int:
        """Positions computed in the step, at most."""
        num_drafts = int(self.drafts.counts.sum()) if len(self.drafts) else 0
        return self.num_decoding + num_drafts + sum(chunk.length for chunk in self.chunks)


class TopLogprobs(NamedTuple):
    """The log-probability of one token, its rank (1 is the most probable), and the most probable alternatives."""

    token: int
    logprob: float
    rank: int
    ids: IntArray
    logprobs: FloatArray


class PromptLogprobs(NamedTuple):
    """Log-probabilities of the prompt tokens start, start + 1, … of one row."""

    row: Row
    start: int
    scores: tuple[TopLogprobs, ...]


class FinishedRow(NamedTuple):
    """A row that ended in this step, with the token it emitted (an error and a pooled prompt emit none)."""

    row: Row
    reason: FinishReason


class Candidates(NamedTuple):
    """The most probable next tokens of a host-driven row in descending order, with their log-probabilities."""

    ids: IntArray
    logprobs: FloatArray


@dataclass(frozen=True, slots=True)
class Verified:
    """Of the rows of `StepPlan.drafts`, in its order: drafts computed, and tokens emitted beyond the first."""

    rows: IntArray = field(default_factory=_none)
    drafted: IntArray = field(default_factory=_none)
    accepted: IntArray = field(default_factory=_none)
    sources: IntArray = field(default_factory=_none)  # of its drafts, by place in `DRAFTERS`; empty: not known

    def __len__(self) -> int:
        return len(self.rows)


_NOTHING_VERIFIED = Verified()


class StepResult(NamedTuple):
    """The output of one step: row `rows[i]` emitted `tokens[i]`.

    A row with drafts may have emitted several tokens. They are in passes: first one token of every row that emitted,
    then the second of the rows that have one, and so on. `passes` says where the second and each later pass begins.
    """

    step: int
    rows: IntArray = _NO_TOKENS
    tokens: IntArray = _NO_TOKENS
    ended: tuple[FinishedRow, ...] = ()
    logprobs: Mapping[Row, tuple[TopLogprobs, ...]] = NO_ENTRIES  # of each of its tokens
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    candidates: Mapping[Row, Candidates] = NO_ENTRIES
    pooled: Mapping[Row, FloatArray] = NO_ENTRIES  # the sum of the prompt's hidden states
    passes: tuple[int, ...] = ()
    verified: Verified = _NOTHING_VERIFIED

    @property
    def plain(self) -> bool:
        """Whether it has nothing but one token of each of its rows, and all of them go on."""
        more = self.ended or self.logprobs or self.prompt_logprobs or self.candidates or self.pooled or self.passes
        return not more and not len(self.verified.rows)

    def each_pass(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Rows and tokens of each pass. The rows of a pass are distinct."""
        bounds = (0, *self.passes, len(self.rows))
        for start, stop in pairwise(bounds):
            yield self.rows[start:stop], self.tokens[start:stop]


class Masks(NamedTuple):
    """Grammar masks of one step: row `rows[i]` may sample token t if bit t % 32 of `bits[i, t // 32]` is set.

    The masked rows of the plan, in its order, without those whose sequence has ended since it was launched: what these
    sample is dropped. Rows with drafts have further masks, in passes, as `StepResult` has tokens.
    """

    rows: IntArray
    bits: IntArray  # [rows, words]
    passes: tuple[int, ...] = ()  # where the second and each later pass begins

    @property
    def numbers(self) -> IntArray:
        """Of each mask the number of its pass."""
        return np.repeat(np.arange(1 + len(self.passes), dtype=np.int32), np.diff((0, *self.passes, len(self.rows))))

    def of_pass(self, number: int) -> "Masks":
        """The masks of one pass; none if there are fewer passes."""
        bounds = (0, *self.passes, len(self.rows))
        start, stop = bounds[number : number + 2] if number < len(bounds) - 1 else (0, 0)
        return Masks(self.rows[start:stop], self.bits[start:stop])


class StepLost(Exception):
    """A step without a result. Every step in flight is lost with it."""

    def __init__(self, message: str, *, cache_intact: bool = True, too_large: bool = False) -> None:
        super().__init__(message)
        self.cache_intact = cache_intact  # the KV cache still holds what earlier steps wrote
        self.too_large = too_large  # the device ran out of memory


class Pending(Protocol):
    """A step in flight. Its methods, like `launch`, may raise `StepLost`."""

    @property
    def drafted(self) -> Mapping[Row, IntArray]:
        """The drafts of masked rows. Read it when the result of the step before has come: before, it may wait."""

    def sample(self, masks: Masks) -> None:
        """Sample the tokens of a step with masked rows: once, after the result of the step before, and before the next
        launch. A step without masked rows samples when it is launched."""

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """Computes steps: the model on a device, or a simulation. Steps complete in the order of their launch."""

    def launch(self, plan: StepPlan) -> Pending: ...

"""A step plan under construction, and the output that each chunk returns."""

import numpy as np

from quire.core.ids import IndexArray, IntArray, Row
from quire.core.moves import Move
from quire.core.request import Sequence
from quire.core.step import (
    NO_DRAFTS,
    NO_GRANTS,
    AppendTokens,
    Chunk,
    ChunkOutput,
    ForcedTokens,
    Grants,
    RowStart,
    StepPlan,
)
from quire.sched.pacing import Pace

_NONE: IntArray = np.empty(0, dtype=np.int32)


class PlanBuilder:
    """Collects starts, grants, chunks and pauses of one step within its token budget."""

    __slots__ = (
        "_decode_blocks",
        "_decode_rows",
        "_granted",
        "_granted_rows",
        "appends",
        "budget",
        "chunk_sequences",
        "chunks",
        "drafts",
        "forced",
        "itl_s",
        "kept_budget",
        "least_long",
        "long_prefills",
        "max_tokens",
        "now_s",
        "num_decoding",
        "pace",
        "paused",
        "pressure",
        "starts",
        "step",
    )  # fmt: skip

    def __init__(self, step: int, now_s: float, budget: int) -> None:
        self.step = step
        self.now_s = now_s
        self.budget = budget
        self.max_tokens = budget
        self.kept_budget = 0  # of the budget, for long prompts
        self.long_prefills: list[Sequence] = []  # in progress; no other of their tenants is admitted before them
        self.least_long = 0  # tokens to compute: a prompt with fewer is not long beside them
        self.pressure = False  # a running row was denied a block
        self.num_decoding = 0
        self.pace: Pace | None = None  # of the prompts, where there are time targets
        self.itl_s = 0.0  # the target of this step
        self.starts: list[RowStart] = []
        self.appends: list[AppendTokens] = []
        self.chunks: list[Chunk] = []
        self.chunk_sequences: list[Sequence] = []  # of each chunk
        self.drafts = NO_DRAFTS
        self.forced: tuple[ForcedTokens, ...] = ()  # of rows with drafts
        self.paused: list[Row] = []  # denied a block
        self._decode_rows: IntArray = _NONE  # one block each
        self._decode_blocks: IntArray = _NONE
        self._granted_rows: list[Row] = []  # one entry per block
        self._granted: list[IntArray] = []

    def assign(self, sequence: Sequence, blocks: IntArray, continuation: IntArray = _NONE) -> None:
        """A sequence starts on its row, with the blocks it already has, and a continuation to draft from."""
        assert sequence.row is not None, sequence
        request = sequence.request
        self.starts.append(
            RowStart(
                sequence.row,
                sequence.id,
                branch=sequence.index,
                tokens=sequence.tokens,
                num_prompt=len(request.prompt),
                max_length=request.max_length,
                sampling=request.sampling,
                continuation=continuation,
            )
        )
        self.grant(sequence.row, blocks)

    def grant(self, row: Row, blocks: IntArray) -> None:
        """Several blocks for one row."""
        if len(blocks):
            self._granted_rows += [row] * len(blocks)
            self._granted.append(blocks)

    def grant_each(self, rows: IndexArray, blocks: IntArray) -> None:
        """One block for each decoding row: once, and before all other grants."""
        assert not len(self._decode_blocks) and not self._granted, "the order of the grants is that of the plan"
        self._decode_rows, self._decode_blocks = rows.astype(np.int32), blocks

    def chunk(self, sequence: Sequence, start: int, length: int, output: ChunkOutput) -> None:
        assert sequence.row is not None and 0 < length <= self.budget, (sequence, length, self.budget)
        self.budget -= length
        self.chunks.append(Chunk(sequence.row, start, length, output))
        self.chunk_sequences.append(sequence)

    @property
    def num_tokens(self) -> int:
        """Decoded and in chunks."""
        return self.num_decoding + sum([chunk.length for chunk in self.chunks])

    @property
    def empty(self) -> bool:
        return self.num_decoding == 0 and not self.chunks

    def build(
        self,
        moves: tuple[Move, ...],
        leaves: tuple[Row, ...],
        *,
        masked: tuple[Row, ...],
        num_padding: int,
        reset: bool,
    ) -> StepPlan:
        return StepPlan(
            step=self.step,
            moves=moves,
            releases=leaves,
            starts=tuple(self.starts),
            appends=tuple(self.appends),
            grants=self._grants(),
            chunks=tuple(self.chunks),
            pauses=tuple(self.paused),
            drafts=self.drafts,
            forced=self.forced,
            masked=masked,
            num_decoding=self.num_decoding,
            num_padding=num_padding,
            reset=reset,
        )

    def _grants(self) -> Grants:
        if not self._granted:
            return Grants(self._decode_rows, self._decode_blocks) if len(self._decode_blocks) else NO_GRANTS
        granted_rows = np.array(self._granted_rows, dtype=np.int32)
        return Grants(
            np.concatenate([self._decode_rows, granted_rows]), np.concatenate([self._decode_blocks, *self._granted])
        )


def output_of(sequence: Sequence, start: int, length: int) -> ChunkOutput:
    """Prompt logprobs where requested; with the last known token, a sampled token or beam candidates. A pooled prompt
    returns the pooled vector alone."""
    request = sequence.request
    if request.sampling.pooled:
        return ChunkOutput.POOLED
    following = ChunkOutput.NONE
    if start + length == len(sequence.tokens):
        following = ChunkOutput.SAMPLE if request.beam is None else ChunkOutput.CANDIDATES
    if request.sampling.num_prompt_logprobs is not None and start < len(request.prompt):
        return following | ChunkOutput.PROMPT_LOGPROBS
    return following

"""How a runner reads plans, in plain Python: seats, leaves, tells, grants and cruising turned into this step's work.

The toy and the oracle share it. The torch runner does the same with tensors; both must agree. Padding is ignored:
there is nothing here that it could slow down. So is everything that shapes logits: these bodies have none.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.core.ids import BlockId, FloatArray, IntArray, Row
from quire.core.oracle import candidates
from quire.core.step import Ended, FinishReason, Masks, Output, Seat, StepPlan, StepResult


class Work(NamedTuple):
    """Compute positions [start, stop) of a row's tokens, and give back what `output` names."""

    row: Row
    start: int
    stop: int
    output: Output


@dataclass(slots=True)
class SeatedRow:
    """A row as the runner sees it."""

    seat: Seat
    tokens: list[int]
    blocks: list[BlockId] = field(default_factory=list)
    cruising: bool = False
    ended: bool = False
    pooled: int = 0  # the sum of what was computed so far, if it is to be pooled


class Done:
    """A step that was computed when it was launched."""

    __slots__ = ("_result",)

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


def check_masks(plan: StepPlan, masks: Masks | None) -> dict[Row, IntArray]:
    """The mask of each row; a plan and its masks must name the same rows."""
    named = () if masks is None else tuple(masks.rows.tolist())
    assert named == plan.masked, (named, plan.masked)
    return {} if masks is None else {Row(row): bits for row, bits in zip(named, masks.bits, strict=True)}


def first_allowed(token: int, bits: IntArray, vocab_size: int) -> int:
    """The first token from this one on, round the vocabulary, that a mask allows; there must be one."""
    allowed = np.unpackbits(bits.astype("<i4").view(np.uint8), bitorder="little")[:vocab_size]
    return int((token + np.argmax(np.roll(allowed, -token))) % vocab_size)


class Rows:
    """The persistent batch of a runner without tensors."""

    def __init__(self, vocab_size: int) -> None:
        self.rows: dict[Row, SeatedRow] = {}
        self._vocab_size = vocab_size
        self._next_step = 0

    def run(self, plan: StepPlan, totals: Callable[[Work, SeatedRow], list[int]], masks: Masks | None = None) -> Done:
        """Carry a plan out, but for its moves. `totals` computes some work and says for each of its positions what the
        tokens after it follow from, beside the sequence's index: these are the hidden states. Under a mask the next
        token is the first allowed one from there on."""
        bits = check_masks(plan, masks)
        emitted = []
        ended = []
        likeliest = {}
        pooled: dict[Row, FloatArray] = {}
        for work in self.apply(plan):
            row = self.rows[work.row]
            states = totals(work, row)
            follows = states[-1]
            if Output.SAMPLE in work.output:
                token = (follows + row.seat.branch) % self._vocab_size
                if row.seat.sampling.masked:
                    token = first_allowed(token, bits[work.row], self._vocab_size)
                emitted.append((work.row, token))
                end = self.emit(work.row, token)
                if end is not None:
                    ended.append(end)
            elif Output.POOLED in work.output:
                row.pooled += sum(states)
                if work.stop == row.seat.num_prompt:
                    row.ended = True
                    pooled[work.row] = np.array([row.pooled], dtype=np.float32)
                    ended.append(Ended(work.row, FinishReason.STOP))
            elif Output.CANDIDATES in work.output:
                likeliest[work.row] = candidates(follows, self._vocab_size, row.seat.sampling.num_candidates)
        pairs = np.array(emitted, dtype=np.int32).reshape(-1, 2)
        return Done(StepResult(plan.step, pairs[:, 0], pairs[:, 1], tuple(ended), candidates=likeliest, pooled=pooled))

    def apply(self, plan: StepPlan) -> list[Work]:
        """Follow the differences; what is to be computed now. Cruising rows first, then chunks."""
        self._follow(plan)
        paused = set(plan.pauses)
        work = [
            Work(row, len(seated.tokens) - 1, len(seated.tokens), Output.SAMPLE)
            for row, seated in self.rows.items()
            if seated.cruising and not seated.ended and row not in paused
        ]
        assert len(work) <= plan.num_cruising, f"{len(work)} rows cruise, the plan says {plan.num_cruising}"
        for chunk in plan.chunks:
            stop = chunk.start + chunk.length
            seated = self.rows[chunk.row]
            samples, tethered = Output.SAMPLE in chunk.output, Output.CANDIDATES in chunk.output
            pooled = Output.POOLED in chunk.output
            assert not seated.cruising and samples + tethered + pooled <= 1, chunk
            assert pooled or (samples or tethered) == (stop == len(seated.tokens)), chunk
            assert pooled == seated.seat.sampling.pooled and not seated.ended, chunk
            seated.cruising = samples
            work.append(Work(chunk.row, chunk.start, stop, chunk.output))
        return work

    def _follow(self, plan: StepPlan) -> None:
        if plan.reset:
            self.rows.clear()
        else:
            assert plan.step == self._next_step, f"plan {plan.step} came, {self._next_step} was due"
        assert plan.num_padding >= 0, plan
        self._next_step = plan.step + 1
        for row in plan.leaves:
            del self.rows[row]
        for seat in plan.seats:
            assert seat.row not in self.rows, f"row {seat.row} is taken"
            self.rows[seat.row] = SeatedRow(seat, seat.tokens.tolist())
        for tell in plan.tells:
            seated = self.rows[tell.row]
            assert not seated.cruising, f"row {tell.row} cruises: it finds its tokens itself"
            seated.tokens.extend(tell.tokens)
        for number, block in zip(plan.grants.rows.tolist(), plan.grants.blocks.tolist(), strict=True):
            self.rows[Row(number)].blocks.append(BlockId(block))

    def emit(self, row: Row, token: int) -> Ended | None:
        """A row gains a token; how it ended, if it did."""
        seated = self.rows[row]
        seated.tokens.append(token)
        generated = len(seated.tokens) - seated.seat.num_prompt
        if token in seated.seat.sampling.end_ids and generated >= seated.seat.sampling.min_tokens:
            reason = FinishReason.STOP
        elif len(seated.tokens) == seated.seat.max_length:
            reason = FinishReason.LENGTH
        else:
            return None
        seated.ended = True
        return Ended(row, reason)

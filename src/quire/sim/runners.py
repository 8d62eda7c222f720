"""Runners without tensors, behind the same interface as the model runner: `ToyRunner`, `OracleRunner` and `BulkRunner`.

`SimRows` reads plans in plain Python: starts, releases, appends, grants and decoding rows become the work of a step.
The torch runner does the same with tensors; both must agree. Padding and logit processors are ignored:
there are no logits.

- `ToyRunner`: the next token is the sum of all tokens before it, and the sequence's index, modulo the vocabulary.
  Outputs can be computed by hand, so an engine test needs no model and no KV cache: moves are ignored.
- `OracleRunner`: real KV slots, and tokens derived from what is read back through the block tables. Plain lists, not
  arrays: the scenarios of `quire check` are small, and a decoding row writes one slot per step.
- `BulkRunner`: for measurements. All rows in a few numpy calls, outputs of a known length, no model and no cache. A row
  with end tokens stops with its `min_tokens`-th token: the request sets the length, unknown to the scheduler.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, islice, starmap
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import BlockId, FloatArray, IntArray, Row
from quire.core.moves import Move, Place, Tier, runs
from quire.core.oracle import candidates, mix
from quire.core.step import (
    ChunkOutput,
    FinishedRow,
    FinishReason,
    ForcedTokens,
    Masks,
    RowStart,
    StepPlan,
    StepResult,
    Verified,
)
from quire.sched.cost_model import StepShape


class SimWork(NamedTuple):
    """Compute positions [start, stop) of a row's tokens and the drafts behind them, and return what `output` names."""

    row: Row
    start: int
    stop: int
    output: ChunkOutput
    drafts: tuple[int, ...] = ()


@dataclass(slots=True)
class SimRow:
    """A row as the runner sees it."""

    row_start: RowStart
    tokens: list[int]
    blocks: list[BlockId] = field(default_factory=list)
    decoding: bool = False
    ended: bool = False
    pooled: int = 0  # the sum of the hidden states so far, of a pooled prompt


class FinishedStep(NamedTuple):
    """A step that was computed when it was launched."""

    result: StepResult

    @property
    def drafted(self) -> dict[Row, IntArray]:
        return {}

    def sample(self, masks: Masks) -> None:
        raise AssertionError("a step without masked rows is sampled when it is launched")

    def wait(self) -> StepResult:
        return self.result


# Proposes up to this many tokens after those of a row; none by default.
ProposeDrafts = Callable[[SimRow, int], list[int]]


class EmittedTokens:
    """The tokens of a step, in passes, as its rows emit them one after the other."""

    __slots__ = ("_passes",)

    def __init__(self) -> None:
        self._passes: list[list[tuple[int, int]]] = [[]]

    def add(self, row: Row, token: int, number: int = 0) -> None:
        """The token with this number of those that the row emits in the step."""
        if number == len(self._passes):
            self._passes.append([])
        self._passes[number].append((row, token))

    def result(self, plan: StepPlan, work: Iterable[SimWork], result: StepResult) -> StepResult:
        """The result with these tokens, and what became of the drafts of its plan."""
        pairs = np.array(list(chain.from_iterable(self._passes)), dtype=np.int32).reshape(-1, 2)
        starts = list(accumulate(len(each) for each in self._passes[:-1]))
        result = result._replace(rows=pairs[:, 0], tokens=pairs[:, 1], passes=tuple(starts))
        if not len(plan.drafts):
            return result
        drafted = {each.row: len(each.drafts) for each in work}
        gained = Counter(row for further in self._passes[1:] for row, _ in further)
        rows = plan.drafts.rows.tolist()
        numbers = np.array([(drafted.get(row, 0), gained[row]) for row in rows], dtype=np.int32)
        return result._replace(verified=Verified(plan.drafts.rows, numbers[:, 0], numbers[:, 1]))


# The result of a step whose forward pass is done, by the masks of each masked row: of its next positions, in order.
Choose = Callable[[dict[Row, list[IntArray]]], StepResult]


class MaskedStep:
    """A step whose forward pass was computed when it was launched, and whose tokens wait for masks."""

    __slots__ = ("_choose", "_masked", "_result", "drafted")

    def __init__(self, masked: tuple[Row, ...], choose: Choose, drafted: dict[Row, IntArray]) -> None:
        self._masked = masked
        self._choose = choose
        self.drafted = drafted
        self._result: StepResult | None = None

    @property
    def sampled(self) -> bool:
        return self._result is not None

    def sample(self, masks: Masks) -> None:
        assert self._result is None, "sampled twice"
        named = masks.rows.tolist()
        assert set(named) <= set(self._masked), (named, self._masked)
        by_row: dict[Row, list[IntArray]] = {row: [] for row in self._masked}
        for row, bits in zip(named, masks.bits, strict=True):
            by_row[row].append(bits)
        self._result = self._choose(by_row)

    def wait(self) -> StepResult:
        assert self._result is not None, f"rows {self._masked} wait for their masks"
        return self._result


SimStep = FinishedStep | MaskedStep


def sim_step(plan: StepPlan, work: Iterable[SimWork], choose: Choose) -> SimStep:
    """A step whose forward pass is done: sampled now, or once its masks are known."""
    if not plan.masked:
        return FinishedStep(choose({}))
    drafted = {each.row: np.array(each.drafts, dtype=np.int32) for each in work if each.drafts}
    return MaskedStep(plan.masked, choose, {row: drafted[row] for row in plan.masked if row in drafted})


def next_token(token: int, masks: list[IntArray] | None, number: int, vocab_size: int) -> int:
    """The token with this number that a row emits in a step, if it would be this one without masks."""
    return first_allowed(token, masks[number], vocab_size) if masks else token


def first_allowed(token: int, bits: IntArray, vocab_size: int) -> int:
    """The first token from this one on, modulo the vocabulary, that a mask allows; there must be one."""
    allowed = np.unpackbits(bits.astype("<i4").view(np.uint8), bitorder="little")[:vocab_size]
    return int((token + np.argmax(np.roll(allowed, -token))) % vocab_size)


class SimRows:
    """The persistent batch of a runner without tensors."""

    def __init__(self, vocab_size: int, propose: ProposeDrafts = lambda row, count: []) -> None:
        self.rows: dict[Row, SimRow] = {}
        self._vocab_size = vocab_size
        self._propose = propose
        self._next_step = 0
        self._newest: SimStep | None = None

    def run(self, plan: StepPlan, totals: Callable[[SimWork, SimRow], list[int]]) -> SimStep:
        """Carry out a plan without its moves. `totals` computes some work and returns a hidden state per position: the
        next token follows from it and the sequence's index; under a mask it is the first allowed token from there on.
        """
        states = [(work, totals(work, self.rows[work.row])) for work in self.apply(plan)]
        self._newest = sim_step(plan, [work for work, _ in states], partial(self._choose, plan, states))
        return self._newest

    def _choose(
        self, plan: StepPlan, computed: list[tuple[SimWork, list[int]]], masks: dict[Row, list[IntArray]]
    ) -> StepResult:
        emitted = EmittedTokens()
        ended: list[FinishedRow] = []
        likeliest = {}
        pooled: dict[Row, FloatArray] = {}
        for work, states in computed:
            row = self.rows[work.row]
            follows = states[-1]
            if ChunkOutput.SAMPLE in work.output:
                first = len(states) - 1 - len(work.drafts)
                for number, state in enumerate(states[first:]):
                    own = masks.get(work.row)
                    token = next_token((state + row.row_start.branch) % self._vocab_size, own, number, self._vocab_size)
                    emitted.add(work.row, token, number)
                    if not self.goes_on(work, number, token, ended, own):
                        break
            elif ChunkOutput.POOLED in work.output:
                row.pooled += sum(states)
                if work.stop == row.row_start.num_prompt:
                    row.ended = True
                    pooled[work.row] = np.array([row.pooled], dtype=np.float32)
                    ended.append(FinishedRow(work.row, FinishReason.STOP))
            elif ChunkOutput.CANDIDATES in work.output:
                likeliest[work.row] = candidates(follows, self._vocab_size, row.row_start.sampling.num_candidates)
        result = StepResult(plan.step, ended=tuple(ended), candidates=likeliest, pooled=pooled)
        return emitted.result(plan, [work for work, _ in computed], result)

    def apply(self, plan: StepPlan) -> list[SimWork]:
        """Apply a plan; the work of its step, decoding rows first, then chunks."""
        self._follow(plan)
        paused = set(plan.pauses)
        counts = dict(zip(plan.drafts.rows.tolist(), plan.drafts.counts.tolist(), strict=True))
        assert len(counts) == len(plan.drafts) and paused.isdisjoint(counts), plan.drafts
        forced = {each.row: each for each in plan.forced}
        assert len(forced) == len(plan.forced) and set(forced) <= set(counts), plan.forced
        work = [
            SimWork(
                row,
                len(assigned.tokens) - 1,
                len(assigned.tokens),
                ChunkOutput.SAMPLE,
                self._drafts(assigned, counts.get(row, 0), forced.get(row)),
            )
            for row, assigned in self.rows.items()
            if assigned.decoding and not assigned.ended and row not in paused
        ]
        assert len(work) <= plan.num_decoding, f"{len(work)} rows decode, the plan has {plan.num_decoding}"
        for chunk in plan.chunks:
            stop = chunk.start + chunk.length
            assigned = self.rows[chunk.row]
            samples, host_driven = ChunkOutput.SAMPLE in chunk.output, ChunkOutput.CANDIDATES in chunk.output
            pooled = ChunkOutput.POOLED in chunk.output
            assert not assigned.decoding and samples + host_driven + pooled <= 1, chunk
            assert pooled or (samples or host_driven) == (stop == len(assigned.tokens)), chunk
            assert pooled == assigned.row_start.sampling.pooled and not assigned.ended, chunk
            assigned.decoding = samples
            work.append(SimWork(chunk.row, chunk.start, stop, chunk.output))
        return work

    def _drafts(self, row: SimRow, count: int, forced: ForcedTokens | None) -> tuple[int, ...]:
        """What its grammar forces, or the proposals for a row; none behind the last position that it may compute."""
        count = min(count, row.row_start.max_length - 1 - len(row.tokens))
        if count <= 0:
            return ()
        known = [] if forced is None else forced.after(len(row.tokens)).tolist()
        return tuple((known or self._propose(row, count))[:count])

    def goes_on(
        self, work: SimWork, number: int, token: int, ended: list[FinishedRow], masks: list[IntArray] | None
    ) -> bool:
        """The row emits its token with this number in the step; whether its next draft is still to be verified.
        `masks`: of a masked row."""
        end = self.emit(work.row, token)
        if end is not None:
            ended.append(end)
        if end is not None or (masks is not None and number + 1 >= len(masks)):
            return False
        return number < len(work.drafts) and work.drafts[number] == token

    def _follow(self, plan: StepPlan) -> None:
        if plan.reset:
            self.rows.clear()
        else:
            newest = self._newest
            assert not isinstance(newest, MaskedStep) or newest.sampled, f"step {plan.step - 1} waits for its masks"
            assert plan.step == self._next_step, f"plan {plan.step} came, {self._next_step} was due"
        assert plan.num_padding >= 0, plan
        self._next_step = plan.step + 1
        for row in plan.releases:
            del self.rows[row]
        for row_start in plan.starts:
            assert row_start.row not in self.rows, f"row {row_start.row} is taken"
            self.rows[row_start.row] = SimRow(row_start, row_start.tokens.tolist())
        for append in plan.appends:
            assigned = self.rows[append.row]
            assert not assigned.decoding, f"row {append.row} decodes: it samples its tokens itself"
            assigned.tokens.extend(append.tokens)
        for number, block in zip(plan.grants.rows.tolist(), plan.grants.blocks.tolist(), strict=True):
            self.rows[Row(number)].blocks.append(BlockId(block))

    def emit(self, row: Row, token: int) -> FinishedRow | None:
        """Append a token to a row; how the row ended, if it did."""
        assigned = self.rows[row]
        assigned.tokens.append(token)
        generated = len(assigned.tokens) - assigned.row_start.num_prompt
        if token in assigned.row_start.sampling.end_ids and generated >= assigned.row_start.sampling.min_tokens:
            reason = FinishReason.STOP
        elif len(assigned.tokens) == assigned.row_start.max_length:
            reason = FinishReason.LENGTH
        else:
            return None
        assigned.ended = True
        return FinishedRow(row, reason)


class ToyRunner:
    """Adds up tokens."""

    def __init__(self, vocab_size: int, propose: ProposeDrafts = lambda row, count: []) -> None:
        self._rows = SimRows(vocab_size, propose)

    def launch(self, plan: StepPlan) -> SimStep:
        return self._rows.run(plan, self._totals)

    def _totals(self, work: SimWork, row: SimRow) -> list[int]:
        return list(accumulate((*row.tokens[: work.stop], *work.drafts)))[work.start :]


Slot = tuple[int, int]  # token, position

_EMPTY: Slot = (-1, -1)
_SPOILED: Slot = (-7, -7)


class _OracleRead(NamedTuple):
    """What a row's slots held, and Σ mix over them."""

    slots: list[Slot]
    total: int


_UNREAD = _OracleRead([], 0)


class OracleRunner:
    """One slot holds (token, position). The next token is (Σ mix over all slots of the row + index) mod V."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        num_host_blocks: int = 0,
        propose: ProposeDrafts = lambda row, count: [],
    ) -> None:
        self._block_size = block_size
        self._rows = SimRows(vocab_size, propose)
        self._stores = {
            Tier.DEVICE: [[_EMPTY] * block_size for _ in range(num_blocks + 1)],
            Tier.HOST: [[_EMPTY] * block_size for _ in range(num_host_blocks + 1)],
        }
        self._device = self._stores[Tier.DEVICE]
        self._readings: dict[Row, _OracleRead] = {}  # the last of each row

    def read(self, tier: Tier, blocks: Iterable[int]) -> list[Slot]:
        """The contents of some blocks' slots, one after the other."""
        store = self._stores[tier]
        return list(chain.from_iterable([store[block] for block in blocks]))

    def erase(self, place: Place, slots: range) -> None:
        """Nothing is known of what these slots hold: a lost step did not write them, or the row was not finite."""
        block = self._stores[place.tier][place.block]
        block[slots.start : slots.stop] = [_SPOILED] * len(slots)

    def fill(self, blocks: IntArray, tokens: IntArray, start: int) -> None:
        """Another engine writes these tokens, from position `start` on, into whole blocks."""
        slots = list(zip(tokens.tolist(), range(start, start + len(tokens)), strict=True))
        for place, block in enumerate(blocks.tolist()):
            self._device[block] = slots[place * self._block_size : (place + 1) * self._block_size]

    def launch(self, plan: StepPlan) -> SimStep:
        self.carry(plan.moves)
        return self._rows.run(plan, self._totals)

    def carry(self, moves: Iterable[Move]) -> None:
        """Copy blocks in the order of the moves."""
        for run in runs(moves):
            assert (run.src, run.dst) != (Tier.HOST, Tier.HOST), f"a move inside the host's store: {run}"
            source, target = self._stores[run.src], self._stores[run.dst]
            for src, dst in zip(run.sources, run.targets, strict=True):
                target[dst] = list(source[src])

    def _totals(self, work: SimWork, row: SimRow) -> list[int]:
        """Write the positions that are computed, then read everything back. Slots before them that are unchanged since
        the last read are not summed again."""
        device, size = self._device, self._block_size
        written = [*row.tokens[work.start : work.stop], *work.drafts]
        for position, token in enumerate(written, work.start):
            device[row.blocks[position // size]][position % size] = token, position
        stop = work.stop + len(work.drafts)
        read = list(islice(chain.from_iterable([device[block] for block in row.blocks]), stop))
        before = self._readings.get(work.row, _UNREAD)
        num_known = len(before.slots)
        if num_known > work.start or before.slots != read[:num_known]:
            before, num_known = _UNREAD, 0
        sums = list(accumulate(starmap(mix, read[num_known:]), initial=before.total))
        self._readings[work.row] = _OracleRead(read[: work.stop], sums[work.stop - num_known])
        return sums[1 + work.start - num_known :]


_UNENDING = 1 << 40
_VOCAB_SIZE = 1 << 15


class _BulkResult(NamedTuple):
    """Rows that computed, and those of them that emit."""

    decoded: NDArray[np.int64]
    emitters: IntArray


class BulkRunner:
    """Counts the tokens of every row and emits arbitrary ones."""

    def __init__(self, max_rows: int) -> None:
        self.num_computed: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # until the row is started again
        self.shape = StepShape()  # of the last step; padding counts as tokens that read nothing
        self._num_known: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self._stop: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # tokens at which it emits an end token
        self._full: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # tokens at its length limit
        self._decoding: NDArray[np.bool_] = np.zeros(max_rows, dtype=np.bool_)

    def launch(self, plan: StepPlan) -> FinishedStep:
        if plan.reset:
            self._decoding[:] = False
        self._decoding[list(plan.releases)] = False
        for row_start in plan.starts:
            self._start_row(row_start)
        assert not plan.appends and not plan.masked, "this runner has no beam search and no grammars"
        emitters = self._work(plan).emitters
        known = self._num_known[emitters] + 1
        self._num_known[emitters] = known
        stopped, full = known >= self._stop[emitters], known >= self._full[emitters]
        ended = stopped | full
        self._decoding[emitters[ended]] = False
        outcomes = tuple(
            FinishedRow(Row(row), FinishReason.STOP if stops else FinishReason.LENGTH)
            for row, stops in zip(emitters[ended].tolist(), stopped[ended].tolist(), strict=True)
        )
        tokens: IntArray = ((emitters * 7919 + known) % _VOCAB_SIZE).astype(np.int32)
        none = np.zeros(len(plan.drafts), dtype=np.int32)
        verified = Verified(plan.drafts.rows, none, none)  # it proposes nothing
        return FinishedStep(StepResult(plan.step, emitters, tokens, outcomes, verified=verified))

    def _start_row(self, row_start: RowStart) -> None:
        sampling = row_start.sampling
        self.num_computed[row_start.row] = 0
        self._num_known[row_start.row] = len(row_start.tokens)
        self._full[row_start.row] = row_start.max_length
        self._stop[row_start.row] = (
            row_start.num_prompt + max(sampling.min_tokens, 1) if sampling.end_ids else _UNENDING
        )

    def _work(self, plan: StepPlan) -> _BulkResult:
        moving = self._decoding
        if plan.pauses:
            moving = moving.copy()
            moving[list(plan.pauses)] = False
        decoded = np.flatnonzero(moving)
        self.num_computed[decoded] += 1
        shape = StepShape(len(decoded), int(self.num_computed[decoded].sum()), plan.num_padding)
        emitters = [decoded.astype(np.int32)]
        for chunk in plan.chunks:
            self.num_computed[chunk.row] = chunk.start + chunk.length
            shape = shape.with_chunk(chunk.start, chunk.length)
            if ChunkOutput.SAMPLE in chunk.output:
                emitters.append(np.array([chunk.row], dtype=np.int32))
                self._decoding[chunk.row] = True
        self.shape = shape
        return _BulkResult(decoded, np.concatenate(emitters))

"""Two laws, watched from outside by following every plan.

Law (a): nothing that a step in flight reads or writes may be given away, be it a row or a block. To find a block in
the cache and only read it is not to be given it; but it must not be found while a step in flight writes it. And
because moves run before their step writes anything, the source of a move is not held by it: it may be granted anew in
the same plan.

Law I6: what a step writes lies in a block that exactly one live table holds. A block may stand in many tables (prefix
hits, forks), but then nobody writes it. A move writes a block that no live table holds between leaves and grants.

Rows that ended on the device are taken to cruise on until they leave: the host plans for them as if they did.

What some counters of a scheduler should say, from its plans and from who sat before each turn.

What the cache says it holds against what the body's slots hold (I5, I16). Needs a body that can be read.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from quire.core.events import EventKind
from quire.core.ids import BlockId, RequestId, Row, SequenceId
from quire.core.moves import Tier
from quire.core.request import RequestGroup
from quire.core.step import ChunkOutput, RowStart, Runner, StepPlan
from quire.kv.manager import KVManager
from quire.sched.scheduler import Scheduler


@dataclass(slots=True)
class _WatchedRow:
    """A seated sequence as plans describe it."""

    sequence: SequenceId
    num_tokens: int  # known to it, those that it emitted included
    max_length: int
    table: list[BlockId] = field(default_factory=list)
    num_computed: int = 0
    decoding: bool = False


class _WatchedRead(NamedTuple):
    """What one row reads in a step, blocks [0, stop) of its table, and writes, from `first_written` on."""

    sequence: SequenceId
    table: list[BlockId]  # of the row as it lives: it only grows
    first_written: int
    stop: int


class InFlightWatch:
    """Keeps the tables of all rows, and for every step in flight who computes on what."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows: dict[Row, _WatchedRow] = {}
        self._holders: defaultdict[BlockId, int] = defaultdict(int)
        self._in_flight: deque[dict[Row, _WatchedRead]] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Raise AssertionError if the plan breaks a law."""
        if plan.reset:  # what was in flight is lost with the lost step
            self._rows.clear()
            self._holders.clear()
            self._in_flight.clear()
        for row in plan.releases:
            for block in self._rows.pop(row).table:
                self._holders[block] -= 1
        self._check_moves(plan)
        for row_start in plan.starts:
            self._sit(row_start)
        for append in plan.appends:
            self._rows[append.row].num_tokens += len(append.tokens)
        spans = dict(self._spans(plan))
        num_decoding = len(spans) - len(plan.chunks)
        assert num_decoding == plan.num_decoding, f"{num_decoding} rows cruise, the plan says {plan.num_decoding}"
        self._grant(plan, spans)
        self._in_flight.append({row: self._reading(row, span) for row, span in spans.items()})
        self._advance(plan, spans)

    def absorb(self) -> None:
        self._in_flight.popleft()

    def _sit(self, row_start: RowStart) -> None:
        assert row_start.row not in self._rows, f"row {row_start.row} is taken"
        for step in self._in_flight:
            reading = step.get(row_start.row)
            ours = reading is None or reading.sequence == row_start.sequence
            assert ours, f"row {row_start.row} is still in flight"
        self._rows[row_start.row] = _WatchedRow(row_start.sequence, len(row_start.tokens), row_start.max_length)

    def _spans(self, plan: StepPlan) -> Iterator[tuple[Row, range]]:
        """The positions that each row computes in this step."""
        for row, sitter in self._rows.items():
            if sitter.decoding and row not in plan.pauses:
                yield row, range(sitter.num_tokens - 1, sitter.num_tokens)
        for chunk in plan.chunks:
            yield chunk.row, range(chunk.start, chunk.start + chunk.length)

    def _check_moves(self, plan: StepPlan) -> None:
        for move in plan.moves:
            if move.dst.tier is Tier.DEVICE:
                block = move.dst.block
                assert not self._holders[block], f"a move writes block {block}, which a live table holds"
                assert not self._touching(block), f"block {block} is still in flight: a move writes it"

    def _grant(self, plan: StepPlan, spans: dict[Row, range]) -> None:
        for number, granted in zip(plan.grants.rows.tolist(), plan.grants.blocks.tolist(), strict=True):
            row, block = Row(number), BlockId(granted)
            sitter = self._rows[row]
            sitter.table.append(block)
            self._holders[block] += 1
            writes = row in spans and len(sitter.table) * self._block_size > spans[row].start
            if writes:  # a row that computes nothing yet only holds what it found
                others = self._touching(block) - {sitter.sequence}
                assert not others, f"block {block} is still in flight for {others}"
            else:
                assert not self._touching(block, writing=True), f"block {block} was found before it was written"

    def _touching(self, block: BlockId, *, writing: bool = False) -> set[SequenceId]:
        """Whose steps in flight read or write a block, or only who writes it."""
        return {
            each.sequence
            for step in self._in_flight
            for each in step.values()
            if block in each.table[each.first_written if writing else 0 : each.stop]
        }

    def _reading(self, row: Row, span: range) -> _WatchedRead:
        """What a row reads; what it writes must be its own."""
        sitter = self._rows[row]
        table = sitter.table
        first, stop = span.start // self._block_size, -(-span.stop // self._block_size)
        assert stop <= len(table), f"row {row} writes position {span.stop - 1} beyond its {len(table)} blocks"
        for block in table[first:stop]:
            assert self._holders[block] == 1, f"row {row} writes block {block}, which {self._holders[block]} hold"
        return _WatchedRead(sitter.sequence, table, first, stop)

    def _advance(self, plan: StepPlan, spans: dict[Row, range]) -> None:
        """Rows that sampled know one token more, and cruise until their length ends them."""
        sampling = {chunk.row for chunk in plan.chunks if ChunkOutput.SAMPLE in chunk.output}
        for row, span in spans.items():
            sitter = self._rows[row]
            sitter.num_computed = span.stop
            if sitter.decoding or row in sampling:
                sitter.num_tokens += 1
                sitter.decoding = sitter.num_tokens < sitter.max_length


@dataclass(slots=True)
class _CountedRow:
    sequence: SequenceId
    num_positions: int = 0
    decoding: bool = False


class CounterCheck:
    """Follows one scheduler: `begin` before a turn, `launch` with its plan, `end` after it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._rows: dict[Row, _CountedRow] = {}
        self._had: dict[SequenceId, int] = {}  # positions of those who left their row, or were just forked
        self._running: set[RequestId] = set()
        self._num_preemptions: dict[RequestId, int] = {}
        self.recomputed_tokens = 0
        self.forks = 0
        self.class_preemptions = 0

    def begin(self) -> None:
        self._running = {group.request.id for group in self._scheduler.running_groups()}

    def launch(self, plan: StepPlan) -> None:
        """A chunk computes again what its sequence had before it left its row."""
        for row in list(self._rows) if plan.reset else plan.releases:
            left = self._rows.pop(row)
            self._had[left.sequence] = max(self._had.get(left.sequence, 0), left.num_positions)
        for row_start in plan.starts:
            self._rows[row_start.row] = _CountedRow(row_start.sequence)
        for row, sitter in self._rows.items():
            sitter.num_positions += sitter.decoding and row not in plan.pauses
        for chunk in plan.chunks:
            sitter, stop = self._rows[chunk.row], chunk.start + chunk.length
            self.recomputed_tokens += max(min(stop, self._had.get(sitter.sequence, 0)) - chunk.start, 0)
            sitter.num_positions = stop
            sitter.decoding = ChunkOutput.SAMPLE in chunk.output

    def end(self, groups: list[RequestGroup]) -> None:
        """Who waits for its first plan was forked. A seat is taken for one who did not sit, a block for one who did."""
        forked = self._scheduler.forked_sequences()
        self.forks += len(forked)
        for sequence in forked:
            self._had[sequence.id] = max(self._had.get(sequence.id, 0), sequence.num_computed)
        if self._scheduler.counters.preemptions == sum(self._num_preemptions.values()):
            return
        for group in groups:
            if group.num_preemptions > self._num_preemptions.get(group.request.id, 0):
                self._num_preemptions[group.request.id] = group.num_preemptions
                causes = [e.other for e in group.events if e.what is EventKind.PREEMPTED and e.other is not None]
                self.class_preemptions += causes[-1] not in self._running


@runtime_checkable
class Readable(Protocol):
    """A body whose blocks can be looked into: (token, position) for each slot."""

    def read(self, tier: Tier, blocks: Iterable[int]) -> list[tuple[int, int]]: ...


def audit_contents(kv: KVManager, body: Runner) -> None:
    """Every cached block holds the tokens it is keyed by, at their positions. Not while copies are still ordered."""
    if kv.tree is None or kv.has_moves or not isinstance(body, Readable):
        return
    for node in kv.tree.nodes():
        tokens, stop = node.token_ids(), node.num_path_tokens
        held = body.read(node.tier, node.blocks.tolist())[: len(tokens)]
        right = list(zip(tokens, range(stop - len(tokens), stop), strict=True))
        assert held == right, f"{node} holds {held}"

"""Invariants checked from outside the scheduler: blocks in flight, counters, and the contents of the cache.

Invariant (a): a row or block that a step in flight reads or writes is not given to another sequence. A cache hit that
only reads a block is allowed, but not while a step in flight writes it. Moves run before their step writes anything, so
the source of a move may be granted again in the same plan.

I6: a step writes only blocks that exactly one live table holds. A block may be in many tables (prefix hits, forks), but
then no row writes it. A move writes a block that no live table holds between releases and grants.

Rows that ended on the device count as decoding until they are released: the host plans for them as if they decoded.

`CounterCheck` derives some counters from the plans and from the requests that ran before each step. `audit_contents`
compares cached tokens with the runner's slots (I5, I16); it needs a runner whose slots can be read.
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
    """A running sequence as the plans describe it."""

    sequence: SequenceId
    num_tokens: int  # with those that it emitted
    max_length: int
    table: list[BlockId] = field(default_factory=list)
    num_computed: int = 0
    decoding: bool = False


class _WatchedRead(NamedTuple):
    """A row reads blocks [0, stop) of its table in a step and writes from `first_written` on."""

    sequence: SequenceId
    table: list[BlockId]  # shared with the row: it only grows
    first_written: int
    stop: int


class InFlightWatch:
    """The tables of all rows, and what each row of each step in flight reads and writes."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows: dict[Row, _WatchedRow] = {}
        self._holders: defaultdict[BlockId, int] = defaultdict(int)
        self._in_flight: deque[dict[Row, _WatchedRead]] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Raise AssertionError if the plan breaks a law."""
        if plan.reset:  # steps in flight are lost with the lost step
            self._rows.clear()
            self._holders.clear()
            self._in_flight.clear()
        for row in plan.releases:
            for block in self._rows.pop(row).table:
                self._holders[block] -= 1
        self._check_moves(plan)
        for row_start in plan.starts:
            self._start_row(row_start)
        for append in plan.appends:
            self._rows[append.row].num_tokens += len(append.tokens)
        spans = dict(self._spans(plan))
        num_decoding = len(spans) - len(plan.chunks)
        assert num_decoding == plan.num_decoding, f"{num_decoding} rows decode, the plan has {plan.num_decoding}"
        self._grant(plan, spans)
        self._in_flight.append({row: self._reading(row, span) for row, span in spans.items()})
        self._advance(plan, spans)

    def absorb(self) -> None:
        self._in_flight.popleft()

    def _start_row(self, row_start: RowStart) -> None:
        assert row_start.row not in self._rows, f"row {row_start.row} is taken"
        for step in self._in_flight:
            reading = step.get(row_start.row)
            ours = reading is None or reading.sequence == row_start.sequence
            assert ours, f"row {row_start.row} is still in flight"
        self._rows[row_start.row] = _WatchedRow(row_start.sequence, len(row_start.tokens), row_start.max_length)

    def _spans(self, plan: StepPlan) -> Iterator[tuple[Row, range]]:
        """The positions that each row computes in this step."""
        for row, watched in self._rows.items():
            if watched.decoding and row not in plan.pauses:
                yield row, range(watched.num_tokens - 1, watched.num_tokens)
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
            watched = self._rows[row]
            watched.table.append(block)
            self._holders[block] += 1
            writes = row in spans and len(watched.table) * self._block_size > spans[row].start
            if writes:  # a row that does not compute yet only holds cached blocks
                others = self._touching(block) - {watched.sequence}
                assert not others, f"block {block} is still in flight for {others}"
            else:
                assert not self._touching(block, writing=True), f"block {block} was found before it was written"

    def _touching(self, block: BlockId, *, writing: bool = False) -> set[SequenceId]:
        """The sequences whose steps in flight read or write a block, or only those that write it."""
        return {
            each.sequence
            for step in self._in_flight
            for each in step.values()
            if block in each.table[each.first_written if writing else 0 : each.stop]
        }

    def _reading(self, row: Row, span: range) -> _WatchedRead:
        """What a row reads in a step. No other table may hold a block that it writes."""
        watched = self._rows[row]
        table = watched.table
        first, stop = span.start // self._block_size, -(-span.stop // self._block_size)
        assert stop <= len(table), f"row {row} writes position {span.stop - 1} beyond its {len(table)} blocks"
        for block in table[first:stop]:
            assert self._holders[block] == 1, f"row {row} writes block {block}, which {self._holders[block]} hold"
        return _WatchedRead(watched.sequence, table, first, stop)

    def _advance(self, plan: StepPlan, spans: dict[Row, range]) -> None:
        """Rows that sampled have one token more, and decode until their length limit."""
        sampling = {chunk.row for chunk in plan.chunks if ChunkOutput.SAMPLE in chunk.output}
        for row, span in spans.items():
            watched = self._rows[row]
            watched.num_computed = span.stop
            if watched.decoding or row in sampling:
                watched.num_tokens += 1
                watched.decoding = watched.num_tokens < watched.max_length


@dataclass(slots=True)
class _CountedRow:
    sequence: SequenceId
    num_positions: int = 0
    decoding: bool = False


class CounterCheck:
    """Follows one scheduler: `begin` before a step, `launch` with its plan, `end` after it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._rows: dict[Row, _CountedRow] = {}
        self._num_before: dict[SequenceId, int] = {}  # positions of released or just forked sequences
        self._running: set[RequestId] = set()
        self._num_preemptions: dict[RequestId, int] = {}
        self.recomputed_tokens = 0
        self.forks = 0
        self.class_preemptions = 0

    def begin(self) -> None:
        self._running = {group.request.id for group in self._scheduler.running_groups()}

    def launch(self, plan: StepPlan) -> None:
        """A chunk recomputes the positions that its sequence had before its row was released."""
        for row in list(self._rows) if plan.reset else plan.releases:
            left = self._rows.pop(row)
            self._num_before[left.sequence] = max(self._num_before.get(left.sequence, 0), left.num_positions)
        for row_start in plan.starts:
            self._rows[row_start.row] = _CountedRow(row_start.sequence)
        for row, watched in self._rows.items():
            watched.num_positions += watched.decoding and row not in plan.pauses
        for chunk in plan.chunks:
            watched, stop = self._rows[chunk.row], chunk.start + chunk.length
            self.recomputed_tokens += max(min(stop, self._num_before.get(watched.sequence, 0)) - chunk.start, 0)
            watched.num_positions = stop
            watched.decoding = ChunkOutput.SAMPLE in chunk.output

    def end(self, groups: list[RequestGroup]) -> None:
        """Sequences that wait for their first plan were forked. A preemption for a request that did not run took a row
        (`class_preemptions`); one for a running request took blocks."""
        forked = self._scheduler.forked_sequences()
        self.forks += len(forked)
        for sequence in forked:
            self._num_before[sequence.id] = max(self._num_before.get(sequence.id, 0), sequence.num_computed)
        if self._scheduler.counters.preemptions == sum(self._num_preemptions.values()):
            return
        for group in groups:
            if group.num_preemptions > self._num_preemptions.get(group.request.id, 0):
                self._num_preemptions[group.request.id] = group.num_preemptions
                causes = [e.other for e in group.events if e.what is EventKind.PREEMPTED and e.other is not None]
                self.class_preemptions += causes[-1] not in self._running


@runtime_checkable
class Readable(Protocol):
    """A runner whose blocks can be read: (token, position) for each slot."""

    def read(self, tier: Tier, blocks: Iterable[int]) -> list[tuple[int, int]]: ...


def audit_contents(kv: KVManager, runner: Runner) -> None:
    """Every cached block holds its tokens at their positions. Not checked while copies wait for a plan."""
    if kv.tree is None or kv.has_moves or not isinstance(runner, Readable):
        return
    for node in kv.tree.nodes():
        tokens, stop = node.token_ids(), node.num_path_tokens
        held = runner.read(node.tier, node.blocks.tolist())[: len(tokens)]
        right = list(zip(tokens, range(stop - len(tokens), stop), strict=True))
        assert held == right, f"{node} holds {held}"

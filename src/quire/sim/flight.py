"""Two laws, watched from outside by following every plan.

Law (a): nothing that a step in flight reads or writes may be given away, be it a row or a block. To find a block in
the cache and only read it is not to be given it; but it must not be found while a step in flight writes it. And
because moves run before their step writes anything, the source of a move is not held by it: it may be granted anew in
the same plan.

Law I6: what a step writes lies in a block that exactly one live table holds. A block may stand in many tables (prefix
hits, forks), but then nobody writes it. A move writes a block that no live table holds between leaves and grants.

Rows that ended on the device are taken to cruise on until they leave: the host plans for them as if they did.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.ids import BlockId, Row, SequenceId
from quire.core.moves import Tier
from quire.core.step import Output, Seat, StepPlan


@dataclass(slots=True)
class _Sitter:
    """A seated sequence as plans describe it."""

    sequence: SequenceId
    num_tokens: int  # known to it, those that it emitted included
    max_length: int
    table: list[BlockId] = field(default_factory=list)
    num_computed: int = 0
    cruising: bool = False


class _Reading(NamedTuple):
    """What one row reads in a step, blocks [0, stop) of its table, and writes, from `first_written` on."""

    sequence: SequenceId
    table: list[BlockId]  # of the row as it lives: it only grows
    first_written: int
    stop: int


class FlightWatch:
    """Keeps the tables of all rows, and for every step in flight who computes on what."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows: dict[Row, _Sitter] = {}
        self._holders: defaultdict[BlockId, int] = defaultdict(int)
        self._in_flight: deque[dict[Row, _Reading]] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Raise AssertionError if the plan breaks a law."""
        if plan.reset:  # what was in flight is lost with the lost step
            self._rows.clear()
            self._holders.clear()
            self._in_flight.clear()
        for row in plan.leaves:
            for block in self._rows.pop(row).table:
                self._holders[block] -= 1
        self._check_moves(plan)
        for seat in plan.seats:
            self._sit(seat)
        for tell in plan.tells:
            self._rows[tell.row].num_tokens += len(tell.tokens)
        spans = dict(self._spans(plan))
        num_cruising = len(spans) - len(plan.chunks)
        assert num_cruising == plan.num_cruising, f"{num_cruising} rows cruise, the plan says {plan.num_cruising}"
        self._grant(plan, spans)
        self._in_flight.append({row: self._reading(row, span) for row, span in spans.items()})
        self._advance(plan, spans)

    def absorb(self) -> None:
        self._in_flight.popleft()

    def _sit(self, seat: Seat) -> None:
        assert seat.row not in self._rows, f"row {seat.row} is taken"
        for step in self._in_flight:
            reading = step.get(seat.row)
            ours = reading is None or reading.sequence == seat.sequence
            assert ours, f"row {seat.row} is still in flight"
        self._rows[seat.row] = _Sitter(seat.sequence, len(seat.tokens), seat.max_length)

    def _spans(self, plan: StepPlan) -> Iterator[tuple[Row, range]]:
        """The positions that each row computes in this step."""
        for row, sitter in self._rows.items():
            if sitter.cruising and row not in plan.pauses:
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

    def _reading(self, row: Row, span: range) -> _Reading:
        """What a row reads; what it writes must be its own."""
        sitter = self._rows[row]
        table = sitter.table
        first, stop = span.start // self._block_size, -(-span.stop // self._block_size)
        assert stop <= len(table), f"row {row} writes position {span.stop - 1} beyond its {len(table)} blocks"
        for block in table[first:stop]:
            assert self._holders[block] == 1, f"row {row} writes block {block}, which {self._holders[block]} hold"
        return _Reading(sitter.sequence, table, first, stop)

    def _advance(self, plan: StepPlan, spans: dict[Row, range]) -> None:
        """Rows that sampled know one token more, and cruise until their length ends them."""
        sampling = {chunk.row for chunk in plan.chunks if Output.SAMPLE in chunk.output}
        for row, span in spans.items():
            sitter = self._rows[row]
            sitter.num_computed = span.stop
            if sitter.cruising or row in sampling:
                sitter.num_tokens += 1
                sitter.cruising = sitter.num_tokens < sitter.max_length

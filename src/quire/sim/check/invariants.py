"""Invariants checked from outside the scheduler: blocks in flight, counters, and the contents of the cache.

Invariant (a): a row or block that a step in flight reads or writes is not given to another sequence. A cache hit that
only reads a block is allowed, but not while a step in flight writes it. Moves run before their step writes anything, so
the source of a move may be granted again in the same plan.

I5: a row reads only blocks that a row of its own partition wrote, at every step: equal tokens of another tenant or salt
are another content. The watch remembers the partition that wrote each block, also through copies and on the host.

I6: a step writes only blocks that exactly one live table holds. A block may be in many tables (prefix hits, forks), but
then no row writes it. A move writes a block that no live table holds between releases and grants. What other engines
read (`holds`) no row and no move writes; what they fill no row has and no move reads.

Grammar rows: a plan masks exactly the rows under a grammar that sample. Their masks come when every step before is
absorbed, and before the next launch; they are those of the tokens that each row has by then, in the order of the plan,
without rows whose sequence has ended. A row with drafts emits no more tokens than it has masks.

Drafts: a row writes up to where it can be at most, with all drafts in flight accepted. It emits one token, and one more
for every draft that the result calls accepted.

Rows that ended on the device count as decoding until they are released: the host plans for them as if they decoded.

`CounterCheck` derives some counters from the plans and from the requests that ran before each step. `audit_contents`
compares cached tokens with the runner's slots (I5, I16); it needs a runner whose slots can be read.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from quire.core.ids import BlockId, IntArray, RequestId, Row, SequenceId
from quire.core.moves import Move, Place, Tier
from quire.core.request import EventKind, RequestGroup, SequenceState
from quire.core.step import ChunkOutput, Masks, RowStart, Runner, StepPlan, StepResult, Verified
from quire.kv.manager import KVManager
from quire.kv.prefix_holds import HeldPrefix
from quire.sched.fairness import ServiceCost
from quire.sched.scheduler import Scheduler
from quire.sched.speculation import MAX_DRAFTS


@dataclass(slots=True)
class _WatchedRow:
    """A running sequence as the plans describe it."""

    sequence: SequenceId
    partition: str
    masked: bool
    num_tokens: int  # with those that it emitted: one in each step in flight
    num_least: int  # the same, if no draft was ever accepted
    max_length: int
    table: list[BlockId] = field(default_factory=list)
    num_ahead: int = 0  # drafts in flight
    decoding: bool = False


class _WatchedRead(NamedTuple):
    """A row reads blocks [0, stop) of its table in a step and writes from `first_written` on."""

    sequence: SequenceId
    table: list[BlockId]  # shared with the row: it only grows
    first_written: int
    stop: int
    span: range  # the positions it computes
    samples: bool


class LostWrite(NamedTuple):
    """Slots of a block that a lost or failed step should have written."""

    place: Place
    slots: range


@dataclass(slots=True)
class _WatchedStep:
    """A step in flight."""

    moves: tuple[Move, ...]
    reads: dict[Row, _WatchedRead]
    unsampled: tuple[Row, ...]  # masked rows that wait for their masks
    drafts: dict[Row, int]
    num_masks: dict[Row, int] = field(default_factory=dict)  # of masked rows, once they came


class InFlightWatch:
    """The tables of all rows, and what each row of each step in flight reads and writes."""

    def __init__(self, block_size: int, partition_of: Callable[[Row], str] = lambda row: "") -> None:
        self._block_size = block_size
        self._partition_of = partition_of
        self._rows: dict[Row, _WatchedRow] = {}
        self._holders: defaultdict[BlockId, int] = defaultdict(int)
        self._in_flight: deque[_WatchedStep] = deque()
        self._writers: dict[Tier, dict[BlockId, str]] = {tier: {} for tier in Tier}  # the partition that wrote a block
        self._generated: dict[Row, list[int]] = {}  # the tokens that each row is known to have after its prompt
        self.holds: dict[int, HeldPrefix] = {}  # what other engines read, and fill

    def launch(self, plan: StepPlan) -> None:
        """Raise AssertionError if the plan breaks a law."""
        if plan.reset:  # steps in flight are lost with the lost step
            self._rows.clear()
            self._holders.clear()
            self._in_flight.clear()
        assert not any(step.unsampled for step in self._in_flight), "a launch while a step waits for its masks"
        for row in plan.releases:
            for block in self._rows.pop(row).table:
                self._holders[block] -= 1
        self._check_moves(plan)
        for row_start in plan.starts:
            self._start_row(row_start)
        for append in plan.appends:
            self._rows[append.row].num_tokens += len(append.tokens)
            self._rows[append.row].num_least += len(append.tokens)
        spans = dict(self._spans(plan))
        num_decoding = len(spans) - len(plan.chunks)
        assert num_decoding == plan.num_decoding, f"{num_decoding} rows decode, the plan has {plan.num_decoding}"
        self._grant(plan, spans)
        sampling = self._sampling(plan, spans)
        self._check_masked(plan, sampling)
        reads = {row: self._reading(row, span, samples=row in sampling) for row, span in spans.items()}
        drafts = _drafts_by_row(plan)
        self._in_flight.append(_WatchedStep(plan.moves, reads, plan.masked, drafts))
        self._advance(sampling, drafts)

    def sample(
        self,
        masks: Masks,
        ended: Callable[[Row], bool],
        mask_after: Callable[[list[int]], IntArray],
        drafted: Mapping[Row, IntArray] | None = None,
    ) -> None:
        """Raise AssertionError unless these are the masks of the newest step. `ended`: of a row's sequence."""
        drafted = drafted or {}
        assert len(self._in_flight) == 1, "masks came while a step that they depend on is in flight"
        step = self._in_flight[0]
        assert step.unsampled, "masks came for a step without masked rows, or twice"
        right = [row for row in step.unsampled if not ended(row)]
        first = masks.of_pass(0).rows.tolist()
        assert first == right, f"rows {right} need masks, {first} have them"
        assert set(drafted) <= set(step.drafts) & set(step.unsampled), f"rows {list(drafted)} draft, unplanned"
        step.num_masks = dict.fromkeys(step.unsampled, 0)
        for number in range(1 + len(masks.passes)):
            for row, bits in zip(masks.of_pass(number).rows.tolist(), masks.of_pass(number).bits, strict=True):
                assert step.num_masks[row] == number, f"row {row} has no mask in a pass before {number}"
                step.num_masks[row] += 1
                ahead = [] if number == 0 else drafted[row].tolist()[:number]
                assert len(ahead) == number, f"row {row} has more masks than positions"
                known = [*self._generated[row], *ahead]
                assert bits.tolist() == mask_after(known).tolist(), f"row {row} has another mask than after {known}"
        step.unsampled = ()

    def absorb(self, result: StepResult) -> dict[Row, _WatchedRead]:
        """The oldest step in flight has a result; what its rows read."""
        step = self._in_flight.popleft()
        assert not step.unsampled, f"rows {step.unsampled} have a result without a mask"
        for row, token in zip(result.rows.tolist(), result.tokens.tolist(), strict=True):
            watched = self._rows.get(Row(row))
            if watched is not None and watched.sequence == step.reads[Row(row)].sequence:
                self._generated[Row(row)].append(token)
        self._verify(step, result)
        return step.reads

    def _verify(self, step: _WatchedStep, result: StepResult) -> None:
        """Rows emit as many tokens as the result says, and no more than the plan allowed."""
        verified = result.verified
        assert verified.rows.tolist() == list(step.drafts), f"drafts of {list(step.drafts)}, verified {verified.rows}"
        num_emitted = Counter(result.rows.tolist())
        for rows, _ in result.each_pass():
            assert len(set(rows.tolist())) == len(rows), f"a row emits twice in a pass: {rows}"
        for row, drafted, accepted in zip(
            step.drafts, verified.drafted.tolist(), verified.accepted.tolist(), strict=True
        ):
            planned = step.drafts[row]
            assert 0 <= accepted <= drafted <= planned, f"row {row}: {accepted} of {drafted} drafts, {planned} planned"
            num_masks = step.num_masks.get(row)
            assert not num_masks or accepted < num_masks, f"row {row}: {1 + accepted} tokens under {num_masks} masks"
            assert num_emitted.pop(row, 1) == 1 + accepted, f"row {row} emits more or less than it accepts"
            watched = self._rows.get(row)
            if watched is not None and watched.sequence == step.reads[row].sequence:
                watched.num_ahead -= planned
                watched.num_tokens += accepted
            for later in self._in_flight:  # they write from where the row is now
                read = later.reads.get(row)
                if read is not None:
                    later.reads[row] = read._replace(
                        span=range(min(read.span.start + accepted, read.span.stop), read.span.stop)
                    )
        assert set(num_emitted.values()) <= {1}, f"a row without drafts emits several tokens: {num_emitted}"

    def check_stages(self, plan: StepPlan) -> None:
        """In a pipeline no row decodes whose last token is still to come."""
        paused = set(plan.pauses)
        for row, watched in self._rows.items():
            if watched.decoding and row not in paused and not plan.reset and row not in plan.releases:
                assert not any(row in step.reads for step in self._in_flight), f"row {row} is in the pipe already"

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def latest(self) -> dict[Row, _WatchedRead]:
        """What the rows of the step launched last read."""
        return self._in_flight[-1].reads

    def lost_copies(self) -> list[Move]:
        """The copies of all steps in flight, in order."""
        return [move for step in self._in_flight for move in step.moves]

    def lost_writes(self) -> list[LostWrite]:
        """What the rows of the steps in flight write, by block."""
        return [
            self.slots_of(each, at)
            for step in self._in_flight
            for each in step.reads.values()
            for at in range(each.first_written, each.stop)
        ]

    def lose_steps(self) -> None:
        """The steps in flight are lost: nothing touches their blocks any more."""
        self._in_flight.clear()

    def slots_of(self, read: _WatchedRead, at: int) -> LostWrite:
        """The slots that a row writes in a step, and those behind them, in a block of its table."""
        start = max(read.span.start - at * self._block_size, 0)
        return LostWrite(Place(Tier.DEVICE, read.table[at]), range(start, self._block_size))

    def forget(self, place: Place) -> None:
        """A copy to this block did not happen."""
        self._writers[place.tier].pop(place.block, None)

    def note_filled(self, held: HeldPrefix) -> None:
        """Another engine has written the room of a hold. No step may touch these blocks."""
        for block in held.room.tolist():
            assert not self._touching(block), f"block {block} is still in flight: another engine writes it"
            self._writers[Tier.DEVICE][block] = held.owner.partition

    def forget_all(self) -> None:
        """The memory of the runner is lost."""
        for writers in self._writers.values():
            writers.clear()

    def audit_partitions(self, kv: KVManager) -> None:
        """Every cached block was written by its partition. Not checked while copies wait for a plan."""
        if kv.tree is None or kv.has_moves:
            return
        for node in kv.tree.nodes():
            for block in node.blocks.tolist():
                writer = self._writers[node.tier].get(block)
                assert writer == node.partition, f"block {block} of {node} was written by partition {writer!r}"

    def _start_row(self, row_start: RowStart) -> None:
        assert row_start.row not in self._rows, f"row {row_start.row} is taken"
        for step in self._in_flight:
            reading = step.reads.get(row_start.row)
            ours = reading is None or reading.sequence == row_start.sequence
            assert ours, f"row {row_start.row} is still in flight"
        self._rows[row_start.row] = _WatchedRow(
            row_start.sequence,
            self._partition_of(row_start.row),
            row_start.sampling.masked,
            len(row_start.tokens),
            len(row_start.tokens),
            row_start.max_length,
        )
        self._generated[row_start.row] = row_start.tokens[row_start.num_prompt :].tolist()

    def _spans(self, plan: StepPlan) -> Iterator[tuple[Row, range]]:
        """The positions that each row computes in this step."""
        drafts = _drafts_by_row(plan)
        forced = {span.row: span.start + len(span.tokens) for span in plan.forced}
        for row, watched in self._rows.items():
            if watched.decoding and row not in plan.pauses:
                drafts_in_step = drafts.pop(row, 0)
                most_forced = forced.get(row, watched.num_tokens + drafts_in_step) - watched.num_tokens
                assert drafts_in_step <= most_forced, (
                    f"row {row}: {drafts_in_step} drafts of {most_forced} forced tokens"
                )
                last = watched.max_length - 2
                most = watched.num_tokens - 1 + watched.num_ahead + drafts_in_step
                assert most <= last or not drafts_in_step, f"row {row} has drafts behind its last position"
                yield row, range(min(watched.num_tokens - 1, last + 1), min(most, last) + 1)
        assert not drafts, f"rows {list(drafts)} have drafts and do not decode"
        for chunk in plan.chunks:
            yield chunk.row, range(chunk.start, chunk.start + chunk.length)

    def _check_moves(self, plan: StepPlan) -> None:
        leased, room = self._held_blocks()
        for move in plan.moves:
            assert move.src.tier is Tier.HOST or move.src.block not in room, f"a move reads {move.src}, held as room"
            if move.dst.tier is Tier.DEVICE:
                block = move.dst.block
                assert block not in leased | room, f"a move writes block {block}, which another engine holds"
                assert not self._holders[block], f"a move writes block {block}, which a live table holds"
                assert not self._touching(block), f"block {block} is still in flight: a move writes it"
            writer = self._writers[move.src.tier].get(move.src.block)
            assert writer is not None, f"a move reads {move.src}, which holds nothing"
            self._writers[move.dst.tier][move.dst.block] = writer

    def _held_blocks(self) -> tuple[set[int], set[int]]:
        """What other engines read, and what they write."""
        holds = self.holds.values()
        leased = {block for held in holds for block in held.cached.tolist()}
        return leased, {block for held in holds for block in held.room.tolist()}

    def _grant(self, plan: StepPlan, spans: dict[Row, range]) -> None:
        leased, room = self._held_blocks()
        for number, granted in zip(plan.grants.rows.tolist(), plan.grants.blocks.tolist(), strict=True):
            row, block = Row(number), BlockId(granted)
            watched = self._rows[row]
            watched.table.append(block)
            self._holders[block] += 1
            assert block not in room, f"block {block} is granted, and another engine fills it"
            writes = row in spans and len(watched.table) * self._block_size > spans[row].start
            assert not writes or block not in leased, f"row {row} writes block {block}, which another engine reads"
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
            for each in step.reads.values()
            if block in each.table[each.first_written if writing else 0 : each.stop]
        }

    def _sampling(self, plan: StepPlan, spans: dict[Row, range]) -> set[Row]:
        """The rows that sample a token in this step."""
        chunked = {chunk.row: ChunkOutput.SAMPLE in chunk.output for chunk in plan.chunks}
        return {row for row in spans if chunked.get(row, True)}

    def _check_masked(self, plan: StepPlan, sampling: set[Row]) -> None:
        masked = {row for row in sampling if self._rows[row].masked}
        assert set(plan.masked) == masked, f"rows {masked} sample under a grammar, the plan masks {plan.masked}"
        assert len(set(plan.masked)) == len(plan.masked), plan.masked

    def _reading(self, row: Row, span: range, *, samples: bool) -> _WatchedRead:
        """What a row reads in a step. No other table may hold a block that it writes, and all that it reads was
        written by its partition."""
        watched, size, writers = self._rows[row], self._block_size, self._writers[Tier.DEVICE]
        table = watched.table
        first, stop = span.start // size, -(-span.stop // size)
        assert stop <= len(table), f"row {row} writes position {span.stop - 1} beyond its {len(table)} blocks"
        for block in table[first:stop]:
            assert self._holders[block] == 1, f"row {row} writes block {block}, which {self._holders[block]} hold"
        num_read = -(-span.start // size)
        for block in table[:num_read]:
            assert writers.get(block) == watched.partition, (
                f"row {row} of partition {watched.partition!r} reads block {block} of {writers.get(block)!r}"
            )
        for block in table[num_read:stop]:
            writers[block] = watched.partition
        return _WatchedRead(watched.sequence, table, first, stop, span, samples)

    def _advance(self, sampling: set[Row], drafts: Mapping[Row, int]) -> None:
        """Rows that sampled have at least one token more, and decode until their length limit."""
        for row in sampling:
            watched = self._rows[row]
            watched.num_tokens += 1
            watched.num_least += 1
            watched.num_ahead += drafts.get(row, 0)
            watched.decoding = watched.num_least < watched.max_length


def _drafts_by_row(plan: StepPlan) -> dict[Row, int]:
    by_row = {Row(row): n for row, n in zip(plan.drafts.rows.tolist(), plan.drafts.counts.tolist(), strict=True)}
    assert len(by_row) == len(plan.drafts) and 0 not in by_row.values(), plan.drafts
    return by_row


_PRICES = ServiceCost()


@dataclass(slots=True)
class _CountedRow:
    sequence: SequenceId
    max_length: int
    num_positions: int = 0
    decoding: bool = False


class CounterCheck:
    """Follows one scheduler: `begin` before a turn, `launch` with its plan, `absorb` with its output, `end` after."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._rows: dict[Row, _CountedRow] = {}
        self._num_before: dict[SequenceId, int] = {}  # positions of released or just forked sequences
        self._running: set[RequestId] = set()
        self._num_preemptions: dict[RequestId, int] = {}
        self._admitted: set[RequestId] = set()
        self._forked: set[SequenceId] = set()  # counted, and not planned yet
        self.cached_tokens = 0
        self.recomputed_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.accepted_at = [0] * MAX_DRAFTS  # by the number of the draft
        self.forks = 0
        self.class_preemptions = 0
        self.share_preemptions = 0
        self.service: defaultdict[str, float] = defaultdict(float)  # by tenant, beam searches aside
        self.service_of_beams = False

    def begin(self) -> None:
        self._running = {group.request.id for group in self._scheduler.running_groups()}

    def launch(self, plan: StepPlan, reads: Mapping[Row, _WatchedRead]) -> None:
        """A chunk recomputes the positions that its sequence had before its row was released."""
        self._forked.clear()
        self._count_cached(plan)
        self._charge(plan, reads)
        for row in list(self._rows) if plan.reset else plan.releases:
            left = self._rows.pop(row)
            self._num_before[left.sequence] = max(self._num_before.get(left.sequence, 0), left.num_positions)
        for row_start in plan.starts:
            self._rows[row_start.row] = _CountedRow(row_start.sequence, row_start.max_length)
        for row, watched in self._rows.items():
            if watched.decoding and row not in plan.pauses:
                self._gain(row, watched, 1)
        for chunk in plan.chunks:
            watched, stop = self._rows[chunk.row], chunk.start + chunk.length
            self.recomputed_tokens += max(min(stop, self._num_before.get(watched.sequence, 0)) - chunk.start, 0)
            watched.num_positions = stop
            watched.decoding = ChunkOutput.SAMPLE in chunk.output

    def _count_cached(self, plan: StepPlan) -> None:
        """A request computes from the end of its cached prefix when it is first admitted."""
        starts = {chunk.row: chunk.start for chunk in reversed(plan.chunks)}
        for sequence in self._scheduler.row_sequences(row_start.row for row_start in plan.starts):
            request = sequence.request
            if request.id not in self._admitted:
                assert sequence.row is not None, sequence
                self._admitted.add(request.id)
                self.cached_tokens += min(starts[sequence.row], len(request.prompt))

    def _charge(self, plan: StepPlan, reads: Mapping[Row, _WatchedRead]) -> None:
        """Each tenant pays for the tokens that its chunks compute and sample, and for their blocks in each step."""
        lengths = {chunk.row: chunk.length for chunk in plan.chunks}
        for (row, length), sequence in zip(lengths.items(), self._scheduler.row_sequences(lengths), strict=True):
            cost = length * _PRICES.prefill + reads[row].samples * _PRICES.decode
            self.service[sequence.request.tenant] += cost + len(reads[row].table) * _PRICES.block_step
            self.service_of_beams |= sequence.request.beam is not None

    def _gain(self, row: Row, watched: _CountedRow, number: int) -> None:
        """A decoding row is further by this many positions. Its tenant pays for each, and for the blocks up to it."""
        stop = min(watched.num_positions + number, watched.max_length - 1)
        (sequence,) = self._scheduler.row_sequences([row])
        for position in range(watched.num_positions, stop):
            num_blocks = position // self._scheduler.kv.block_size + 1
            self.service[sequence.request.tenant] += _PRICES.decode + num_blocks * _PRICES.block_step
        watched.num_positions = max(stop, watched.num_positions)

    def verify(self, verified: Verified) -> None:
        """A step is about to be absorbed in which rows gained tokens. What ended before is not charged for them."""
        self.drafted_tokens += int(verified.drafted.sum())
        self.accepted_tokens += int(verified.accepted.sum())
        for number, accepted in zip(verified.rows.tolist(), verified.accepted.tolist(), strict=True):
            for place in range(accepted):
                self.accepted_at[place] += 1
            sequence = self._scheduler.row_sequence(Row(number))
            if accepted and sequence is not None and sequence.state is SequenceState.RUNNING:
                self._gain(Row(number), self._rows[Row(number)], accepted)

    def absorb(self) -> None:
        """A step was absorbed: sequences that wait for their first plan were forked. Another may be absorbed before
        that plan, or be lost in the same turn."""
        forked = [each for each in self._scheduler.forked_sequences() if each.id not in self._forked]
        self._forked |= {each.id for each in forked}
        self.forks += len(forked)
        for sequence in forked:
            self._num_before[sequence.id] = max(self._num_before.get(sequence.id, 0), sequence.num_computed)

    def end(self, groups: list[RequestGroup], num_preemptions: int) -> None:
        """A preemption for a request that did not run took a row, of a lower class or of another tenant of its class;
        one for a running request took blocks."""
        if num_preemptions == sum(self._num_preemptions.values()):
            return
        priorities = {group.request.id: group.request.priority for group in groups}
        for group in groups:
            if group.num_preemptions > self._num_preemptions.get(group.request.id, 0):
                self._num_preemptions[group.request.id] = group.num_preemptions
                causes = [e.other for e in group.events if e.what is EventKind.PREEMPTED and e.other is not None]
                if causes[-1] not in self._running:
                    is_lower = group.request.priority > priorities[causes[-1]]
                    self.class_preemptions += is_lower
                    self.share_preemptions += not is_lower


@runtime_checkable
class Readable(Protocol):
    """A runner whose slots can be read and lost."""

    def read(self, tier: Tier, blocks: Iterable[int]) -> list[tuple[int, int]]:
        """(token, position) for each slot."""

    def erase(self, place: Place, slots: range) -> None:
        """Nothing is known of what these slots hold from now on."""

    def carry(self, moves: Iterable[Move]) -> None:
        """Copy blocks, as a launch does before anything else."""


def audit_contents(kv: KVManager, runner: Runner) -> None:
    """Every cached block holds its tokens at their positions. Not checked while copies wait for a plan."""
    if kv.tree is None or kv.has_moves or not isinstance(runner, Readable):
        return
    for node in kv.tree.nodes():
        tokens, stop = node.token_ids(), node.num_path_tokens
        held = runner.read(node.tier, node.blocks.tolist())[: len(tokens)]
        right = list(zip(tokens, range(stop - len(tokens), stop), strict=True))
        assert held == right, f"{node} holds {held}"

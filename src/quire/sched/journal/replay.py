"""Replays a journal: repeats every decision and compares. Needs no model: the journal holds the step results."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from quire.core.codec import RecordDecoder, UnreadableRecord
from quire.core.errors import BrokenJournal
from quire.core.ids import IndexArray, IntArray, Row, SequenceId
from quire.core.request import Sequence
from quire.core.step import StepPlan, StepResult, Verified
from quire.sched.journal.recorder import ExpectedEmitters, checksum, summarise
from quire.sched.journal.records import (
    MAGIC,
    VERSION,
    AbortRecord,
    AbsorbRecord,
    ArrivalRecord,
    ConcludeRecord,
    ControlRecord,
    EndOfJournal,
    ExpectRecord,
    FailRecord,
    HoldRecord,
    LookupHitsRecord,
    PlanRecord,
    PlanSummary,
    Record,
    RecordKind,
    RecordReader,
    ReleaseRecord,
    RestrictRecord,
    StopRecord,
    SwapDecisionsRecord,
    TokensRecord,
)
from quire.sched.lookup_hits import LookupHits
from quire.sched.policy import SchedulerSpec, read_spec
from quire.sched.scheduler import Scheduler


class Condition(Enum):
    """How complete a journal is."""

    COMPLETE = "complete"  # closed, and the checksum matches
    CUT_OFF = "cut off"  # ends without a closing record: the writer may have crashed
    DAMAGED = "damaged"  # bytes were modified


class Difference(NamedTuple):
    """The first decision that differs."""

    step: int
    recorded: str
    replayed: str


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The result of a replay. It stops at the first difference: later ones follow from it."""

    steps: int  # replayed
    difference: Difference | None
    condition: Condition
    num_bytes: int
    step_bytes: int  # of them, plan and absorb records

    @property
    def bytes_per_step(self) -> float:
        return self.step_bytes / max(self.steps, 1)


class JournalContents(NamedTuple):
    """A decoded journal."""

    path: Path
    num_bytes: int
    spec: SchedulerSpec
    records: tuple[Record, ...]
    emitted: dict[tuple[Row, int], IntArray]  # by row, and the step in which it was assigned
    decisions: tuple[bool, ...]
    lookup_hits: tuple[IntArray, ...]
    condition: Condition
    step_bytes: int

    @property
    def num_absorbed(self) -> int:
        return sum(isinstance(record, AbsorbRecord) for record in self.records)


def replay(path: Path) -> ReplayReport:
    """Raises `BrokenJournal` for a file that is not a journal."""
    contents = read_journal(path)
    replayer = Replayer(contents)
    while replayer.advance():
        pass
    return ReplayReport(
        replayer.num_planned, replayer.difference, contents.condition, contents.num_bytes, contents.step_bytes
    )


def read_journal(path: Path) -> JournalContents:
    """Read a journal up to the first record that is missing or unreadable. Raises `BrokenJournal`."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:  # before the rest, which may have no end
            raise BrokenJournal(f"{path} is not a quire journal; `quire serve --record FILE` writes one.")
        data = MAGIC + file.read()
    decoder = RecordDecoder(data)
    decoder.raw(len(MAGIC))
    try:
        version = decoder.raw(1)[0]
        if version != VERSION:
            raise BrokenJournal(f"{path} is a journal of version {version}; this quire reads version {VERSION}.")
        spec = read_spec(decoder.text())
    except (UnreadableRecord, KeyError, TypeError, ValueError) as broken:
        raise BrokenJournal(f"{path} begins like a journal, but its settings cannot be read: {broken}.") from broken
    reader = RecordReader(decoder)
    records: list[Record] = []
    emitted: dict[tuple[Row, int], IntArray] = {}
    decisions: list[bool] = []
    hits: list[IntArray] = []
    condition, step_bytes = Condition.CUT_OFF, 0
    while not decoder.at_end:
        start = decoder.position
        try:
            record = reader.read()
        except UnreadableRecord as broken:
            condition = Condition.CUT_OFF if broken.at_end else Condition.DAMAGED
            break
        if isinstance(record, TokensRecord):
            emitted[record.row, record.first_step] = record.tokens
        elif isinstance(record, SwapDecisionsRecord):
            decisions += record.decisions
        elif isinstance(record, LookupHitsRecord):
            hits.append(record.rows)
        elif isinstance(record, EndOfJournal):
            whole = record.checksum == crc32(data[:start]) and decoder.position == len(data)
            condition = Condition.COMPLETE if whole else Condition.DAMAGED
            break
        else:
            records.append(record)
            step_bytes += decoder.position - start if isinstance(record, PlanRecord | AbsorbRecord) else 0
    return JournalContents(
        path, len(data), spec, tuple(records), emitted, tuple(decisions), tuple(hits), condition, step_bytes
    )


class JournalHits(LookupHits):
    """The recorded answers, in order."""

    __slots__ = ("_recorded",)

    def __init__(self, recorded: tuple[IntArray, ...]) -> None:
        self._recorded = iter(recorded)

    def start(self, row: Row, tokens: IntArray, continuation: IntArray) -> None:
        """Nothing is looked up."""

    def note(self, rows: IndexArray, tokens: IntArray) -> NDArray[np.bool_]:
        hits: NDArray[np.bool_] = np.isin(rows, next(self._recorded, ()))
        return hits

    def note_one(self, row: Row, token: int) -> bool:
        """The same."""
        return row in next(self._recorded, ())


class Replayer:
    """A new scheduler, given the recorded calls and step results, one step after another."""

    def __init__(self, contents: JournalContents) -> None:
        spec = contents.spec
        decisions = iter(contents.decisions)
        try:
            self.scheduler = Scheduler(
                spec.kv(lambda start, stop: next(decisions, True)),
                max_rows=spec.max_rows,
                max_step_tokens=spec.max_step_tokens,
                policy=spec.policy,
                cost=spec.cost(),
            )
        except (AssertionError, TypeError, ValueError) as broken:
            raise BrokenJournal(
                f"{contents.path} has a valid header, but its settings are invalid: {broken}."
            ) from broken
        self.scheduler.replace_lookup_hits(JournalHits(contents.lookup_hits))
        self._records = iter(contents.records)
        self._emitted = contents.emitted
        self._expected = ExpectedEmitters(spec.max_rows)
        self._drafting: deque[IntArray] = deque()  # rows with drafts of the steps in flight
        self._tokens: dict[int, Iterator[int]] = {}  # still to be emitted, by row
        self._sequences: dict[SequenceId, Sequence] = {}
        self.num_planned = 0
        self.difference: Difference | None = None
        self.now_s = 0.0  # of the last step
        self.started_s = 0.0  # when it was planned, or the one before it was absorbed
        self._planned_s: deque[float] = deque()  # when the steps in flight were planned

    def advance(self) -> bool:
        """Repeat the calls up to the next absorbed step. False: none is left, or a decision differs."""
        while self.difference is None and (record := next(self._records, None)) is not None:
            try:
                self.difference = self._apply(record)
            except Exception as broken:  # a modified record may be an impossible call
                error = f"{type(broken).__name__}: {broken}"
                self.difference = Difference(self.num_planned, type(record).__name__, error)
            if isinstance(record, AbsorbRecord) and self.difference is None:
                return True
        return False

    def _apply(self, record: Record) -> Difference | None:
        scheduler = self.scheduler
        if isinstance(record, PlanRecord):
            return self._plan(record)
        if isinstance(record, AbsorbRecord):
            scheduler.absorb(self._result(record), record.now_s)
            begun_s = max(self.now_s, self._planned_s.popleft())
            self.started_s, self.now_s = min(begun_s, record.now_s), record.now_s  # the clock may have been set
        elif isinstance(record, ArrivalRecord):
            sequences = scheduler.add(record.request, record.now_s)
            self._sequences.update((sequence.id, sequence) for sequence in sequences)
        elif isinstance(record, AbortRecord):
            scheduler.abort(record.request)
        elif isinstance(record, StopRecord):
            scheduler.finish(self._sequences[record.sequence], record.reason)
        elif isinstance(record, ConcludeRecord):
            scheduler.conclude(self._sequences[record.sequence], record.reason)
        elif isinstance(record, ExpectRecord):
            tokens = np.zeros(record.num_tokens, dtype=np.int32)
            scheduler.expect(self._sequences[record.sequence], record.start, tokens)
        elif isinstance(record, FailRecord):
            group = scheduler.group(record.request)
            assert group is not None, record
            scheduler.fail(group)
        elif isinstance(record, RestrictRecord):
            scheduler.admit_only(record.orders)
        elif isinstance(record, HoldRecord):
            scheduler.hold_prefix(record.owner, record.tokens, with_room=record.with_room)
        elif isinstance(record, ReleaseRecord):
            scheduler.release_prefix(record.number, written=record.written)
        elif isinstance(record, ControlRecord):
            self._apply_control(record)
        return None

    def _apply_control(self, record: ControlRecord) -> None:
        scheduler = self.scheduler
        if record.kind is RecordKind.DRAINED:
            scheduler.drain()
        elif record.kind is RecordKind.CACHE_RESET:
            scheduler.reset_cache()
        elif record.kind is RecordKind.SHRUNK:
            scheduler.shrink(record.number)
        elif record.kind is RecordKind.STEPS_LOST:
            self._expected.lose()
            self._drafting.clear()
            self._planned_s.clear()
            scheduler.lose_steps(keep_cache=bool(record.number))
        elif record.kind is RecordKind.WITHDRAWN:
            scheduler.withdraw_all()
        else:
            assert record.kind is RecordKind.LARGEST_FAILED, record
            scheduler.fail_largest()

    def _plan(self, recorded: PlanRecord) -> Difference | None:
        plan = self.scheduler.plan(recorded.now_s)
        version = self.scheduler.cost.version
        same = (None if plan is None else checksum(plan)) == (None if recorded.summary is None else recorded.checksum)
        if not same or version != recorded.cost_version:
            replayed = _described(None if plan is None else summarise(plan), version)
            return Difference(self.num_planned, _described(recorded.summary, recorded.cost_version), replayed)
        if plan is not None:
            self._expected.launch(plan)
            self._drafting.append(plan.drafts.rows)
            self._planned_s.append(recorded.now_s)
            self._queue_tokens(plan)
            self.num_planned += 1
        return None

    def _queue_tokens(self, plan: StepPlan) -> None:
        for row_start in plan.starts:
            tokens = self._emitted.get((row_start.row, plan.step))
            self._tokens[row_start.row] = iter(()) if tokens is None else iter(tokens.tolist())

    def _result(self, record: AbsorbRecord) -> StepResult:
        """The recorded step result. Rows still assigned when the journal ended emit zeros: no request read them."""
        emitting = self._expected.absorb(record.ended)
        emitting[record.unexpected] ^= True
        drafting = self._drafting.popleft()
        further = [drafting[record.accepted > number] for number in range(record.accepted.max(initial=0))]
        passes = [np.flatnonzero(emitting).astype(np.int32), *further]
        rows = np.concatenate(passes)
        tokens = np.array([next(self._tokens[row], 0) for row in rows.tolist()], dtype=np.int32)
        step = self.scheduler.last_absorbed + 1
        starts = np.cumsum([len(each) for each in passes[:-1]]).tolist()
        verified = Verified(drafting, record.drafted, record.accepted)
        return StepResult(
            step,
            rows,
            tokens,
            record.ended,
            candidates=record.candidates,
            passes=tuple(starts),
            verified=verified,
        )


def _described(summary: PlanSummary | None, cost_version: int) -> str:
    if summary is None:
        return f"no plan (cost version {cost_version})"
    words = ", ".join(f"{name.removeprefix('num_')} {number}" for name, number in summary._asdict().items() if number)
    return f"{words} (cost version {cost_version})"

"""Makes every decision of a journal again and compares. Needs no model: what steps gave is in the journal."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np

from quire.core.errors import BrokenJournal
from quire.core.ids import IntArray, Row, SequenceId
from quire.core.request import Sequence
from quire.core.step import StepPlan, StepResult
from quire.sched.journal.codec import RecordDecoder, UnreadableRecord
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
    FailRecord,
    PlanRecord,
    PlanSummary,
    Record,
    RecordKind,
    RecordReader,
    RestrictRecord,
    StopRecord,
    SwapDecisionsRecord,
    TokensRecord,
)
from quire.sched.policy import SchedulerSpec, read_blueprint
from quire.sched.scheduler import Scheduler


class Condition(Enum):
    """How whole a journal is."""

    COMPLETE = "complete"  # closed in order, and no byte was changed since
    CUT_OFF = "cut off"  # it just ends: whoever wrote it may have died
    DAMAGED = "damaged"  # bytes were changed


class Difference(NamedTuple):
    """The first decision that came out otherwise."""

    step: int
    recorded: str
    replayed: str


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay found. It ends at the first difference: what comes after follows from it."""

    steps: int  # made again
    difference: Difference | None
    condition: Condition
    num_bytes: int
    step_bytes: int  # of them, the records of the steps

    @property
    def bytes_per_step(self) -> float:
        return self.step_bytes / max(self.steps, 1)


class _Contents(NamedTuple):
    """A whole journal, read."""

    blueprint: SchedulerSpec
    records: tuple[Record, ...]
    spoken: dict[tuple[Row, int], IntArray]  # by row, and the step in which it was taken
    answers: tuple[bool, ...]
    condition: Condition
    step_bytes: int


def replay(path: Path) -> ReplayReport:
    """Raises `BrokenJournal` for a file that is none."""
    data = path.read_bytes()
    contents = _read(path, data)
    try:
        replayer = _Replayer(contents)
    except (AssertionError, TypeError, ValueError) as broken:
        raise BrokenJournal(f"{path} begins like a journal, but no scheduler fits its settings: {broken}.") from broken
    difference = replayer.run(contents.records)
    steps = replayer.num_planned
    return ReplayReport(steps, difference, contents.condition, len(data), contents.step_bytes)


def _read(path: Path, data: bytes) -> _Contents:
    """A journal whose end is missing, or cannot be read, is read as far as it goes."""
    unpacker = RecordDecoder(data)
    if data[: len(MAGIC)] != MAGIC:
        raise BrokenJournal(f"{path} is no journal of quire; `quire check --record FILE` writes one.")
    unpacker.raw(len(MAGIC))
    try:
        version = unpacker.raw(1)[0]
        if version != VERSION:
            raise BrokenJournal(f"{path} is a journal of version {version}; this quire reads version {VERSION}.")
        blueprint = read_blueprint(unpacker.text())
    except (UnreadableRecord, KeyError, TypeError, ValueError) as broken:
        raise BrokenJournal(f"{path} begins like a journal, but its settings cannot be read: {broken}.") from broken
    reader = RecordReader(unpacker)
    records: list[Record] = []
    spoken: dict[tuple[Row, int], IntArray] = {}
    answers: list[bool] = []
    condition, step_bytes = Condition.CUT_OFF, 0
    while not unpacker.at_end:
        start = unpacker.position
        try:
            record = reader.read()
        except UnreadableRecord as broken:
            condition = Condition.CUT_OFF if broken.at_end else Condition.DAMAGED
            break
        if isinstance(record, TokensRecord):
            spoken[record.row, record.first_step] = record.tokens
        elif isinstance(record, SwapDecisionsRecord):
            answers += record.answers
        elif isinstance(record, EndOfJournal):
            whole = record.checksum == crc32(data[:start]) and unpacker.position == len(data)
            condition = Condition.COMPLETE if whole else Condition.DAMAGED
            break
        else:
            records.append(record)
            step_bytes += unpacker.position - start if isinstance(record, PlanRecord | AbsorbRecord) else 0
    return _Contents(blueprint, tuple(records), spoken, tuple(answers), condition, step_bytes)


class _Replayer:
    """A scheduler built anew, and whoever spoke to the old one."""

    def __init__(self, contents: _Contents) -> None:
        blueprint = contents.blueprint
        answers = iter(contents.answers)
        self._scheduler = Scheduler(
            blueprint.kv(lambda start, stop: next(answers, True)),
            max_rows=blueprint.max_rows,
            max_step_tokens=blueprint.max_step_tokens,
            policy=blueprint.policy,
            cost=blueprint.cost(),
        )
        self._spoken = contents.spoken
        self._speakers = ExpectedEmitters(blueprint.max_rows)
        self._tokens: dict[int, Iterator[int]] = {}  # that each row has still to emit
        self._sequences: dict[SequenceId, Sequence] = {}
        self.num_planned = 0

    def run(self, records: tuple[Record, ...]) -> Difference | None:
        for record in records:
            try:
                difference = self._follow(record)
            except Exception as broken:  # a record that was changed may ask for the impossible
                said = f"{type(broken).__name__}: {broken}"
                return Difference(self.num_planned, type(record).__name__, said)
            if difference is not None:
                return difference
        return None

    def _follow(self, record: Record) -> Difference | None:
        scheduler = self._scheduler
        if isinstance(record, PlanRecord):
            return self._plan(record)
        if isinstance(record, AbsorbRecord):
            scheduler.absorb(self._result(record), record.now_s)
        elif isinstance(record, ArrivalRecord):
            sequences = scheduler.add(record.request, record.now_s)
            self._sequences.update((sequence.id, sequence) for sequence in sequences)
        elif isinstance(record, AbortRecord):
            scheduler.abort(record.request)
        elif isinstance(record, StopRecord):
            scheduler.finish(self._sequences[record.sequence], record.reason)
        elif isinstance(record, ConcludeRecord):
            scheduler.conclude(self._sequences[record.sequence], record.reason)
        elif isinstance(record, FailRecord):
            group = scheduler.group(record.request)
            assert group is not None, record
            scheduler.fail(group)
        elif isinstance(record, RestrictRecord):
            scheduler.admit_only(record.orders)
        elif isinstance(record, ControlRecord):
            self._obey(record)
        return None

    def _obey(self, order: ControlRecord) -> None:
        scheduler = self._scheduler
        if order.kind is RecordKind.DRAINED:
            scheduler.drain()
        elif order.kind is RecordKind.CACHE_RESET:
            scheduler.reset_cache()
        elif order.kind is RecordKind.SHRUNK:
            scheduler.shrink(order.number)
        elif order.kind is RecordKind.STEPS_LOST:
            self._speakers.lose()
            scheduler.lose_steps(keep_cache=bool(order.number))
        elif order.kind is RecordKind.WITHDRAWN:
            scheduler.withdraw_all()
        else:
            assert order.kind is RecordKind.LARGEST_FAILED, order
            scheduler.fail_largest()

    def _plan(self, recorded: PlanRecord) -> Difference | None:
        plan = self._scheduler.plan(recorded.now_s)
        version = self._scheduler.cost.version
        same = (None if plan is None else checksum(plan)) == (None if recorded.summary is None else recorded.checksum)
        if not same or version != recorded.cost_version:
            replayed = _described(None if plan is None else summarise(plan), version)
            return Difference(self.num_planned, _described(recorded.summary, recorded.cost_version), replayed)
        if plan is not None:
            self._speakers.launch(plan)
            self._hand_out(plan)
            self.num_planned += 1
        return None

    def _hand_out(self, plan: StepPlan) -> None:
        for row_start in plan.starts:
            tokens = self._spoken.get((row_start.row, plan.step))
            self._tokens[row_start.row] = iter(()) if tokens is None else iter(tokens.tolist())

    def _result(self, record: AbsorbRecord) -> StepResult:
        """Whoever was still seated when the journal broke off emits zeros: nobody can have read them."""
        speaking = self._speakers.absorb(record.ended)
        speaking[record.surprising] ^= True
        rows = np.flatnonzero(speaking).astype(np.int32)
        tokens = np.array([next(self._tokens[row], 0) for row in rows.tolist()], dtype=np.int32)
        step = self._scheduler.last_absorbed + 1
        return StepResult(step, rows, tokens, record.ended, candidates=record.candidates)


def _described(summary: PlanSummary | None, cost_version: int) -> str:
    if summary is None:
        return f"no plan (cost version {cost_version})"
    words = ", ".join(f"{name.removeprefix('num_')} {number}" for name, number in summary._asdict().items() if number)
    return f"{words} (cost version {cost_version})"

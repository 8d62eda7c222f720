"""Records every call of a scheduler in a journal, so that a replay can repeat its decisions.

A step costs tens of bytes (`sched/journal/records.py`). `Scheduler` does not depend on it: a `JournaledScheduler` is
used in its place. `ExpectedEmitters` follows the plans, so that the rows that emit in each step need not be written.
A replay starts with an empty scheduler, so a journal has one beginning: it is not rotated but ends at its limit, or
where the disk is full, and the scheduler goes on without it.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from quire.core.codec import RecordEncoder
from quire.core.errors import ConfigError
from quire.core.ids import IndexArray, IntArray, RequestId, Row
from quire.core.moves import Tier
from quire.core.request import BlockOwner, Request, RequestGroup, Sequence
from quire.core.step import ChunkOutput, FinishedRow, FinishReason, StepPlan, StepResult
from quire.core.step_output import StepOutput
from quire.kv.prefix_holds import HeldPrefix
from quire.sched.cost_model import CostTable
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
    ReleaseRecord,
    RestrictRecord,
    StopRecord,
    SwapDecisionsRecord,
    TokensRecord,
)
from quire.sched.lookup_hits import LookupHits
from quire.sched.policy import SchedulerSpec
from quire.sched.rows import TokenLog
from quire.sched.scheduler import Scheduler

MAX_JOURNAL_BYTES = 256 << 20  # of a server: 67 million tokens of a large vocabulary
MAX_JOURNALS = 8  # of one name: an engine that is started again and again does not fill the disk

_log = logging.getLogger(__name__)


class JournalFile(NamedTuple):
    """An empty file of one's own."""

    path: Path
    file: BinaryIO


def create_journal(path: Path) -> JournalFile:
    """Create `path`, or `path.1`, `path.2` … where there is one already: neither an earlier run nor the engine that
    died is overwritten. Only its owner may read it."""
    for number in range(MAX_JOURNALS):
        name = path if number == 0 else path.with_name(f"{path.name}.{number}")
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"The journal {name} cannot be written: {error.strerror}.", param="record") from error
        return JournalFile(name, os.fdopen(descriptor, "wb"))
    raise ConfigError(
        f"There are {MAX_JOURNALS} journals already, {path.name} to {path.name}.{MAX_JOURNALS - 1}; move them away, or "
        f"choose another name.",
        param="record",
    )


class ExpectedEmitters:
    """The decoding rows, and those of each step in flight. A row in flight is not reassigned: invariant (a)."""

    __slots__ = ("_decoding", "_in_flight")

    def __init__(self, max_rows: int) -> None:
        self._decoding: NDArray[np.bool_] = np.zeros(max_rows, dtype=bool)
        self._in_flight: deque[NDArray[np.bool_]] = deque()

    def launch(self, plan: StepPlan) -> None:
        decoding = self._decoding
        if plan.reset:
            decoding[:] = False
        decoding[list(plan.releases)] = False
        sampled = [chunk.row for chunk in plan.chunks if ChunkOutput.SAMPLE in chunk.output]
        decoding[sampled] = True
        emitting = decoding.copy()
        emitting[list(plan.pauses)] = False
        self._in_flight.append(emitting)

    def absorb(self, ended: Iterable[FinishedRow]) -> NDArray[np.bool_]:
        """By row, whether it should emit in the oldest step in flight, in which these rows ended."""
        emitting = self._in_flight.popleft()
        for row, reason in ended:
            emitting[row] &= reason is not FinishReason.ERROR
            for later in (self._decoding, *self._in_flight):
                later[row] = False
        return emitting

    def lose(self) -> None:
        """The steps in flight are lost."""
        self._in_flight.clear()


_TIERS = tuple(Tier)


def summarise(plan: StepPlan) -> PlanSummary:
    return PlanSummary(
        step=plan.step,
        num_decoding=plan.num_decoding,
        num_chunk_tokens=sum(chunk.length for chunk in plan.chunks),
        num_moves=len(plan.moves),
        num_releases=len(plan.releases),
        num_starts=len(plan.starts),
        num_appends=len(plan.appends),
        num_grants=len(plan.grants),
        num_chunks=len(plan.chunks),
        num_pauses=len(plan.pauses),
        num_drafts=len(plan.drafts),
    )


def checksum(plan: StepPlan) -> int:
    """A checksum of a plan; the counts separate its parts."""
    numbers: list[int] = [*summarise(plan), plan.num_padding, plan.reset]
    for move in plan.moves:
        for place in (move.src, move.dst):
            numbers += (_TIERS.index(place.tier), place.block)
    numbers += plan.releases
    for row_start in plan.starts:
        numbers += (row_start.row, row_start.sequence, row_start.branch, row_start.num_prompt, row_start.max_length)
        numbers += (len(row_start.tokens), crc32(row_start.tokens.astype("<i4").tobytes()))
    for append in plan.appends:
        numbers += (append.row, len(append.tokens), *append.tokens)
    for chunk in plan.chunks:
        numbers += (chunk.row, chunk.start, chunk.length, chunk.output.value)
    numbers += (*plan.pauses, len(plan.masked), *plan.masked, *plan.drafts.rows.tolist(), *plan.drafts.counts.tolist())
    start = crc32(np.array(numbers, dtype="<i8").tobytes())
    return crc32(plan.grants.blocks.astype("<i4").tobytes(), crc32(plan.grants.rows.astype("<i4").tobytes(), start))


class _StartedRow(NamedTuple):
    """The step in which a row was started, and the line of the log from which on its tokens are in it."""

    step: int
    line: int


class _ReleasedRow(NamedTuple):
    """A released row: what it emits up to `last_step` still belongs to its last sequence."""

    row: Row
    started: _StartedRow
    last_step: int


class Journal:
    """A file of records. The tokens of a row are written together when it is released. After its end it takes no more,
    and costs a comparison for each call."""

    def __init__(self, file: BinaryIO, spec: SchedulerSpec, max_bytes: int | None = None) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._ended = False
        self.error: OSError | None = None  # what ended it early
        self._checksum = 0
        self._expected = ExpectedEmitters(spec.max_rows)
        self._tokens = TokenLog(spec.max_rows)
        self._started: dict[Row, _StartedRow] = {}  # by row
        self._released: deque[_ReleasedRow] = deque()
        self._last_planned = -1
        self._last_absorbed = -1
        self._decisions: list[bool] = []
        header = RecordEncoder()
        header.data += MAGIC + bytes((VERSION,))
        header.text(spec.to_json())
        self._write(header)

    def record_decisions(self, function: Callable[[int, int], bool]) -> Callable[[int, int], bool]:
        """The same function; its results are recorded."""

        def recorded(start: int, stop: int) -> bool:
            decision = bool(function(start, stop))
            if not self._ended:
                self._decisions.append(decision)
            return decision

        return recorded

    def note(self, record: Record) -> None:
        if self._ended:
            return
        self._write_decisions()
        encoder = RecordEncoder()
        record.pack(encoder)
        self._write(encoder)

    def planned(self, now_s: float, cost_version: int, plan: StepPlan | None) -> None:
        if self._max_bytes is not None and self._num_bytes >= self._max_bytes and not self._ended:
            _log.warning(
                "the journal has its %d bytes: it ends here, after step %d", self._max_bytes, self._last_absorbed
            )
            self.close()
        if self._ended:
            return
        if plan is None:
            self.note(PlanRecord(now_s, cost_version, 0, None))
            return
        for row in plan.releases:
            self._released.append(_ReleasedRow(row, self._started.pop(row), plan.step - 1))
        self._write_tokens()  # before the plan, which may have matched these tokens in the cache
        self.note(PlanRecord(now_s, cost_version, checksum(plan), summarise(plan)))
        self._expected.launch(plan)
        self._last_planned = plan.step
        for row_start in plan.starts:
            self._started[row_start.row] = _StartedRow(plan.step, self._tokens.next_line)

    def absorbed(self, now_s: float, result: StepResult) -> None:
        if self._ended:
            return
        differing = self._expected.absorb(result.ended)
        emitting, _ = next(result.each_pass())
        differing[emitting] ^= True
        unexpected = np.flatnonzero(differing).astype(np.int32)
        verified = result.verified
        self.note(AbsorbRecord(now_s, result.ended, unexpected, result.candidates, verified.drafted, verified.accepted))
        for rows, tokens in result.each_pass():
            if self._tokens.full:
                starts = (*self._started.values(), *(left.started for left in self._released))
                self._tokens.add_page(min([start.line for start in starts], default=self._tokens.next_line))
            self._tokens.append(rows, tokens)
        self._last_absorbed = result.step
        self._write_tokens()
        self._flush()

    def lost(self, *, keep_cache: bool) -> None:
        """The steps in flight are lost, and every row is free."""
        if self._ended:
            return
        self.note(ControlRecord(RecordKind.STEPS_LOST, keep_cache))
        self._expected.lose()
        self._release_all()
        self._last_absorbed = self._last_planned

    def close(self) -> None:
        """End the journal. Steps in flight are missing in it. Idempotent."""
        if self._ended:
            return
        self._release_all()
        self._write_decisions()
        self.note(EndOfJournal(self._checksum))
        self._flush()
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._decisions.clear()
        with suppress(OSError):  # what is left of a full disk's buffer
            self._file.close()

    def _release_all(self) -> None:
        self._released.extend(_ReleasedRow(row, start, self._last_absorbed) for row, start in self._started.items())
        self._started.clear()
        self._write_tokens(whole=True)

    def _write_tokens(self, *, whole: bool = False) -> None:
        while self._released and (whole or self._released[0].last_step <= self._last_absorbed):
            row, started, _ = self._released.popleft()
            tokens = self._tokens.gather(row, started.line)
            if len(tokens):
                self.note(TokensRecord(row, started.step, tokens))

    def _write_decisions(self) -> None:
        if self._decisions:
            encoder = RecordEncoder()
            SwapDecisionsRecord(tuple(self._decisions)).pack(encoder)
            self._decisions.clear()
            self._write(encoder)

    def _write(self, encoder: RecordEncoder) -> None:
        """A full disk ends the journal, not the engine."""
        if self._ended:
            return
        try:
            self._file.write(encoder.data)
        except OSError as error:
            self._fail(error)
        self._num_bytes += len(encoder.data)
        self._checksum = crc32(encoder.data, self._checksum)

    def _flush(self) -> None:
        """A step that was absorbed is in the file, whatever becomes of this process."""
        if self._ended:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        _log.error("the journal cannot be written: %s; it ends after step %d", error.strerror, self._last_absorbed)
        self.error = error
        self._end()


class JournaledHits(LookupHits):
    """Each answer is recorded: a replay of a journal that was cut off does not know all tokens."""

    __slots__ = ("_record",)

    def __init__(self, max_rows: int, record: Callable[[Record], None]) -> None:
        super().__init__(max_rows)
        self._record = record

    def note(self, rows: IndexArray, tokens: IntArray) -> NDArray[np.bool_]:
        hits = super().note(rows, tokens)
        self._record(LookupHitsRecord(rows[hits].astype(np.int32)))
        return hits

    def note_one(self, row: Row, token: int) -> bool:
        hit = super().note_one(row, token)
        self._record(LookupHitsRecord(np.array([row] if hit else [], dtype=np.int32)))
        return hit


class JournaledScheduler(Scheduler):
    """A scheduler whose every call is recorded. Close its journal at the end."""

    def __init__(
        self,
        spec: SchedulerSpec,
        file: BinaryIO,
        worth_keeping: Callable[[int, int], bool] = lambda start, stop: True,
        cost: CostTable | None = None,  # as `spec` describes it, without an observation
        max_bytes: int | None = None,  # of the journal; None: no limit
    ) -> None:
        self.journal = Journal(file, spec, max_bytes)
        super().__init__(
            spec.kv(self.journal.record_decisions(worth_keeping)),
            max_rows=spec.max_rows,
            max_step_tokens=spec.max_step_tokens,
            policy=spec.policy,
            cost=spec.cost() if cost is None else cost,
        )
        self.replace_lookup_hits(JournaledHits(spec.max_rows, self.journal.note))

    def add(self, request: Request, now_s: float = 0.0) -> tuple[Sequence, ...]:
        sequences = super().add(request, now_s)
        self.journal.note(ArrivalRecord(request, now_s))
        return sequences

    def abort(self, request_id: RequestId) -> tuple[Sequence, ...]:
        if self.group(request_id) is not None:
            self.journal.note(AbortRecord(request_id))
        return super().abort(request_id)

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        ended = super().finish(sequence, reason)
        if ended:
            self.journal.note(StopRecord(sequence.id, reason))
        return ended

    def conclude(self, sequence: Sequence, reason: FinishReason) -> None:
        if not sequence.finished:
            self.journal.note(ConcludeRecord(sequence.id, reason))
        super().conclude(sequence, reason)

    def expect(self, sequence: Sequence, start: int, tokens: IntArray) -> None:
        self.journal.note(ExpectRecord(sequence.id, start, len(tokens)))
        super().expect(sequence, start, tokens)

    def fail(self, group: RequestGroup) -> None:
        if not group.finished:
            self.journal.note(FailRecord(group.request.id))
        super().fail(group)

    def drain(self) -> None:
        self.journal.note(ControlRecord(RecordKind.DRAINED))
        super().drain()

    def hold_prefix(self, owner: BlockOwner, tokens: IntArray, *, with_room: bool) -> HeldPrefix | None:
        self.journal.note(HoldRecord(owner, tokens, with_room))
        return super().hold_prefix(owner, tokens, with_room=with_room)

    def release_prefix(self, number: int, *, written: bool) -> None:
        self.journal.note(ReleaseRecord(number, written))
        super().release_prefix(number, written=written)

    def plan(self, now_s: float = 0.0) -> StepPlan | None:
        try:
            plan = super().plan(now_s)
        except BaseException:
            self.journal.planned(now_s, self.cost.version, None)  # a replay fails in the same place
            raise
        self.journal.planned(now_s, self.cost.version, plan)
        return plan

    def absorb(self, result: StepResult, now_s: float = 0.0) -> StepOutput:
        self.journal.absorbed(now_s, result)
        return super().absorb(result, now_s)

    def lose_steps(self, *, keep_cache: bool) -> None:
        self.journal.lost(keep_cache=keep_cache)
        super().lose_steps(keep_cache=keep_cache)

    def withdraw_all(self) -> None:
        self.journal.note(ControlRecord(RecordKind.WITHDRAWN))
        super().withdraw_all()

    def admit_only(self, orders: frozenset[int] | None) -> None:
        self.journal.note(RestrictRecord(orders))
        super().admit_only(orders)

    def fail_largest(self) -> None:
        self.journal.note(ControlRecord(RecordKind.LARGEST_FAILED))
        super().fail_largest()

    def reset_cache(self) -> int:
        self.journal.note(ControlRecord(RecordKind.CACHE_RESET))
        return super().reset_cache()

    def shrink(self, num_blocks: int) -> int:
        self.journal.note(ControlRecord(RecordKind.SHRUNK, num_blocks))
        return super().shrink(num_blocks)

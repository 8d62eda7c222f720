"""A journal holds every call that changes a scheduler: failures, and what is done about them, come back in a replay."""

import inspect
import io
import random
from collections import Counter
from pathlib import Path

import pytest

from quire.core.codec import RecordDecoder, RecordEncoder
from quire.core.ids import RequestId, SequenceId
from quire.core.request import BeamParams, BlockOwner, SequenceState
from quire.core.step import FinishReason
from quire.sched.audit import audit_rest
from quire.sched.journal.recorder import JournaledScheduler
from quire.sched.journal.records import (
    ConcludeRecord,
    ControlRecord,
    ExpectRecord,
    FailRecord,
    Record,
    RecordKind,
    RecordReader,
    ReleaseRecord,
    RestrictRecord,
    StopRecord,
)
from quire.sched.journal.replay import Condition, replay
from quire.sched.loop import Loop
from quire.sched.policy import SchedulerSpec
from quire.sched.scheduler import Scheduler
from tests.sched.test_fault_bisection import Allergic, request_of
from tests.tiers import long_only

# These change nothing that a decision depends on.
QUERIES = {
    "assigned_after", "explain", "forked_sequences", "group", "groups", "is_queued", "row_sequence",
    "row_sequences", "running_rows", "running_sequences",
}  # fmt: skip
# The second hands over sequences that have finished already; the last two are for measurements and for journals.
UNRECORDED = QUERIES | {"running_groups", "overdue", "replace_speculation", "replace_lookup_hits"}


def packed(record: Record) -> bytes:
    encoder = RecordEncoder()
    record.pack(encoder)
    return bytes(encoder.data)


def unpacked(data: bytes) -> Record:
    decoder = RecordDecoder(data)
    record = RecordReader(decoder).read()
    assert decoder.at_end
    return record


def test_every_verb_of_a_scheduler_is_journaled() -> None:
    verbs = {name for name, _ in inspect.getmembers(Scheduler, inspect.isfunction) if not name.startswith("_")}
    assert verbs - UNRECORDED == {name for name in vars(JournaledScheduler) if not name.startswith("_")}


class Counted(JournaledScheduler):
    """Counts the calls that it gets."""

    def __init__(self, path: Path) -> None:
        super().__init__(SchedulerSpec(80, 4, 6, 16), path.open("wb"))
        self.calls: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> object:
        if name in vars(JournaledScheduler):
            self.calls[name] += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("depth", [1, *long_only([0, 2])])
def test_a_run_with_failures_comes_back(tmp_path: Path, depth: int) -> None:
    calls: Counter[str] = Counter()
    for seed in range(8):
        dice = random.Random(seed)
        scheduler = Counted(tmp_path / "journal")
        runner = Allergic(80, {SequenceId(2): 1, SequenceId(9): 20}, num_hiccups=1)
        loop = Loop(scheduler, runner, depth, lambda: 0.0)
        for number in range(12):
            beam = BeamParams(2) if dice.random() < 0.2 else None
            n = 2 if beam is not None or dice.random() < 0.2 else 1
            scheduler.add(request_of(number, dice.randint(1, 20), dice.randint(4, 16), n, beam))
        for _ in range(1000):
            if scheduler.idle:
                break
            loop.step()
            if dice.random() < 0.1:
                scheduler.withdraw_all()
            running = [
                s for group in scheduler.running_groups() for s in group.sequences if s.state is SequenceState.RUNNING
            ]
            if running and dice.random() < 0.1:
                ended = dice.choice([each for each in running if each.request.beam is None] or [None])
                reason = dice.choice([FinishReason.FAILED, FinishReason.STOP])
                if ended is not None:
                    dice.choice([scheduler.conclude, scheduler.finish])(ended, reason)
            if dice.random() < 0.2:
                prompt = request_of(dice.randrange(12), 20, 1, 1, None).prompt
                owner = BlockOwner(RequestId(100), "", 0)
                held = scheduler.hold_prefix(owner, prompt, with_room=False)
                scheduler.hold_prefix(owner, prompt[:9], with_room=True)
                if held is not None:
                    scheduler.release_prefix(held.number, written=False)
        for number in tuple(scheduler.kv.holds.held):
            scheduler.release_prefix(number, written=True)
        audit_rest(scheduler)
        scheduler.journal.close()
        report = replay(tmp_path / "journal")
        assert report.difference is None and report.condition is Condition.COMPLETE
        assert report.steps == scheduler.last_planned + 1
        calls += scheduler.calls
    assert min(calls[name] for name in ("conclude", "finish", "fail", "admit_only", "withdraw_all", "lose_steps")) > 0


@pytest.mark.parametrize("reason", FinishReason)
def test_a_sequence_may_be_ended_for_any_reason(reason: FinishReason) -> None:
    for verb in ("finish", "conclude"):
        scheduler = JournaledScheduler(SchedulerSpec(64, 4, 4, 32), io.BytesIO())
        (sequence,) = scheduler.add(request_of(0, 3, 4, 1, None))
        getattr(scheduler, verb)(sequence, reason)
        assert sequence.finish_reason is reason
    for record in (StopRecord(sequence.id, reason), ConcludeRecord(sequence.id, reason)):
        assert unpacked(packed(record)) == record


@pytest.mark.parametrize(
    ("record", "data"),
    [
        (StopRecord(SequenceId(300), FinishReason.STOP), b"\x03\xac\x02\x00"),
        (StopRecord(SequenceId(1), FinishReason.OUT_OF_MEMORY), b"\x03\x01\x05"),
        (StopRecord(SequenceId(1), FinishReason.FAILED), b"\x03\x01\x06"),
        (ConcludeRecord(SequenceId(1), FinishReason.NOTHING_LEFT), b"\x0f\x01\x07"),
        (ExpectRecord(SequenceId(2), 300, 5), b"\x13\x02\xac\x02\x05"),
        (FailRecord(request_of(7, 1, 1, 1, None).id), b"\x10\x07"),
        (ReleaseRecord(3, True), b"\x16\x03\x01"),
        (RestrictRecord(None), b"\x11\x00"),
        (RestrictRecord(frozenset()), b"\x11\x01\x00\x01"),
        (RestrictRecord(frozenset({9, 4})), b"\x11\x01\x02\x01\x04\x09"),
        (ControlRecord(RecordKind.WITHDRAWN), b"\x12"),
        (ControlRecord(RecordKind.SHRUNK, 3), b"\x06\x03"),
    ],
)
def test_records_keep_their_bytes(record: Record, data: bytes) -> None:
    assert packed(record) == data and unpacked(data) == record

"""A journal reproduces every decision of any scenario, takes tens of bytes per step, and detects corruption."""

import errno
import io
import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.codec import RecordDecoder, RecordEncoder
from quire.core.errors import BrokenJournal, ConfigError
from quire.core.ids import RequestId, Row
from quire.core.request import Request
from quire.core.sampling import RowSampling
from quire.core.step import StepPlan
from quire.sched.cost_model import Constants
from quire.sched.journal.recorder import MAX_JOURNALS, JournaledScheduler, checksum, create_journal
from quire.sched.journal.records import MAGIC
from quire.sched.journal.replay import Condition, ReplayReport, replay
from quire.sched.loop import Loop
from quire.sched.policy import DYNAMIC, CapturedSizes, Policy, SchedulerSpec, read_spec
from quire.sched.queue import OrderPolicy
from quire.sched.reservation import Overcommit
from quire.sched.rows import RowAllocator
from quire.sched.scheduler import Scheduler
from quire.sched.speculation import SpeculationPolicy
from quire.sim.check.check import numpy_oracle
from quire.sim.check.scenario import Scenario, ScenarioEvent, draw_scenario
from quire.sim.check.trial import CheckRun
from quire.sim.runners import ToyRunner
from tests.tiers import examples

NUM_WORLDS = examples(15, 80)
DEAR_DRAFTS = Constants(1.0, 0.0, 1.5, 0.0, 0.0, context_per_draft=0.0)  # a draft pays if it is nearly always right


def record(path: Path, seed: int, scenario: Scenario | None = None) -> CheckRun:
    """Run one scenario with a journal."""
    dice = random.Random(seed)
    drawn = draw_scenario(dice)
    trial = CheckRun(scenario or drawn, dice, numpy_oracle, path.open("wb"))
    trial.run()
    assert isinstance(trial.scheduler, JournaledScheduler)
    trial.scheduler.journal.close()
    return trial


def assert_same(report: ReplayReport, trial: CheckRun) -> None:
    assert report.difference is None
    assert report.condition is Condition.COMPLETE
    assert report.steps == trial.scheduler.last_planned + 1


def test_replay_reproduces_every_plan_of_random_scenarios(tmp_path: Path) -> None:
    happened: Counter[ScenarioEvent] = Counter()
    for seed in range(NUM_WORLDS):
        trial = record(tmp_path / "journal", seed)
        assert_same(replay(tmp_path / "journal"), trial)
        happened += Counter(trial.events)
    assert set(happened) == set(ScenarioEvent), "not everything happened"


def test_what_grammars_force_is_replayed(tmp_path: Path) -> None:
    """A world whose plans depend on it, as a journal without these records shows."""
    trial = record(tmp_path / "journal", 73)
    assert trial.scheduler.counters.drafted_tokens > 0
    assert_same(replay(tmp_path / "journal"), trial)


def test_beams_forks_host_tier_and_lost_steps_in_one_scenario(tmp_path: Path) -> None:
    scenario = draw_scenario(random.Random(0))
    scenario = replace(
        scenario,
        block_size=4,
        num_blocks=18,
        num_host_blocks=6,
        max_rows=5,
        max_step_tokens=20,
        depth=2,
        policy=Policy(overcommit=Overcommit.OPTIMISTIC, itl_target_s=0.015, ttft_target_s=0.05, max_step_s=0.02),
        num_requests=30,
        max_prompt=20,
        max_output=40,
        shared_prefix=np.arange(20, dtype=np.int32),
        groups=True,
        beams=True,
        deadlines=False,
        embeddings=False,
        repeats=False,
        prompt_logprobs=False,
        chances=replace(scenario.chances, lose=0.02, die=0.01, starve=0.0, reset=0.0, shrink=0.0, jump=0.0),
    )
    num_preemptions = 0
    for seed in range(4):
        trial = record(tmp_path / "journal", seed, scenario)
        assert_same(replay(tmp_path / "journal"), trial)
        counters = trial.scheduler.counters
        assert counters.forks and counters.moved_blocks and counters.lost_steps
        assert trial.scheduler.cost.version > 0, "durations were observed, and they decide"
        num_preemptions += counters.preemptions
    assert num_preemptions > 0


class Steady:
    """Rows that only decode."""

    def __init__(self, path: Path, num_rows: int, num_steps: int) -> None:
        spec = SchedulerSpec(num_rows * num_steps, 16, num_rows, 8 * num_rows)
        self.scheduler = JournaledScheduler(spec, path.open("wb"))
        loop = Loop(self.scheduler, ToyRunner(50_000), 1, lambda: 0.25)
        for number in range(num_rows):
            prompt = np.array([number, 5, 7], np.int32)
            self.scheduler.add(Request(RequestId(number), prompt, num_steps, RowSampling()), 0.125)
        while not self.scheduler.idle:
            loop.step()
        self.scheduler.journal.close()


def test_a_step_takes_tens_of_bytes_whatever_the_number_of_rows(tmp_path: Path) -> None:
    sizes = []
    for num_rows in (2, 48):
        Steady(tmp_path / "journal", num_rows, 160)
        report = replay(tmp_path / "journal")
        assert report.difference is None and report.steps >= 160
        sizes.append(report.bytes_per_step)
    assert sizes[0] < 40 and sizes[1] < sizes[0] + 4, "only rows that end are encoded one by one"


class SmallDisk(io.BytesIO):
    """Full after some bytes; what fits is kept."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._left = num_bytes
        self.kept = b""

    def write(self, data: Any) -> int:
        fits = bytes(data)[: self._left]
        self.kept += fits
        self._left -= len(fits)
        if len(fits) < len(bytes(data)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(fits)


def run_recorded(file: BinaryIO, max_bytes: int | None = None) -> JournaledScheduler:
    """Requests one after another in three rows; what each of them emits is checked."""
    scheduler = JournaledScheduler(SchedulerSpec(400, 4, 3, 16), file, max_bytes=max_bytes)
    loop = Loop(scheduler, ToyRunner(50_000), 1, lambda: 0.25)
    for number in range(40):
        prompt = np.array([number, 5, 7], np.int32)
        scheduler.add(Request(RequestId(number), prompt, 20, RowSampling()), 0.125)
    ended = 0
    while not scheduler.idle:
        output = loop.step()
        ended += 0 if output is None else len(output.finished)
    assert ended == 40, "the scheduler goes on, whatever becomes of its journal"
    scheduler.journal.close()
    return scheduler


def test_a_journal_ends_whole_at_its_limit_and_the_scheduler_goes_on(tmp_path: Path) -> None:
    whole, limited = tmp_path / "whole", tmp_path / "limited"
    run_recorded(whole.open("wb"))
    run_recorded(limited.open("wb"), max_bytes=4000)
    report, all_steps = replay(limited), replay(whole).steps
    assert report.difference is None and report.condition is Condition.COMPLETE
    assert 0 < report.steps < all_steps and 4000 <= limited.stat().st_size < 5000 < whole.stat().st_size


@pytest.mark.parametrize("num_bytes", [0, 10, 3000, 3001, 3002, 3050])
def test_a_full_disk_ends_the_journal_and_not_the_scheduler(
    tmp_path: Path, num_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SmallDisk(num_bytes)
    run_recorded(disk)
    assert [record.message for record in caplog.records if "No space left on device" in record.message]
    (tmp_path / "journal").write_bytes(disk.kept)
    if num_bytes >= 3000:
        report = replay(tmp_path / "journal")
        assert report.difference is None and report.condition is Condition.CUT_OFF and report.steps > 0


@pytest.mark.parametrize("after_hits", [False, True])
def test_a_cut_journal_has_what_drafts_would_have_been_worth(tmp_path: Path, after_hits: bool) -> None:
    """The tokens of a row are written when it is released: a replay that judged them itself would find zeros that
    repeat, and plan drafts for a text that never repeats."""
    policy = Policy(speculation=SpeculationPolicy(4, hindsight=True, after_hits=after_hits))
    with (tmp_path / "journal").open("wb") as file:
        scheduler = JournaledScheduler(SchedulerSpec(400, 4, 2, 16, policy=policy, constants=DEAR_DRAFTS), file)
        loop = Loop(scheduler, ToyRunner(50_000), 1, lambda: 0.25)
        scheduler.add(Request(RequestId(1), np.array([3, 5, 7], np.int32), 200, RowSampling()), 0.125)
        for _ in range(120):
            loop.step()
    report = replay(tmp_path / "journal")
    assert report.condition is Condition.CUT_OFF and report.steps > 100
    assert report.difference is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_device_that_is_full_does_not_raise_when_it_is_flushed_or_closed() -> None:
    full = Path("/dev/full")
    error = run_recorded(full.open("wb")).journal.error
    assert error is not None and error.errno == errno.ENOSPC


def test_a_new_journal_has_a_name_of_its_own_and_is_private(tmp_path: Path) -> None:
    made = []
    for _ in range(MAX_JOURNALS):
        made.append(create_journal(tmp_path / "day.journal"))
        made[-1].file.close()
    names = ["day.journal", *(f"day.journal.{number}" for number in range(1, MAX_JOURNALS))]
    assert [each.path.name for each in made] == names
    assert {each.path.stat().st_mode & 0o777 for each in made} == {0o600}
    with pytest.raises(ConfigError, match=r"There are 8 journals already, day.journal to day.journal.7; move them"):
        create_journal(tmp_path / "day.journal")
    with pytest.raises(ConfigError, match=r"nowhere/journal cannot be written: No such file or directory\."):
        create_journal(tmp_path / "nowhere" / "journal")


def test_another_decision_is_noticed_where_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Steady(tmp_path / "journal", 3, 20)

    def from_the_other_end(self: RowAllocator) -> Row:
        return self._free.pop(0)

    monkeypatch.setattr(RowAllocator, "take_row", from_the_other_end)
    difference = replay(tmp_path / "journal").difference
    assert difference is not None and difference.step == 0
    assert "starts 3" in difference.recorded and "starts 3" in difference.replayed


def test_a_failure_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler.plan

    def breaking(self: Scheduler, now_s: float) -> StepPlan | None:
        assert self.last_planned < 7, "it broke"
        return original(self, now_s)

    monkeypatch.setattr(Scheduler, "plan", breaking)
    with pytest.raises(AssertionError, match="it broke"):
        Steady(tmp_path / "journal", 2, 20)
    report = replay(tmp_path / "journal")
    assert report.difference is not None
    assert report.difference.step == 8 and "it broke" in report.difference.replayed


def _journal(tmp_path: Path, *, hindsight: bool = False) -> bytes:
    policies = [draw_scenario(random.Random(seed)).policy for seed in range(100)]
    seed = next(
        seed
        for seed, policy in enumerate(policies)
        if policy.regime.prefix and ((policy.speculation.hindsight and policy.speculation.governed) or not hindsight)
    )
    record(tmp_path / "journal", seed)
    return (tmp_path / "journal").read_bytes()


def _header_length(whole: bytes) -> int:
    decoder = RecordDecoder(whole)
    decoder.raw(len(MAGIC) + 1)
    decoder.text()
    return decoder.position


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    whole = _journal(tmp_path)
    dice = random.Random(0)
    for position in dice.sample(range(len(whole)), examples(10, 60)):
        changed = bytearray(whole)
        changed[position] ^= 1 << dice.randrange(8)
        (tmp_path / "changed").write_bytes(changed)
        try:
            report = replay(tmp_path / "changed")
        except (BrokenJournal, ConfigError):
            assert position < _header_length(whole)
            continue
        assert report.difference is not None or report.condition is not Condition.COMPLETE, position


@pytest.mark.parametrize("hindsight", [False, True])
def test_a_journal_that_was_cut_off_is_good_up_to_there(tmp_path: Path, hindsight: bool) -> None:
    """Also where plans depend on tokens of rows that were not released: what they depend on is recorded."""
    whole = _journal(tmp_path, hindsight=hindsight)
    for length in random.Random(1).sample(range(_header_length(whole), len(whole)), examples(8, 40)):
        (tmp_path / "cut").write_bytes(whole[:length])
        report = replay(tmp_path / "cut")
        assert report.difference is None, length
        assert report.condition is Condition.CUT_OFF


@pytest.mark.parametrize("content", [b"", b"GGUF", MAGIC, MAGIC + b"\x02", MAGIC + b"\x01\x02{}", MAGIC + b"\x01\xff"])
def test_what_is_no_journal_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal").write_bytes(content)
    with pytest.raises(BrokenJournal):
        replay(tmp_path / "journal")


def test_a_plan_has_a_checksum_of_its_own() -> None:
    scheduler = JournaledScheduler(SchedulerSpec(64, 4, 4, 32), io.BytesIO())
    scheduler.add(Request(RequestId(0), np.arange(9, dtype=np.int32), 4, RowSampling()))
    plan = scheduler.plan()
    assert plan is not None
    (row_start,) = plan.starts
    (chunk,) = plan.chunks
    others = (
        plan._replace(step=1),
        plan._replace(num_decoding=1),
        plan._replace(pauses=(Row(0),)),
        plan._replace(releases=(Row(0),)),
        plan._replace(starts=(row_start._replace(tokens=row_start.tokens[::-1]),)),
        plan._replace(chunks=(chunk._replace(start=1),)),
        plan._replace(grants=replace(plan.grants, blocks=plan.grants.blocks[::-1])),
        plan._replace(reset=True),
    )
    assert len({checksum(each) for each in (plan, *others)}) == 1 + len(others)
    assert checksum(plan._replace()) == checksum(plan)


def test_a_spec_survives_its_json() -> None:
    order = OrderPolicy(fair=False, weights={"a": 0.1}, ageing_s=0.3)
    captured_sizes = (CapturedSizes(2, (16, 24)), CapturedSizes(8, (24,)))
    policy = Policy(
        DYNAMIC,
        order,
        Overcommit.NEVER,
        itl_target_s=0.1,
        ttft_target_s=0.3,
        max_step_s=0.5,
        captured_sizes=captured_sizes,
        max_waiting=5,
    )
    spec = SchedulerSpec(10, 4, 2, 8, 3, policy, largest_chunk=7, seconds_per_block=1e-5, resident_limit=5)
    assert read_spec(spec.to_json()) == spec


@given(
    st.integers(0, 2**63),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False),
    st.text(),
    st.lists(st.integers(0, 2**31 - 1)),
)
@settings(deadline=None)
def test_what_is_packed_is_unpacked(count: int, signed: int, real: float, text: str, numbers: list[int]) -> None:
    encoder = RecordEncoder()
    encoder.count(count)
    encoder.signed(signed)
    encoder.real(real)
    encoder.text(text)
    encoder.array(np.array(numbers, np.int32))
    encoder.array(numbers)
    decoder = RecordDecoder(bytes(encoder.data))
    assert (decoder.count(), decoder.signed(), decoder.real(), decoder.text()) == (count, signed, real, text)
    assert decoder.array().tolist() == decoder.array().tolist() == numbers
    assert decoder.at_end

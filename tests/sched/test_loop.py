"""The engine loop: steps in flight, lost steps, and what is reported."""

from collections.abc import Mapping

import pytest

from quire.core.ids import IntArray, Row
from quire.core.request import Sequence
from quire.core.step import FinishReason, Masks, Pending, StepLost, StepPlan, StepResult
from quire.sim.runners import OracleRunner
from tests.sched.stepping import NEVER, VOCAB, Bench, Recorder, counting, oracle_output

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
PLACES = pytest.mark.parametrize("place", ["launch", "wait"])
PROMPT = counting(1, 10)


class Lossy(Recorder):
    """Loses one step, in the one place or the other. The copies of the steps in flight with it did not happen."""

    lost: StepLost | None = None
    place = "launch"
    num_absorbed = 0

    def launch(self, plan: StepPlan) -> Pending:  # type: ignore[override]
        if self.place == "launch":
            self._lose()
        return _Lossy(super().launch(plan), self)

    def _lose(self) -> None:
        if self.lost is not None:
            for move in [move for plan in self.plans[self.num_absorbed :] for move in plan.moves]:
                assert isinstance(self.runner, OracleRunner)
                self.runner.erase(move.dst, range(4))
            self.num_absorbed = len(self.plans)
            lost, self.lost = self.lost, None
            raise lost


class _Lossy:
    def __init__(self, pending: Pending, lossy: Lossy) -> None:
        self._pending = pending
        self._lossy = lossy

    @property
    def drafted(self) -> Mapping[Row, IntArray]:
        return self._pending.drafted

    def sample(self, masks: Masks) -> None:
        self._pending.sample(masks)

    def wait(self) -> StepResult:
        if self._lossy.place == "wait":
            self._lossy._lose()
        self._lossy.num_absorbed += 1
        return self._pending.wait()


def lossy_bench(depth: int, place: str, blocks: int = 64, host: int = 0) -> tuple[Bench, Lossy]:
    bench = Bench(oracle=True, depth=depth, blocks=blocks, host=host)
    lossy = Lossy(bench.recorder.runner, 4)
    lossy.place = place
    bench.recorder = bench.loop._runner = lossy
    return bench, lossy


def assert_right(bench: Bench, *sequences: Sequence) -> None:
    for sequence in sequences:
        prompt = sequence.request.prompt.tolist()
        assert bench.emitted[sequence.id] == oracle_output(prompt, sequence.request.max_tokens, sequence.index)
        assert sequence.tokens.tolist() == prompt + bench.emitted[sequence.id]


@DEPTHS
def test_so_many_steps_are_in_flight_and_no_more(depth: int) -> None:
    bench = Bench(depth=depth)
    bench.add([1], 9)
    for turn in range(1, 8):
        absorbed = bench.turn()
        assert len(bench.plans) == turn
        assert (None if absorbed is None else absorbed.step) == (turn - 1 - depth if turn > depth else None)


def test_an_idle_loop_does_nothing() -> None:
    bench = Bench(depth=2)
    assert bench.turn() is None and bench.plans == []


@DEPTHS
@PLACES
@pytest.mark.parametrize("turns", [1, 4])
def test_a_lost_step_costs_no_token_that_was_absorbed(depth: int, place: str, turns: int) -> None:
    bench, lossy = lossy_bench(depth, place)
    one, two = bench.add(PROMPT, 9), bench.add([70, 71], 12)
    bench.turns(depth + turns)
    lossy.lost = StepLost("gone")
    heard = list(bench.emitted[one.id])
    assert len(heard) == turns
    bench.turn()
    num_plans = len(bench.plans)
    assert bench.emitted[one.id] == heard and one.tokens.tolist() == PROMPT + heard
    assert bench.scheduler.counters.lost_steps == depth + 1
    bench.run()
    assert bench.plans[num_plans].reset and sum(plan.reset for plan in bench.plans) == 1
    known = len(PROMPT) + turns
    assert [chunk.start for chunk in bench.chunks_of(one)] == [0, known - 1], "the cache is intact"
    assert one.group.num_preemptions == 0, "a lost step is no preemption"
    assert_right(bench, one, two)


@DEPTHS
@PLACES
def test_a_dead_worker_loses_the_cache(depth: int, place: str) -> None:
    bench, lossy = lossy_bench(depth, place)
    one, two = bench.add(PROMPT, 9), bench.add([70, 71], 12)
    bench.turns(depth + 3)
    lossy.lost = StepLost("the worker died", cache_intact=False)
    bench.turn()
    lossy.runner = OracleRunner(64, 4, VOCAB)
    assert bench.scheduler.kv.pool.num_free == 64
    bench.run()
    assert [chunk.start for chunk in bench.chunks_of(one)] == [0, 0]
    assert_right(bench, one, two)


@DEPTHS
@PLACES
def test_a_step_for_which_there_was_no_memory_ends_the_largest(depth: int, place: str) -> None:
    bench, lossy = lossy_bench(depth, place)
    small, large, middle = bench.add(PROMPT, 5), bench.add(counting(100, 20), 30), bench.add([70, 71], 12)
    bench.turns(depth + 2)
    lossy.lost = StepLost("out of memory", too_large=True)
    absorbed = bench.turn()
    assert absorbed is not None and [over.sequence for over in absorbed.finished] == [large.id], "in the same step"
    assert large.finish_reason is FinishReason.OUT_OF_MEMORY
    assert large.tokens.tolist() == counting(100, 20) + bench.emitted[large.id]
    bench.run()
    assert_right(bench, small, middle)


def test_a_step_lost_before_anything_was_absorbed() -> None:
    bench, lossy = lossy_bench(2, "wait")
    sequences = bench.add_group(PROMPT, 4, 3)
    lossy.lost = StepLost("gone")
    bench.run()
    assert_right(bench, *sequences)


@DEPTHS
@PLACES
@pytest.mark.parametrize("turns", range(1, 6))
def test_groups_beams_and_releasing_rows_survive_a_lost_step(depth: int, place: str, turns: int) -> None:
    bench, lossy = lossy_bench(depth, place)
    sequences, leaver = bench.add_group(PROMPT, 6, 2), bench.add([70, 71], 12)
    beams = bench.add_beams([80, 81, 82], 5, 2)
    bench.turns(turns)
    bench.scheduler.abort(leaver.request.id)
    lossy.lost = StepLost("gone")
    bench.run()
    assert_right(bench, *sequences)
    assert all(beam.id in bench.finished and beam.finish_reason is FinishReason.LENGTH for beam in beams)


@PLACES
@pytest.mark.parametrize("loses", ["demotion", "promotion"])
def test_copies_of_a_lost_step_are_not_relied_on(place: str, loses: str) -> None:
    """Whether the copies were carried out is unknown. `Bench` checks every cached token after every step."""
    bench, lossy = lossy_bench(0, place, blocks=4, host=4)
    bench.add(counting(1, 8), 1)
    bench.run_out()
    lossy.lost = StepLost("gone") if loses == "demotion" else None
    large = bench.add(counting(100, 16), 1)
    bench.run_out()
    lossy.lost = StepLost("gone") if loses == "promotion" else None
    back = bench.add([*counting(1, 8), 5], 2)
    bench.run()
    assert_right(bench, large, back)


@PLACES
@pytest.mark.parametrize("depth", [1, 2])
def test_copies_of_every_lost_step_are_not_relied_on(depth: int, place: str) -> None:
    """Not only those of the last one: the demotion was in flight, and the step after it copies nothing."""
    bench, lossy = lossy_bench(depth, place, blocks=4, host=4)
    bench.add(counting(1, 8), 1)
    bench.run_out()
    large = bench.add(counting(100, 12), 5)
    bench.turns(depth)
    lossy.lost = StepLost("gone")
    bench.turn()
    in_flight = bench.plans[-depth - (place == "wait") :]
    assert (in_flight[0].moves and not in_flight[-1].moves) or (depth == 1 and place == "launch")
    assert lossy.lost is None
    back = bench.add([*counting(1, 8), 5], 2)
    bench.run()
    assert_right(bench, large, back)


@PLACES
def test_a_copied_partial_block_of_a_lost_step_is_not_relied_on(place: str) -> None:
    bench, lossy = lossy_bench(0, place, blocks=2)
    bench.add(counting(1, 7), 1)
    bench.run_out()
    lossy.lost = StepLost("gone")
    other = bench.add([*counting(1, 6), 500], 1)
    bench.run()
    assert_right(bench, other)


def test_two_losses_in_a_row() -> None:
    bench, lossy = lossy_bench(1, "wait")
    one = bench.add(PROMPT, 9)
    for _ in range(4):
        bench.turns(3)
        lossy.lost = StepLost("gone")
        bench.turn()
    bench.run()
    assert bench.scheduler.counters.lost_steps > 3
    assert_right(bench, one)


def test_a_sequence_that_ended_outside_a_step_is_reported_without_one() -> None:
    bench = Bench(policy=NEVER)
    late = bench.add([1], 3, deadline_s=5.0)
    bench.now_s = 6.0
    assert not bench.scheduler.idle
    absorbed = bench.turn()
    assert (
        absorbed is not None
        and [over.sequence for over in absorbed.finished] == [late.id]
        and len(absorbed.sequences) == 0
    )
    assert bench.plans == [] and bench.turn() is None
    bench.run()

"""Blocks reserved at admission: the arithmetic, and the overcommit policies at work."""

from dataclasses import replace

import pytest

from quire.core.request import BeamParams, RequestGroup
from quire.sched.policy import CHUNKED, DYNAMIC, ORCA, STATIC, Policy
from quire.sched.reservation import LengthQuantile, Overcommit, most_blocks, positions_to_reserve, shared_blocks
from tests.sched.inspection import state_of
from tests.sched.stepping import NEVER, Bench, counting, toy_output
from tests.sched.waiting_groups import group


def asking(num_prompt: int, max_tokens: int, count: int = 1, beam: BeamParams | None = None) -> RequestGroup:
    plain = group(0, num_tokens=num_prompt).request
    return RequestGroup(replace(plain, max_tokens=max_tokens, num_sequences=count, beam=beam), 0, 0.0)


def positions(
    one: RequestGroup, overcommit: Overcommit, lengths: LengthQuantile | None = None, immune: bool = False
) -> int:
    return positions_to_reserve(one.sequences[0], overcommit, lengths or LengthQuantile(), immune=immune)


def test_each_overcommit_policy_by_hand() -> None:
    """10 and 9: the last token is never computed, so 18 positions in all."""
    one = asking(10, 9)
    assert positions(one, Overcommit.NEVER) == 18
    assert positions(one, Overcommit.OPTIMISTIC) == 11
    assert positions(one, Overcommit.HEDGE) == 15, "nothing learned yet: half of 9, rounded up"
    assert positions(one, Overcommit.OPTIMISTIC, immune=True) == 18


def test_preempting_a_group_frees_its_own_blocks_and_its_reservation() -> None:
    """Two requests share two whole blocks of a prompt; each has 18 positions in 5 blocks, of which 3 are its own."""
    bench = Bench(blocks=20, policy=NEVER)
    first = bench.add(counting(1, 10), 9)
    bench.turns(2)
    second = bench.add([*counting(1, 8), 900, 901], 9)
    bench.turn()
    assert len(bench.table(second)) < 5, "some of it is reserved"
    assert [state_of(bench.scheduler).num_freed(each.group) for each in (first, second)] == [3, 3]


def test_a_hedge_follows_the_lengths_that_were_seen() -> None:
    lengths = LengthQuantile()
    for _ in range(20):
        lengths.note(3)
    assert positions(asking(10, 9), Overcommit.HEDGE, lengths) == 13
    for _ in range(200):
        lengths.note(80)
    assert positions(asking(10, 9), Overcommit.HEDGE, lengths) == 18, "never more than the whole"


def test_never_more_than_the_whole_length_is_reserved() -> None:
    assert [positions(asking(10, 1), overcommit) for overcommit in Overcommit] == [10, 10, 10]


def test_what_was_generated_before_a_preemption_counts_as_known() -> None:
    one = asking(10, 9)
    one.sequences[0].tokens = group(0, num_tokens=14).request.prompt
    assert positions(one, Overcommit.OPTIMISTIC) == 15
    assert positions(one, Overcommit.HEDGE) == 17, "half of the 5 that may still come, rounded up"


def test_beams_reserve_their_whole_length() -> None:
    assert positions(asking(10, 9, 2, BeamParams(2)), Overcommit.OPTIMISTIC) == 18


def test_what_siblings_share_by_hand() -> None:
    assert shared_blocks(asking(9, 4).request, 4) == 0, "there is no sibling to share with"
    assert [shared_blocks(asking(n, 4, 2).request, 4) for n in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]


def test_the_worst_case_by_hand() -> None:
    assert most_blocks(asking(4, 13).request, 4) == 4
    assert most_blocks(asking(4, 14).request, 4) == 5
    assert most_blocks(asking(9, 4, 3).request, 4) == 3 + 2 * 1


@pytest.mark.parametrize(
    ("overcommit", "blocks"), [(Overcommit.NEVER, 5), (Overcommit.HEDGE, 4), (Overcommit.OPTIMISTIC, 3)]
)
def test_an_overcommit_policy_reserves_as_documented(overcommit: Overcommit, blocks: int) -> None:
    bench = Bench(policy=Policy(overcommit=overcommit))
    sequence = bench.add(counting(1, 10), 9)
    bench.turn()
    assert sequence.row is not None
    assert len(bench.table(sequence)) == 3
    assert bench.scheduler.kv.tables.reserved[sequence.row] == blocks - 3
    bench.run()


def test_a_request_with_its_whole_length_reserved_is_never_preempted_for_blocks() -> None:
    """Each needs 5 of 12 blocks: two run, the others wait."""
    bench = Bench(blocks=12, policy=NEVER)
    sequences = [bench.add([1 + i] * 4, 17) for i in range(4)]
    bench.turn()
    assert sum(sequence.row is not None for sequence in sequences) == 2
    bench.run()
    assert bench.num_preemptions == 0
    assert all(bench.emitted[s.id] == toy_output([1 + i] * 4, 17) for i, s in enumerate(sequences))


# The regimes of the arc.


def test_a_static_batch_is_sealed_and_padded() -> None:
    """Prompts of 3 and 5, answers of 2 and 4. The first step pads 2; when one has ended its row pads on."""
    bench = Bench(rows=2, policy=Policy(regime=STATIC))
    one, two = bench.add([1] * 3, 2), bench.add([2] * 5, 4)
    late = bench.add([3] * 2, 3)
    bench.run()
    assert [plan.num_padding for plan in bench.plans] == [2, 0, 1, 1, 0, 0, 0]
    assert [plan.step for plan in bench.plans if plan.starts] == [0, 4], "no request joins a running batch"
    assert bench.scheduler.counters.padding_tokens == 4
    assert bench.emitted[one.id] == toy_output([1] * 3, 2) and bench.emitted[two.id] == toy_output([2] * 5, 4)
    assert bench.emitted[late.id] == toy_output([3] * 2, 3)


def test_a_dynamic_batch_waits_for_its_window() -> None:
    bench = Bench(rows=2, policy=Policy(regime=DYNAMIC))
    bench.add([1] * 3, 2)
    for now_s, begun in ((7.0, 0), (7.05, 0), (7.11, 1)):
        bench.now_s = now_s
        bench.turn()
        assert len(bench.plans) == begun
    bench.run()


def test_a_window_begins_again_if_the_clock_is_set_back() -> None:
    bench = Bench(rows=2, policy=Policy(regime=DYNAMIC))
    bench.add([1] * 3, 2)
    for now_s, begun in ((1000.0, 0), (7.0, 0), (7.05, 0), (7.11, 1)):
        bench.now_s = now_s
        bench.turn()
        assert len(bench.plans) == begun
    bench.run()


def test_a_full_dynamic_batch_does_not_wait() -> None:
    bench = Bench(rows=2, policy=Policy(regime=DYNAMIC))
    bench.add([1] * 3, 2)
    bench.add([2] * 3, 2)
    bench.turn()
    assert len(bench.plan.starts) == 2
    bench.run()


def test_the_window_opens_anew_for_the_next_batch() -> None:
    bench = Bench(rows=1, policy=Policy(regime=DYNAMIC))
    bench.add([1], 2)
    bench.add([2], 2)
    bench.run()
    bench = Bench(rows=2, policy=Policy(regime=DYNAMIC))
    bench.add([1], 1)
    bench.turn()
    bench.now_s = 1.0
    bench.turn()
    bench.add([2], 1)
    bench.turn()
    assert len(bench.plans) == 1
    bench.now_s = 1.2
    bench.turn()
    assert len(bench.plans) == 2
    bench.run()


@pytest.mark.parametrize("regime", [STATIC, ORCA])
def test_a_contiguous_regime_reserves_the_whole_length(regime: object) -> None:
    bench = Bench(policy=Policy(regime=regime, overcommit=Overcommit.OPTIMISTIC))  # type: ignore[arg-type]
    sequence = bench.add(counting(1, 10), 9)
    bench.turn()
    assert sequence.row is not None
    assert len(bench.table(sequence)) + bench.scheduler.kv.tables.reserved[sequence.row] == 5
    bench.run()


def test_only_a_chunked_regime_cuts_a_prompt() -> None:
    lengths = {}
    for regime in (ORCA, CHUNKED):
        bench = Bench(budget=8, policy=Policy(regime=regime))
        sequence = bench.add([1] * 20, 2)
        bench.run()
        lengths[regime.name] = [chunk.length for chunk in bench.chunks_of(sequence)]
    assert lengths == {"continuous": [20], "chunked": [8, 8, 4]}


def test_without_the_prefix_regime_nothing_is_found_or_waited_for() -> None:
    bench = Bench(policy=Policy(regime=CHUNKED))
    first, second = bench.add(counting(1, 10), 3), bench.add(counting(1, 10), 3)
    bench.turn()
    assert first.assigned_step == second.assigned_step == 0
    bench.run_out()
    again = bench.add(counting(1, 10), 3)
    bench.run()
    assert bench.chunks_of(again)[0].start == 0

"""All runners give the same results for the same plans, and these equal the closed form."""

import numpy as np
import pytest

from quire.core.ids import Row
from quire.core.moves import Move
from quire.core.oracle import candidates
from quire.core.step import AppendTokens, Chunk, ChunkOutput, Grants, StepPlan
from quire.sim.runners import ToyRunner
from tests.runner.plans import DEVICE, HOST, emitted, grants, host_driven, moves, row_start, sample, seat_of
from tests.sim.runner_pairs import VOCAB, RunnerPair, after, assert_same, following

PROMPT = [5, 96, 3, 41, 0, 17, 17, 88, 2, 60]  # two blocks and a half


def opening(row: int = 0, *blocks: int) -> StepPlan:
    return StepPlan(0, starts=(row_start(row, PROMPT),), grants=grants({row: blocks}), chunks=(sample(row, 0, 10),))


def test_the_candidates_by_hand() -> None:
    ids, logprobs = candidates(96 + 97 * 1024, VOCAB, 3)
    assert ids.tolist() == [96, 0, 1]
    fall = 24 + (96 + 97 * 1024) % 65536 / 1024
    assert logprobs.tolist() == [0.0, -fall, -2 * fall]
    assert len(candidates(5, 3, 8).ids) == 3


def test_siblings_diverge_by_their_index() -> None:
    first, second = following(PROMPT, 2), following(PROMPT, 2, index=1)
    assert second[0] == (first[0] + 1) % VOCAB
    assert second[1] == following([*PROMPT, second[0]], 1, index=1)[0]


def test_a_prefix_in_shared_blocks_is_computed_once() -> None:
    pair = RunnerPair()
    sibling = [*PROMPT[:8], 1, 2, 3]
    assert emitted(pair.run(opening(0, 1, 2, 3))) == {0: following(PROMPT, 1)[0]}
    hit = StepPlan(
        1, starts=(row_start(1, sibling),), grants=grants({1: [1, 2, 4]}), chunks=(sample(1, 8, 11),), num_decoding=1
    )
    assert emitted(pair.run(hit)) == {0: following(PROMPT, 2)[1], 1: following(sibling, 1)[0]}
    both = pair.run(StepPlan(2, num_decoding=2))
    assert emitted(both) == {0: following(PROMPT, 3)[2], 1: following(sibling, 2)[1]}


def test_a_partial_block_is_copied_before_the_step_writes() -> None:
    """Both rows go on from position 10, each in its own copy of the third block."""
    pair = RunnerPair()
    pair.run(opening(0, 1, 2, 3))
    fork = [*PROMPT, 7]
    plan = StepPlan(
        1,
        moves=moves(DEVICE, DEVICE, (3, 5)),
        starts=(row_start(1, fork),),
        grants=grants({1: [1, 2, 5]}),
        chunks=(sample(1, 10, 11),),
        num_decoding=1,
    )
    assert emitted(pair.run(plan)) == {0: following(PROMPT, 2)[1], 1: following(fork, 1)[0]}
    assert emitted(pair.run(StepPlan(2, num_decoding=2)))[1] == following(fork, 2)[1]


def test_siblings_diverge_from_the_same_blocks() -> None:
    """The second shares two blocks and copies the third; it computes the last token of the prompt itself."""
    pair = RunnerPair()
    pair.run(opening(0, 1, 2, 3))
    fork = StepPlan(
        1,
        moves=moves(DEVICE, DEVICE, (3, 5)),
        starts=(row_start(1, PROMPT)._replace(branch=2),),
        grants=grants({1: [1, 2, 5]}),
        chunks=(sample(1, 9, 10),),
        num_decoding=1,
    )
    assert emitted(pair.run(fork)) == {0: following(PROMPT, 2)[1], 1: following(PROMPT, 1, index=2)[0]}
    both = pair.run(StepPlan(2, num_decoding=2))
    assert emitted(both) == {0: following(PROMPT, 3)[2], 1: following(PROMPT, 2, index=2)[1]}


def test_a_swapped_row_continues_while_others_use_its_blocks() -> None:
    """Its blocks go out and are granted anew in one plan; it comes back to other blocks, on another row."""
    pair = RunnerPair()
    pair.run(opening(0, 1, 2, 3))
    pair.run(StepPlan(1, num_decoding=1))
    known = PROMPT + following(PROMPT, 2)
    other = [9] * 11
    swap_out = StepPlan(
        2,
        moves=moves(DEVICE, HOST, (1, 8), (2, 6), (3, 7)),
        releases=(Row(0),),
        starts=(seat_of(7, 0, other),),
        grants=grants({0: [3, 1, 2]}),
        chunks=(sample(0, 0, 11),),
    )
    assert emitted(pair.run(swap_out)) == {0: following(other, 1)[0]}
    swap_in = StepPlan(
        3,
        moves=moves(HOST, DEVICE, (7, 12), (8, 10), (6, 11)),
        starts=(seat_of(0, 2, known, num_prompt=10),),
        grants=grants({2: [10, 11, 12]}),
        chunks=(sample(2, 11, 12),),
        num_decoding=1,
    )
    assert emitted(pair.run(swap_in)) == {0: following(other, 2)[1], 2: following(PROMPT, 3)[2]}


CHAINS = {
    "tiers": moves(DEVICE, HOST, (3, 1)) + moves(HOST, DEVICE, (1, 9)) + moves(DEVICE, DEVICE, (9, 10)),
    "reads what was written": moves(DEVICE, DEVICE, (3, 9), (9, 10)),
    "writes what was read": moves(DEVICE, DEVICE, (3, 10), (1, 3)),
    "writes twice": moves(DEVICE, DEVICE, (1, 10), (3, 10)),
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_moves_are_carried_one_after_the_other(chain: tuple[Move, ...]) -> None:
    """Each ends with the open block of the prompt in block 10."""
    pair = RunnerPair()
    pair.run(opening(0, 1, 2, 3))
    again = StepPlan(
        1,
        moves=chain,
        releases=(Row(0),),
        starts=(row_start(0, [*PROMPT, 1]),),
        grants=grants({0: [1, 2, 10]}),
        chunks=(sample(0, 10, 11),),
    )
    assert emitted(pair.run(again)) == {0: following([*PROMPT, 1], 1)[0]}


def test_a_host_driven_row_computes_only_appended_tokens() -> None:
    pair = RunnerPair()
    plan = StepPlan(
        0,
        starts=(row_start(0, PROMPT, num_candidates=4), row_start(1, PROMPT[:3])),
        grants=grants({0: [1, 2, 3, 4], 1: [5, 6, 7]}),
        chunks=(host_driven(0, 0, 10), sample(1, 0, 3)),
    )
    first = pair.run(plan)
    assert emitted(first).keys() == {1}
    assert_same(first.candidates[Row(0)], after(PROMPT, 4))
    idle = pair.run(StepPlan(1, num_decoding=1))
    assert idle.candidates == {} and emitted(idle).keys() == {1}

    second = int(first.candidates[Row(0)].ids[1])
    known = [*PROMPT, second, 8]
    told = pair.run(
        StepPlan(2, appends=(AppendTokens(Row(0), (second, 8)),), chunks=(host_driven(0, 10, 12),), num_decoding=1)
    )
    assert_same(told.candidates[Row(0)], after(known, 4))
    known.append(50)
    freed = pair.run(StepPlan(3, appends=(AppendTokens(Row(0), (50,)),), chunks=(sample(0, 12, 13),), num_decoding=1))
    assert emitted(freed)[0] == following(known, 1)[0]
    assert emitted(pair.run(StepPlan(4, num_decoding=2)))[0] == following(known, 2)[1]


def test_a_beam_that_wins_twice_forks() -> None:
    """Two tethered rows; the second dies, and its row goes to a fork of the first, with a copy of its open block."""
    pair = RunnerPair()
    pair.run(
        StepPlan(
            0,
            starts=(row_start(0, PROMPT, num_candidates=4), row_start(1, PROMPT[:5], num_candidates=4)),
            grants=grants({0: [1, 2, 3], 1: [4, 5]}),
            chunks=(host_driven(0, 0, 10), host_driven(1, 0, 5)),
        )
    )
    best, second = after(PROMPT, 2).ids.tolist()
    forked = pair.run(
        StepPlan(
            1,
            moves=moves(DEVICE, DEVICE, (3, 6)),
            releases=(Row(1),),
            starts=(seat_of(2, 1, [*PROMPT, second], num_prompt=10, num_candidates=4),),
            appends=(AppendTokens(Row(0), (best,)),),
            grants=grants({1: [1, 2, 6]}),
            chunks=(host_driven(0, 10, 11), host_driven(1, 10, 11)),
        )
    )
    assert_same(forked.candidates[Row(0)], after([*PROMPT, best], 4))
    assert_same(forked.candidates[Row(1)], after([*PROMPT, second], 4))


def test_a_row_is_released_and_started_in_one_plan() -> None:
    pair = RunnerPair()
    pair.run(opening(0, 1, 2, 3))
    plan = StepPlan(
        1, releases=(Row(0),), starts=(seat_of(1, 0, [30]),), grants=grants({0: [3]}), chunks=(sample(0, 0, 1),)
    )
    assert emitted(pair.run(plan)) == {0: following([30], 1)[0]}


def test_after_a_lost_step_all_rows_start_again() -> None:
    """Steps 2 and 3 are lost. What lies in the blocks is still good; the rows are not."""
    pair = RunnerPair()
    pair.run(opening(0, 1, 2, 3))
    pair.run(StepPlan(1, num_decoding=1))
    known = PROMPT + following(PROMPT, 2)
    reset = StepPlan(
        4,
        starts=(seat_of(0, 3, known, num_prompt=10), seat_of(1, 0, [30])),
        grants=grants({3: [1, 2, 3], 0: [4]}),
        chunks=(sample(3, 11, 12), sample(0, 0, 1)),
        reset=True,
    )
    assert emitted(pair.run(reset)) == {3: following(PROMPT, 3)[2], 0: following([30], 1)[0]}
    assert emitted(pair.run(StepPlan(5, grants=grants({3: [5]}), num_decoding=2)))[3] == following(PROMPT, 4)[3]


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_without_a_reset_a_lost_step_asserts(name: str) -> None:
    runner = getattr(RunnerPair(), name)
    runner.launch(opening(0, 1, 2, 3))
    with pytest.raises(AssertionError, match="was due"):
        runner.launch(StepPlan(2, num_decoding=1))


def test_blocks_of_several_rows_may_be_granted_in_any_order() -> None:
    pair = RunnerPair()
    interleaved = StepPlan(
        0,
        starts=(row_start(0, PROMPT), row_start(1, PROMPT[::-1])),
        grants=Grants(np.array([1, 0, 0, 1, 0, 1], np.int32), np.array([9, 2, 7, 4, 1, 3], np.int32)),
        chunks=(sample(0, 0, 10), sample(1, 0, 10)),
    )
    assert emitted(pair.run(interleaved)) == {0: following(PROMPT, 1)[0], 1: following(PROMPT[::-1], 1)[0]}
    again = StepPlan(
        1,
        releases=(Row(0), Row(1)),
        starts=(row_start(0, [*PROMPT, 1]), row_start(1, [*PROMPT[::-1], 1])),
        grants=grants({0: [2, 7, 1], 1: [9, 4, 3]}),
        chunks=(sample(0, 10, 11), sample(1, 10, 11)),
    )
    assert emitted(pair.run(again)) == {
        0: following([*PROMPT, 1], 1)[0],
        1: following([*PROMPT[::-1], 1], 1)[0],
    }


def test_padding_changes_nothing() -> None:
    pair = RunnerPair()
    empty = pair.run(StepPlan(0, num_padding=3))
    assert emitted(empty) == {}
    first = StepPlan(
        1, starts=(row_start(0, PROMPT),), grants=grants({0: [1, 2, 3]}), chunks=(sample(0, 0, 10),), num_padding=6
    )
    assert emitted(pair.run(first)) == {0: following(PROMPT, 1)[0]}
    assert emitted(pair.run(StepPlan(2, num_decoding=1, num_padding=5))) == {0: following(PROMPT, 2)[1]}


def test_a_plan_may_hold_nothing_but_moves() -> None:
    pair = RunnerPair()
    pair.run(opening(0, 1, 2, 3))
    pair.run(StepPlan(1, moves=moves(DEVICE, HOST, (1, 1)), pauses=(Row(0),)))
    assert emitted(pair.run(StepPlan(2, num_decoding=1))) == {0: following(PROMPT, 2)[1]}


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_a_move_inside_the_host_asserts(name: str) -> None:
    with pytest.raises(AssertionError, match="inside the host's store"):
        getattr(RunnerPair(), name).launch(StepPlan(0, moves=moves(HOST, HOST, (1, 2))))


def test_the_toy_adds_up_appended_tokens() -> None:
    toy = ToyRunner(VOCAB)
    opened = toy.launch(
        StepPlan(0, starts=(row_start(0, [50, 60], num_candidates=3),), chunks=(host_driven(0, 0, 2),), num_padding=9)
    ).wait()
    assert opened.candidates[Row(0)].ids.tolist() == [13, 14, 15] and emitted(opened) == {}
    told = toy.launch(StepPlan(1, appends=(AppendTokens(Row(0), (14,)),), chunks=(sample(0, 2, 3),))).wait()
    assert emitted(told) == {0: 27}
    anew = StepPlan(9, starts=(row_start(0, [1, 2]),), chunks=(sample(0, 0, 2),), reset=True)
    assert emitted(toy.launch(anew).wait()) == {0: 3}


@pytest.mark.parametrize("output", [ChunkOutput.NONE, ChunkOutput.SAMPLE | ChunkOutput.CANDIDATES])
def test_a_chunk_that_reaches_the_end_has_one_output(output: ChunkOutput) -> None:
    plan = StepPlan(0, starts=(row_start(0, PROMPT),), chunks=(Chunk(Row(0), 0, 10, output),))
    with pytest.raises(AssertionError):
        ToyRunner(VOCAB).launch(plan)

"""Several continuations of one prompt: computed once, shared by blocks, admitted and preempted as one."""

import numpy as np
import pytest

from quire.core.errors import NeverFits
from quire.core.events import What
from quire.core.ids import RequestId, Row
from quire.core.request import Family, Owner, Request, State
from quire.core.sampling import RowSampling
from quire.core.step import FinishReason
from quire.kv.manager import KVManager
from quire.sched.forks import Forks
from quire.sched.seating import Seating
from tests.sched.helpers import Bench, counting, events_of, oracle_answer

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
PROMPT = counting(1, 10)  # two blocks and a half


def test_siblings_share_the_prompts_blocks_and_copy_only_its_tail() -> None:
    bench = Bench(oracle=True)
    members = bench.add_family(PROMPT, 4, 3)
    bench.turn()
    assert len(bench.plans[0].seats) == len(bench.plans[0].chunks) == 1, "the leader alone computes the prompt"
    bench.turn()
    plan = bench.plan
    assert [(chunk.start, chunk.length) for chunk in plan.chunks] == [(9, 1), (9, 1)]
    leader, *siblings = [bench.table(member) for member in members]
    assert siblings[0][:2] == siblings[1][:2] == leader[:2]
    assert len({siblings[0][2], siblings[1][2], leader[2]}) == 3
    assert [bench.readers(block) for block in leader] == [3, 3, 1]
    assert [(move.src.block, move.dst.block) for move in plan.moves] == [(leader[2], table[2]) for table in siblings]
    assert bench.scheduler.books.tally.forks == 2
    bench.run()
    assert all(bench.heard[member.id] == oracle_answer(PROMPT, 4, member.index) for member in members)
    assert bench.scheduler.books.tally.computed_tokens == 10 + 2 + 3 * 3, "the prompt once, two last tokens, decodes"


def test_a_prompt_that_ends_with_its_block_is_shared_but_for_its_last_token() -> None:
    """A sibling computes the last token itself, into a copy of the last block."""
    bench = Bench(oracle=True)
    members = bench.add_family(PROMPT[:9], 3, 2)
    bench.turns(2)
    assert not len(bench.plan.moves), "position 8 is the first of a block: nothing to copy"
    bench.run()
    assert all(bench.heard[member.id] == oracle_answer(PROMPT[:9], 3, member.index) for member in members)
    members = bench.add_family(PROMPT[:8], 3, 2)
    bench.turns(2)
    assert len(bench.plan.moves) == 1 and bench.readers(bench.table(members[0])[1]) == 1
    bench.run()
    assert all(bench.heard[member.id] == oracle_answer(PROMPT[:8], 3, member.index) for member in members)


def test_siblings_begin_when_all_but_the_prompts_last_token_is_computed() -> None:
    bench = Bench(oracle=True, budget=9, rows=4)
    first, second = bench.add_family(PROMPT, 3, 2)
    bench.turns(2)
    assert [(chunk.row, chunk.start) for chunk in bench.plan.chunks] == [(first.row, 9), (second.row, 9)]
    bench.run()


@DEPTHS
def test_a_leader_that_ends_at_once_still_lets_its_siblings_begin(depth: int) -> None:
    bench = Bench(oracle=True, depth=depth)
    members = bench.add_family(PROMPT, 1, 3)
    bench.run()
    assert [bench.heard[member.id] for member in members] == [oracle_answer(PROMPT, 1, index) for index in range(3)]
    assert sum(chunk.length for plan in bench.plans for chunk in plan.chunks) == 12


@DEPTHS
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("turns", range(5))
def test_one_that_ends_leaves_the_others(depth: int, index: int, turns: int) -> None:
    bench = Bench(oracle=True, depth=depth, budget=6, rows=4)
    members = bench.add_family(PROMPT, 6, 3)
    bench.turns(turns)
    assert bench.scheduler.finish(members[index], FinishReason.STOP)
    silence = len(bench.heard[members[index].id])
    bench.run()
    for member in members:
        expected = oracle_answer(PROMPT, 6, member.index)
        assert bench.heard[member.id] == (expected[:silence] if member.index == index else expected)
        assert member.tokens.tolist() == PROMPT + bench.heard[member.id]


@DEPTHS
@pytest.mark.parametrize("turns", range(6))
def test_a_family_is_aborted_as_one(depth: int, turns: int) -> None:
    bench = Bench(oracle=True, depth=depth, budget=6, rows=4)
    members = bench.add_family(PROMPT, 6, 3)
    bystander = bench.add([77], 8)
    bench.turns(turns)
    assert bench.scheduler.abort(members[0].request.id) == members
    bench.run()
    assert bench.heard[bystander.id] == oracle_answer([77], 8)


def test_a_sibling_that_never_began_leaves_a_row_of_which_the_runner_was_not_told() -> None:
    bench = Bench(oracle=True, budget=6, rows=3)
    for token in (70, 80, 90):
        bench.add([token], 1)
    bench.run_out()
    members = bench.add_family(PROMPT, 6, 3)
    bench.turn()
    bench.scheduler.abort(members[0].request.id)
    after = bench.add([60], 3)
    bench.turn()
    assert len(bench.plan.leaves) == 1, "the leader's row alone"
    bench.run()
    assert bench.heard[after.id] == oracle_answer([60], 3)


def test_a_poisoned_leaders_siblings_start_again() -> None:
    bench = Bench(oracle=True)
    leader, *siblings = bench.add_family(PROMPT, 3, 3)
    bench.poison(leader)
    bench.turn()
    assert leader.finish_reason is FinishReason.ERROR
    assert [sibling.state for sibling in siblings] == [State.WAITING] * 2
    bench.run()
    assert [bench.heard[sibling.id] for sibling in siblings] == [oracle_answer(PROMPT, 3, index) for index in (1, 2)]
    assert [chunk.start for chunk in bench.chunks_of(siblings[0])] == [0], "nothing of the poisoned prompt was kept"
    assert siblings[0].family.num_preemptions == 0


@DEPTHS
def test_a_family_is_preempted_and_readmitted_as_one(depth: int) -> None:
    """7 blocks for the first and 5 for each sibling, of 12."""
    bench = Bench(oracle=True, blocks=12, block_size=2, rows=3, depth=depth)
    first = bench.add([1, 2], 12)
    members = bench.add_family([3, 4], 8, 2)
    family = members[0].family
    while not bench.scheduler.idle:
        bench.turn()
        states = {member.state for member in members if not member.finished}
        assert State.RUNNING not in states or len(states) == 1, "some sit and some wait"
    assert family.num_preemptions == len(events_of(members[0], What.PREEMPTED)) > 0
    assert first.family.num_preemptions == 0
    assert bench.heard[first.id] == oracle_answer([1, 2], 12)
    assert [bench.heard[member.id] for member in members] == [oracle_answer([3, 4], 8, index) for index in range(2)]
    bench.run()


def test_a_family_sits_only_if_all_of_it_can() -> None:
    bench = Bench(oracle=True, rows=3)
    alone = bench.add([1], 4)
    members = bench.add_family(PROMPT, 3, 3)
    bench.turn()
    assert all(member.state is State.WAITING for member in members)
    bench.run()
    assert bench.finished[members[0].id] > bench.finished[alone.id]


def test_what_a_family_may_need_counts_the_shared_blocks_once() -> None:
    """10 prompt tokens and 6 more: 4 blocks for the leader, 2 for each sibling."""
    bench = Bench(oracle=True, blocks=8)
    members = bench.add_family(PROMPT, 7, 3)
    bench.run()
    assert all(bench.heard[member.id] == oracle_answer(PROMPT, 7, member.index) for member in members)
    assert bench.num_preemptions == 0
    with pytest.raises(NeverFits, match="8 KV blocks"):
        Bench(blocks=7).add_family(PROMPT, 7, 3)


def test_a_family_begins_from_the_cache() -> None:
    bench = Bench(oracle=True)
    bench.add(PROMPT, 3)
    bench.run_out()
    members = bench.add_family([*PROMPT, 500], 3, 2)
    bench.run()
    assert bench.chunks_of(members[0])[0].start == 10
    assert all(bench.heard[member.id] == oracle_answer([*PROMPT, 500], 3, member.index) for member in members)


@pytest.mark.parametrize(("num_blocks", "num_found", "num_promised"), [(8, 6, 1), (6, 5, 1)])
def test_a_sibling_begins_with_its_past_if_that_fits_and_else_with_the_prompt(
    num_blocks: int, num_found: int, num_promised: int
) -> None:
    """Another left the whole prompt in the cache, in three blocks; the leader holds three of its own. For its seven
    tokens the sibling was promised two beyond the prompt's shared two; in the cache it finds three."""
    kv, seating = KVManager(num_blocks, 2, 3), Seating(3)
    prompt = np.array(PROMPT[:6], np.int32)
    family = Family(Request(RequestId(1), prompt, 4, RowSampling(), 2), 0, 0.0)
    leader, sibling = family.members
    sibling.tokens = np.append(prompt, np.int32(99))
    for member in (leader, sibling):
        seating.sit(member, seating.take_row(), 0, 0)
    assert leader.row is not None and sibling.row is not None
    for row, owner in ((Row(2), Owner(RequestId(2), "", 0)), (leader.row, leader.family.owner)):
        kv.open(row, owner, None, 3)
        kv.grow_to(row, 6, owner.request)
        kv.commit(row, owner, prompt)
    kv.close(Row(2), Owner(RequestId(2), "", 0), prompt)
    kv.promise(sibling.row, 2)
    leader.num_computed = 6
    forks = Forks(kv, seating)
    forks.expect(leader, (sibling,))
    assert forks.fork(leader) == (sibling,)
    assert (sibling.num_computed, int(kv.promised[sibling.row])) == (num_found, num_promised)
    assert (kv.tables.of(sibling.row)[:2] == kv.tables.of(leader.row)[:2]).all() == (num_found == 5)
    kv.audit()

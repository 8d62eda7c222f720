"""Several continuations of one prompt: computed once, shared by blocks, admitted and preempted as one."""

import numpy as np
import pytest

from quire.core.errors import NeverFits
from quire.core.ids import RequestId, Row
from quire.core.request import BlockOwner, EventKind, Request, RequestGroup, SequenceState
from quire.core.sampling import RowSampling
from quire.core.step import FinishReason
from quire.kv.manager import KVManager
from quire.sched.parallel_sampling import SiblingForks
from quire.sched.rows import RowAllocator
from tests.sched.stepping import Bench, counting, events_of, oracle_output

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
PROMPT = counting(1, 10)  # two blocks and a half


def test_siblings_share_the_prompts_blocks_and_copy_only_its_tail() -> None:
    bench = Bench(oracle=True)
    sequences = bench.add_group(PROMPT, 4, 3)
    bench.turn()
    assert len(bench.plans[0].starts) == len(bench.plans[0].chunks) == 1, "the leader alone computes the prompt"
    bench.turn()
    plan = bench.plan
    assert [(chunk.start, chunk.length) for chunk in plan.chunks] == [(9, 1), (9, 1)]
    leader, *siblings = [bench.table(sequence) for sequence in sequences]
    assert siblings[0][:2] == siblings[1][:2] == leader[:2]
    assert len({siblings[0][2], siblings[1][2], leader[2]}) == 3
    assert [bench.readers(block) for block in leader] == [3, 3, 1]
    assert [(move.src.block, move.dst.block) for move in plan.moves] == [(leader[2], table[2]) for table in siblings]
    assert bench.scheduler.counters.forks == 2
    bench.run()
    assert all(bench.emitted[sequence.id] == oracle_output(PROMPT, 4, sequence.index) for sequence in sequences)
    assert bench.scheduler.counters.computed_tokens == 10 + 2 + 3 * 3, "the prompt once, two last tokens, decodes"


def test_a_prompt_that_ends_with_its_block_is_shared_but_for_its_last_token() -> None:
    """A sibling computes the last token itself, into a copy of the last block."""
    bench = Bench(oracle=True)
    sequences = bench.add_group(PROMPT[:9], 3, 2)
    bench.turns(2)
    assert not len(bench.plan.moves), "position 8 is the first of a block: nothing to copy"
    bench.run()
    assert all(bench.emitted[sequence.id] == oracle_output(PROMPT[:9], 3, sequence.index) for sequence in sequences)
    sequences = bench.add_group(PROMPT[:8], 3, 2)
    bench.turns(2)
    assert len(bench.plan.moves) == 1 and bench.readers(bench.table(sequences[0])[1]) == 1
    bench.run()
    assert all(bench.emitted[sequence.id] == oracle_output(PROMPT[:8], 3, sequence.index) for sequence in sequences)


def test_siblings_begin_when_all_but_the_prompts_last_token_is_computed() -> None:
    bench = Bench(oracle=True, budget=9, rows=4)
    first, second = bench.add_group(PROMPT, 3, 2)
    bench.turns(2)
    assert [(chunk.row, chunk.start) for chunk in bench.plan.chunks] == [(first.row, 9), (second.row, 9)]
    bench.run()


@DEPTHS
def test_siblings_start_even_if_their_leader_ends_at_once(depth: int) -> None:
    bench = Bench(oracle=True, depth=depth)
    sequences = bench.add_group(PROMPT, 1, 3)
    bench.run()
    assert [bench.emitted[sequence.id] for sequence in sequences] == [
        oracle_output(PROMPT, 1, index) for index in range(3)
    ]
    assert sum(chunk.length for plan in bench.plans for chunk in plan.chunks) == 12


@DEPTHS
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("turns", range(5))
def test_one_that_ends_leaves_the_others(depth: int, index: int, turns: int) -> None:
    bench = Bench(oracle=True, depth=depth, budget=6, rows=4)
    sequences = bench.add_group(PROMPT, 6, 3)
    bench.turns(turns)
    assert bench.scheduler.finish(sequences[index], FinishReason.STOP)
    silence = len(bench.emitted[sequences[index].id])
    bench.run()
    for sequence in sequences:
        expected = oracle_output(PROMPT, 6, sequence.index)
        assert bench.emitted[sequence.id] == (expected[:silence] if sequence.index == index else expected)
        assert sequence.tokens.tolist() == PROMPT + bench.emitted[sequence.id]


@DEPTHS
@pytest.mark.parametrize("turns", range(6))
def test_a_group_is_aborted_as_one(depth: int, turns: int) -> None:
    bench = Bench(oracle=True, depth=depth, budget=6, rows=4)
    sequences = bench.add_group(PROMPT, 6, 3)
    bystander = bench.add([77], 8)
    bench.turns(turns)
    assert bench.scheduler.abort(sequences[0].request.id) == sequences
    bench.run()
    assert bench.emitted[bystander.id] == oracle_output([77], 8)


def test_releasing_a_sibling_that_never_started_is_not_reported_to_the_runner() -> None:
    bench = Bench(oracle=True, budget=6, rows=3)
    for token in (70, 80, 90):
        bench.add([token], 1)
    bench.run_out()
    sequences = bench.add_group(PROMPT, 6, 3)
    bench.turn()
    bench.scheduler.abort(sequences[0].request.id)
    after = bench.add([60], 3)
    bench.turn()
    assert len(bench.plan.releases) == 1, "the leader's row alone"
    bench.run()
    assert bench.emitted[after.id] == oracle_output([60], 3)


def test_siblings_of_a_failed_leader_start_again() -> None:
    bench = Bench(oracle=True)
    leader, *siblings = bench.add_group(PROMPT, 3, 3)
    bench.poison(leader)
    bench.turn()
    assert leader.finish_reason is FinishReason.ERROR
    assert [sibling.state for sibling in siblings] == [SequenceState.WAITING] * 2
    bench.run()
    assert [bench.emitted[sibling.id] for sibling in siblings] == [oracle_output(PROMPT, 3, index) for index in (1, 2)]
    assert [chunk.start for chunk in bench.chunks_of(siblings[0])] == [0], "nothing of the poisoned prompt was kept"
    assert siblings[0].group.num_preemptions == 0


@DEPTHS
def test_a_group_is_preempted_and_readmitted_as_one(depth: int) -> None:
    """7 blocks for the first and 5 for each sibling, of 12."""
    bench = Bench(oracle=True, blocks=12, block_size=2, rows=3, depth=depth)
    first = bench.add([1, 2], 12)
    sequences = bench.add_group([3, 4], 8, 2)
    group = sequences[0].group
    while not bench.scheduler.idle:
        bench.turn()
        states = {sequence.state for sequence in sequences if not sequence.finished}
        assert SequenceState.RUNNING not in states or len(states) == 1, "some have rows and some wait"
    assert group.num_preemptions == len(events_of(sequences[0], EventKind.PREEMPTED)) > 0
    assert first.group.num_preemptions == 0
    assert bench.emitted[first.id] == oracle_output([1, 2], 12)
    assert [bench.emitted[sequence.id] for sequence in sequences] == [
        oracle_output([3, 4], 8, index) for index in range(2)
    ]
    bench.run()


def test_a_group_is_admitted_only_as_a_whole() -> None:
    bench = Bench(oracle=True, rows=3)
    alone = bench.add([1], 4)
    sequences = bench.add_group(PROMPT, 3, 3)
    bench.turn()
    assert all(sequence.state is SequenceState.WAITING for sequence in sequences)
    bench.run()
    assert bench.finished[sequences[0].id] > bench.finished[alone.id]


def test_the_worst_case_of_a_group_counts_shared_blocks_once() -> None:
    """10 prompt tokens and 6 more: 4 blocks for the leader, 2 for each sibling."""
    bench = Bench(oracle=True, blocks=8)
    sequences = bench.add_group(PROMPT, 7, 3)
    bench.run()
    assert all(bench.emitted[sequence.id] == oracle_output(PROMPT, 7, sequence.index) for sequence in sequences)
    assert bench.num_preemptions == 0
    with pytest.raises(NeverFits, match="8 KV blocks"):
        Bench(blocks=7).add_group(PROMPT, 7, 3)


@pytest.mark.parametrize("num_generated", range(1, 9))
def test_a_readmitted_sibling_reserves_blocks_for_its_own_tokens(num_generated: int) -> None:
    """The leader is one token ahead, so in one of four cases it needs a block more than its siblings."""
    bench = Bench(oracle=True)
    leader, *siblings = bench.add_group(PROMPT, 20, 3)
    while len(bench.emitted[leader.id]) < num_generated:
        bench.turn()
    bench.scheduler.withdraw_all()
    plan = bench.scheduler.plan()
    assert plan is not None and leader.num_tokens == 10 + num_generated
    for sibling in siblings:
        assert sibling.row is not None and sibling.num_tokens == leader.num_tokens - 1
        num_blocks = -(-(sibling.num_tokens + 1) // 4) - 2  # its tokens and the next, without the prompt's full blocks
        assert bench.scheduler.kv.tables.reserved[sibling.row] == num_blocks
    bench.scheduler.absorb(bench.recorder.launch(plan).wait())
    bench.run()


def test_a_group_starts_from_the_cache() -> None:
    bench = Bench(oracle=True)
    bench.add(PROMPT, 3)
    bench.run_out()
    sequences = bench.add_group([*PROMPT, 500], 3, 2)
    bench.run()
    assert bench.chunks_of(sequences[0])[0].start == 10
    assert all(bench.emitted[sequence.id] == oracle_output([*PROMPT, 500], 3, sequence.index) for sequence in sequences)


@pytest.mark.parametrize("num_generated", range(1, 6))
def test_a_group_that_just_fits_ends_although_its_prompt_is_computed_anew(num_generated: int) -> None:
    """Prompt log-probabilities need the whole prompt again after a preemption: the cache has other blocks of it, which
    a sibling must not begin with. It shares the leader's, or the group would need more blocks than there are."""
    prompt = counting(1, 6)
    bench = Bench(blocks=10, block_size=2, rows=2, oracle=True)
    leader, sibling = bench.add_request(prompt, 6, RowSampling(num_prompt_logprobs=0), num_sequences=2)
    while len(bench.emitted[leader.id]) < num_generated:
        bench.turn()
    bench.scheduler.withdraw_all()
    bench.run()
    assert [bench.emitted[each.id] for each in (leader, sibling)] == [oracle_output(prompt, 6, i) for i in range(2)]


@pytest.mark.parametrize(("is_cached", "num_found"), [(True, 6), (False, 5)])
def test_a_sibling_begins_with_its_past_behind_the_leaders_prompt_and_else_with_the_prompt(
    is_cached: bool, num_found: int
) -> None:
    """Another left the whole prompt in the cache, in three blocks; the leader holds those, or three of its own. For its
    seven tokens the sibling reserved two beyond the prompt's shared two; in the cache it finds three."""
    kv, rows = KVManager(8, 2, 3), RowAllocator(3)
    prompt = np.array(PROMPT[:6], np.int32)
    group = RequestGroup(Request(RequestId(1), prompt, 4, RowSampling(), 2), 0, 0.0)
    leader, sibling = group.sequences
    sibling.tokens = np.append(prompt, np.int32(99))
    for sequence in (leader, sibling):
        rows.assign(sequence, rows.take_row(), 0, 0)
    assert leader.row is not None and sibling.row is not None
    other, owner = BlockOwner(RequestId(2), "", 0), group.owner
    kv.open(Row(2), other, None, 3)
    kv.grow_to(Row(2), 6, other.request)
    kv.commit(Row(2), other, prompt)
    kv.open(leader.row, owner, kv.match(owner, prompt, 6) if is_cached else None, 0 if is_cached else 3)
    kv.grow_to(leader.row, 6, owner.request)
    kv.commit(leader.row, owner, prompt)
    kv.close(Row(2), other, prompt)
    kv.reserve(sibling.row, 2)
    leader.num_computed = 6
    forks = SiblingForks(kv, rows)
    forks.wait_for_prompt(leader, (sibling,))
    assert forks.fork(leader) == (sibling,)
    assert (sibling.num_computed, int(kv.tables.reserved[sibling.row])) == (num_found, 1)
    assert (kv.tables.of(sibling.row)[:2] == kv.tables.of(leader.row)[:2]).all()
    kv.audit()

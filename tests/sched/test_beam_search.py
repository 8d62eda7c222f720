"""Beam search in the engine: rows and tables follow the search, and its choices are those of the closed form."""

import pytest

from quire.core.request import BeamParams, Sequence, SequenceState
from quire.core.sampling import RowSampling
from quire.core.step import ChunkOutput, FinishReason
from quire.sched.reservation import most_blocks
from quire.sim.check.expected import expect
from tests.sched.stepping import VOCAB, Bench, counting, oracle_output

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
PROMPT = counting(1, 6)


def assert_found(bench: Bench, sequences: tuple[Sequence, ...]) -> None:
    """What the same search finds without an engine."""
    outcomes = expect(sequences[0].request, VOCAB)
    assert len(outcomes) == len(sequences)
    for sequence, outcome in zip(sequences, outcomes, strict=True):
        assert sequence.tokens[len(sequence.request.prompt) :].tolist() == outcome.tokens
        assert sequence.finish_reason is outcome.reason and sequence.score is not None
        assert bench.emitted[sequence.id] == [], "beams are reported at the end"
        assert sequence.id in bench.finished


@DEPTHS
@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_search_finds_what_the_closed_form_says(depth: int, width: int) -> None:
    bench = Bench(oracle=True, depth=depth)
    sequences = bench.add_beams(PROMPT, 12, width)
    other = bench.add([50, 51], 9)
    bench.run()
    assert_found(bench, sequences)
    assert bench.emitted[other.id] == oracle_output([50, 51], 9)


def test_beams_append_tokens_fork_and_share_their_common_blocks() -> None:
    bench = Bench(oracle=True)
    sequences = bench.add_beams(PROMPT, 8, 3)
    bench.turn()
    (chunk,) = bench.plan.chunks
    assert chunk.output is ChunkOutput.CANDIDATES and len(bench.plan.starts) == 1
    bench.turn()
    plan = bench.plan
    assert len(plan.appends) == 1 and len(plan.starts) == 2, "the best continues in its row, two fork from it"
    assert all(row_start.tokens[:-1].tolist() == PROMPT for row_start in plan.starts)
    assert [(chunk.start, chunk.length, chunk.output) for chunk in plan.chunks] == [(6, 1, ChunkOutput.CANDIDATES)] * 3
    assert len(plan.moves) == 2, "the half block of the prompt is copied for each"
    tables = [bench.table(sequence) for sequence in sequences]
    assert tables[0][0] == tables[1][0] == tables[2][0] and bench.readers(tables[0][0]) == 3
    bench.run()
    assert_found(bench, sequences)


def test_dead_beams_give_their_blocks_back() -> None:
    """The living never hold more than they could need, and some search forks after its start."""
    bench = Bench(oracle=True, block_size=2, blocks=40)
    sequences = bench.add_beams(PROMPT, 16, 3)
    most = most_blocks(sequences[0].request, 2)
    while not bench.scheduler.idle:
        bench.turn()
        held = {block for sequence in sequences if sequence.row is not None for block in bench.table(sequence)}
        assert len(held) <= most
        assert all(bench.readers(block) > 0 for block in held)
    assert bench.scheduler.counters.forks > 2, "a beam died after the first step"
    assert_found(bench, sequences)
    bench.run()


def test_a_search_fits_where_its_worst_case_just_fits() -> None:
    bench = Bench(oracle=True, blocks=4 + 2 * 3, rows=3)  # 13 positions: 4 blocks, one of them the prompt's
    sequences = bench.add_beams(PROMPT, 8, 3)
    assert most_blocks(sequences[0].request, 4) == 10
    bench.run()
    assert_found(bench, sequences)


@DEPTHS
@pytest.mark.parametrize("turns", range(1, 9))
def test_a_search_preempted_in_the_middle_finds_the_same(depth: int, turns: int) -> None:
    bench = Bench(oracle=True, depth=depth, rows=3)
    sequences = bench.add_beams(PROMPT, 10, 3, priority=1)
    bench.turns(turns)
    urgent = bench.add([9], 2)
    bench.run()
    assert sequences[0].group.num_preemptions == 1
    assert bench.finished[urgent.id] < bench.finished[sequences[0].id]
    assert_found(bench, sequences)


@DEPTHS
@pytest.mark.parametrize("turns", range(8))
def test_a_search_can_be_aborted_at_every_moment(depth: int, turns: int) -> None:
    bench = Bench(oracle=True, depth=depth)
    sequences = bench.add_beams(PROMPT, 6, 3)
    bench.turns(turns)
    ended = bench.scheduler.abort(sequences[0].request.id)
    assert ended == (() if sequences[0].id in bench.finished else sequences)
    bench.run()


def test_a_search_that_loses_a_beam_ends() -> None:
    bench = Bench(oracle=True)
    sequences = bench.add_beams(PROMPT, 8, 3)
    bench.turns(3)
    bench.poison(next(sequence for sequence in sequences if sequence.state is SequenceState.RUNNING))
    bench.turn()
    assert [sequence.finish_reason for sequence in sequences] == [FinishReason.ERROR] * 3
    bench.run()
    assert set(bench.finished) == {sequence.id for sequence in sequences}


@pytest.mark.parametrize("first", range(3, 8))
@pytest.mark.parametrize("second", range(1, 6))
def test_what_a_beam_offered_before_its_step_was_lost_is_forgotten(first: int, second: int) -> None:
    """With four tokens a step the beams come back one after the other: some have offered when steps are lost again."""
    bench = Bench(oracle=True, rows=3, budget=4)
    sequences = bench.add_beams(PROMPT, 10, 3)
    for turns in (first, second):
        bench.turns(turns)
        bench.scheduler.lose_steps(keep_cache=True)
    bench.run()
    assert_found(bench, sequences)


@pytest.mark.parametrize("returned", [1, 2])
def test_an_abort_reports_only_the_beams_that_a_client_sees(returned: int) -> None:
    bench = Bench(oracle=True)
    sequences = bench.add_request(
        PROMPT, 6, RowSampling(num_candidates=6), num_sequences=3, beam=BeamParams(3, num_returned=returned)
    )
    bench.turns(3)
    assert bench.scheduler.abort(sequences[0].request.id) == sequences[:returned]
    bench.run()

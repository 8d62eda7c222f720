"""Runs of moves: carried all at once, each gives what its moves give one after the other."""

from hypothesis import example, given
from hypothesis import strategies as st

from quire.core.ids import BlockId
from quire.core.moves import Move, Place, Tier, runs

PLACES = st.builds(Place, st.sampled_from(Tier), st.integers(1, 3).map(BlockId))
MOVES = st.lists(st.builds(Move, PLACES, PLACES), max_size=12)


@given(MOVES)
def test_runs_hold_every_move_in_order(moves: list[Move]) -> None:
    told = [
        Move(Place(run.src, source), Place(run.dst, target))
        for run in runs(moves)
        for source, target in zip(run.sources, run.targets, strict=True)
    ]
    assert told == moves


def inside(source: int, target: int) -> Move:
    return Move(Place(Tier.DEVICE, BlockId(source)), Place(Tier.DEVICE, BlockId(target)))


@given(MOVES)
@example([inside(1, 2), inside(3, 1)])  # what the first reads, the second writes
@example([inside(1, 2), inside(2, 3)])  # and the reverse
def test_a_run_may_be_carried_all_at_once_or_backwards(moves: list[Move]) -> None:
    slowly = {Place(tier, BlockId(block)): f"{tier}{block}" for tier in Tier for block in range(1, 4)}
    at_once, backwards = dict(slowly), dict(slowly)
    for move in moves:
        slowly[move.dst] = slowly[move.src]
    for run in runs(moves):
        assert len(set(run.targets)) == len(run.targets), "two moves of a run write the same block"
        read = [at_once[Place(run.src, source)] for source in run.sources]
        at_once.update({Place(run.dst, target): held for target, held in zip(run.targets, read, strict=True)})
        pairs = list(zip(run.sources, run.targets, strict=True))
        for source, target in reversed(pairs):
            backwards[Place(run.dst, target)] = backwards[Place(run.src, source)]
    assert at_once == slowly == backwards


def test_a_long_transfer_is_one_run() -> None:
    moves = [Move(Place(Tier.DEVICE, BlockId(i)), Place(Tier.HOST, BlockId(9 - i))) for i in range(1, 9)]
    (run,) = runs(moves)
    assert run.sources == tuple(range(1, 9)) and run.targets == tuple(range(8, 0, -1))
    assert list(runs([])) == []

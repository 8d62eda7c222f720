"""The watch sees a law broken, and nothing where none is."""

from dataclasses import replace

import numpy as np
import pytest

from quire.core.ids import IntArray, RequestId, Row
from quire.core.request import BlockOwner
from quire.core.step import AppendTokens, Drafts, Masks, StepPlan, StepResult, Verified
from quire.kv.prefix_holds import HeldPrefix
from quire.kv.radix_node import NO_BLOCKS, Node
from quire.sim.check.invariants import InFlightWatch
from tests.runner.plans import DEVICE, HOST, grants, host_driven, moves, row_start, sample, seat_of

TEN = list(range(10))  # two blocks and a half


def watching(*, in_flight: bool = True) -> InFlightWatch:
    """Row 0 has computed ten tokens in blocks 1, 2 and 3; perhaps it still does."""
    watch = InFlightWatch(block_size=4)
    watch.launch(StepPlan(0, starts=(row_start(0, TEN),), grants=grants({0: [1, 2, 3]}), chunks=(sample(0, 0, 10),)))
    if not in_flight:
        watch.absorb(StepResult(0))
    return watch


def taking(block: int, **also: object) -> StepPlan:
    """Row 0 leaves, and another row is granted one block to write."""
    fields = {"releases": (Row(0),), "starts": (row_start(1, [7]),), **also}
    return StepPlan(1, grants=grants({1: [block]}), chunks=(sample(1, 0, 1),), **fields)  # type: ignore[arg-type]


def test_a_block_is_reused_only_after_its_last_step_is_absorbed() -> None:
    with pytest.raises(AssertionError, match="block 2 is still in flight"):
        watching().launch(taking(2))
    watching(in_flight=False).launch(taking(2))
    watching().launch(taking(9))


def test_a_row_is_reused_only_after_its_last_step_is_absorbed() -> None:
    again = StepPlan(
        1, releases=(Row(0),), starts=(seat_of(5, 0, [7]),), grants=grants({0: [9]}), chunks=(sample(0, 0, 1),)
    )
    with pytest.raises(AssertionError, match="row 0 is still in flight"):
        watching().launch(again)
    watching(in_flight=False).launch(again)


def test_a_row_that_no_step_in_flight_computes_may_be_reused() -> None:
    """A tethered row that nobody told anything: another step is in flight, but not over it."""
    watch = InFlightWatch(block_size=4)
    watch.launch(
        StepPlan(
            0,
            starts=(row_start(0, TEN, num_candidates=2), row_start(1, [5])),
            grants=grants({0: [1, 2, 3], 1: [4]}),
            chunks=(host_driven(0, 0, 10), sample(1, 0, 1)),
        )
    )
    watch.absorb(StepResult(0))
    watch.launch(StepPlan(1, num_decoding=1))
    watch.launch(
        StepPlan(
            2,
            releases=(Row(0),),
            starts=(seat_of(7, 0, [1, 2]),),
            grants=grants({0: [3]}),
            chunks=(sample(0, 0, 2),),
            num_decoding=1,
        )
    )


def test_a_source_of_a_move_may_be_granted_anew_in_the_same_plan() -> None:
    out = moves(DEVICE, HOST, (1, 1), (2, 2), (3, 3))
    watching(in_flight=False).launch(taking(2, moves=out))
    with pytest.raises(AssertionError, match="still in flight"):
        watching().launch(taking(2, moves=out))


def test_a_move_writes_no_block_that_is_in_flight() -> None:
    back = moves(HOST, DEVICE, (1, 2))
    with pytest.raises(AssertionError, match="a move writes it"):
        watching().launch(StepPlan(1, moves=back, releases=(Row(0),)))
    watch = watching(in_flight=False)
    watch.launch(StepPlan(1, moves=moves(DEVICE, HOST, (3, 1)), pauses=(Row(0),)))
    watch.absorb(StepResult(0))
    watch.launch(StepPlan(2, moves=back, releases=(Row(0),)))


def test_a_move_reads_a_block_that_was_written() -> None:
    with pytest.raises(AssertionError, match="holds nothing"):
        watching(in_flight=False).launch(StepPlan(1, moves=moves(HOST, DEVICE, (1, 2)), releases=(Row(0),)))


def test_a_move_writes_no_block_that_a_live_table_holds() -> None:
    with pytest.raises(AssertionError, match="a live table holds"):
        watching(in_flight=False).launch(StepPlan(1, moves=moves(HOST, DEVICE, (1, 2)), pauses=(Row(0),)))


def hit(start: int, *table: int) -> StepPlan:
    """A second row found so many tokens of the first in the cache."""
    return StepPlan(
        1,
        starts=(row_start(1, [*TEN, 99]),),
        grants=grants({1: table}),
        chunks=(sample(1, start, 11),),
        pauses=(Row(0),),
    )


def test_shared_blocks_are_read_but_never_written() -> None:
    watching(in_flight=False).launch(hit(8, 1, 2, 4))
    with pytest.raises(AssertionError, match="writes block 2, which 2 hold"):
        watching(in_flight=False).launch(hit(7, 1, 2, 4))
    with pytest.raises(AssertionError, match="writes block 3, which 2 hold"):
        watching(in_flight=False).launch(hit(10, 1, 2, 3))


def test_a_decoding_row_writes_no_shared_block() -> None:
    """Row 1 stands still with the block that row 0 writes at position 10."""
    watch = watching(in_flight=False)
    watch.launch(
        StepPlan(
            1,
            starts=(row_start(1, TEN * 2),),
            grants=grants({1: [1, 2, 3, 4, 5]}),
            chunks=(sample(1, 12, 20),),
            pauses=(Row(0),),
        )
    )
    with pytest.raises(AssertionError, match="row 0 writes block 3, which 2 hold"):
        watch.launch(StepPlan(2, pauses=(Row(1),), num_decoding=1))


def test_the_last_holder_writes_in_place() -> None:
    watch = watching(in_flight=False)
    watch.launch(
        StepPlan(
            1,
            releases=(Row(0),),
            starts=(row_start(1, [*TEN, 9]),),
            grants=grants({1: [1, 2, 3]}),
            chunks=(sample(1, 10, 11),),
        )
    )


def test_a_block_is_not_shared_before_its_writing_step_is_absorbed() -> None:
    with pytest.raises(AssertionError, match="found before it was written"):
        watching().launch(hit(8, 1, 2, 4))


@pytest.mark.parametrize("copied", [False, True])
def test_a_row_reads_no_block_of_another_partition(copied: bool) -> None:
    """Also not a copy, however equal the tokens are."""
    for partition, wrong in (("a", False), ("b", True)):
        watch = InFlightWatch(4, ["a", partition].__getitem__)
        watch.launch(
            StepPlan(0, starts=(row_start(0, TEN),), grants=grants({0: [1, 2, 3]}), chunks=(sample(0, 0, 10),))
        )
        watch.absorb(StepResult(0))
        table = [1, 2, 4] if not copied else [4]
        plan = hit(8 if not copied else 2, *table)._replace(
            starts=(row_start(1, [*TEN, 99] if not copied else [0, 1, 7]),),
            chunks=(sample(1, 8, 11) if not copied else sample(1, 2, 3),),
            moves=moves(DEVICE, DEVICE, (1, 4)) if copied else (),
        )
        if wrong:
            with pytest.raises(AssertionError, match="row 1 of partition 'b' reads block"):
                watch.launch(plan)
        else:
            watch.launch(plan)


def test_a_plan_masks_the_rows_that_sample_under_a_grammar_and_no_others() -> None:
    start = row_start(0, TEN)
    masked = start._replace(sampling=replace(start.sampling, masked=True))
    for row, plan_masks in ((start, (Row(0),)), (masked, ())):
        first = StepPlan(0, starts=(row,), grants=grants({0: [1, 2, 3]}), chunks=(sample(0, 0, 10),), masked=plan_masks)
        with pytest.raises(AssertionError, match="sample under a grammar"):
            InFlightWatch(block_size=4).launch(first)


def masked_watch() -> InFlightWatch:
    """Row 0 is under a grammar: its first token, 7, is known, and the next step waits for its mask."""
    start = row_start(0, TEN)
    masked = start._replace(sampling=replace(start.sampling, masked=True))
    watch = InFlightWatch(block_size=4)
    watch.launch(
        StepPlan(0, starts=(masked,), grants=grants({0: [1, 2, 3]}), chunks=(sample(0, 0, 10),), masked=(Row(0),))
    )
    watch.sample(masks_of({0: []}), _runs, _sum)
    watch.absorb(StepResult(0, np.array([0], np.int32), np.array([7], np.int32)))
    watch.launch(StepPlan(1, num_decoding=1, masked=(Row(0),)))
    return watch


def masks_of(generated: dict[int, list[int]]) -> Masks:
    return Masks(np.array([*generated], np.int32), np.array([_sum(each) for each in generated.values()], np.int32))


def _sum(generated: list[int]) -> IntArray:
    """The mask after these tokens."""
    return np.array([sum(generated)], np.int32)


def _runs(row: Row) -> bool:
    return False


def test_a_mask_is_of_the_tokens_that_its_row_has_and_of_no_others() -> None:
    masked_watch().sample(masks_of({0: [7]}), _runs, _sum)
    masked_watch().sample(masks_of({}), lambda row: row == 0, _sum)
    for wrong, match in (({0: []}, "another mask"), ({}, "need masks"), ({1: [7]}, "need masks")):
        with pytest.raises(AssertionError, match=match):
            masked_watch().sample(masks_of(wrong), _runs, _sum)
    with pytest.raises(AssertionError, match="need masks"):
        masked_watch().sample(masks_of({0: [7]}), lambda row: row == 0, _sum)


def test_a_row_with_drafts_has_masks_after_them_and_emits_no_more_tokens_than_masks() -> None:
    def launched() -> InFlightWatch:
        watch = masked_watch()
        watch.sample(masks_of({0: [7]}), _runs, _sum)
        watch.absorb(StepResult(1, np.array([0], np.int32), np.array([8], np.int32)))
        drafts = Drafts(np.array([0], np.int32), np.array([1], np.int32))
        watch.launch(StepPlan(2, num_decoding=1, masked=(Row(0),), drafts=drafts, grants=grants({0: [4]})))
        return watch

    drafted = {Row(0): np.array([9], np.int32)}
    two = Masks(np.array([0, 0], np.int32), np.array([_sum([7, 8]), _sum([7, 8, 9])]), passes=(1,))
    result = StepResult(2, np.array([0, 0], np.int32), np.array([9, 1], np.int32), passes=(1,))
    one = np.array([1], np.int32)
    result = result._replace(verified=Verified(np.array([0], np.int32), one, one))
    right = launched()
    right.sample(two, _runs, _sum, drafted)
    right.absorb(result)
    with pytest.raises(AssertionError, match="another mask"):
        launched().sample(two._replace(bits=two.bits[::-1]), _runs, _sum, drafted)
    with pytest.raises(AssertionError, match="another mask"):
        launched().sample(two, _runs, _sum, {Row(0): np.array([5], np.int32)})
    with pytest.raises(AssertionError, match="unplanned"):
        launched().sample(two, _runs, _sum, {Row(1): np.array([5], np.int32)})
    few = launched()
    few.sample(masks_of({0: [7, 8]}), _runs, _sum, drafted)
    with pytest.raises(AssertionError, match="2 tokens under 1 masks"):
        few.absorb(result)


def test_masks_come_after_the_step_before_and_before_the_next_launch() -> None:
    unsampled = masked_watch()
    with pytest.raises(AssertionError, match="waits for its masks"):
        unsampled.launch(StepPlan(2, num_decoding=1, masked=(Row(0),)))
    with pytest.raises(AssertionError, match="without a mask"):
        unsampled.absorb(StepResult(1))
    watch = masked_watch()
    watch.sample(masks_of({0: [7]}), _runs, _sum)
    with pytest.raises(AssertionError, match="twice"):
        watch.sample(masks_of({0: [7]}), _runs, _sum)
    watch.launch(StepPlan(2, num_decoding=1, masked=(Row(0),)))
    with pytest.raises(AssertionError, match="is in flight"):
        watch.sample(masks_of({0: [7]}), _runs, _sum)


def test_a_row_that_decodes_past_its_table_is_found() -> None:
    watch = watching(in_flight=False)
    watch.launch(StepPlan(1, num_decoding=1))
    watch.launch(StepPlan(2, num_decoding=1))
    with pytest.raises(AssertionError, match="position 12 beyond its 3 blocks"):
        watch.launch(StepPlan(3, num_decoding=1))


def test_the_length_ends_what_a_row_writes() -> None:
    watch = InFlightWatch(block_size=4)
    watch.launch(
        StepPlan(
            0, starts=(row_start(0, TEN, max_length=11),), grants=grants({0: [1, 2, 3]}), chunks=(sample(0, 0, 10),)
        )
    )
    for step in range(1, 5):
        watch.launch(StepPlan(step))


def test_appended_tokens_are_counted() -> None:
    watch = InFlightWatch(block_size=4)
    watch.launch(StepPlan(0, starts=(row_start(0, TEN[:3]),), grants=grants({0: [1]}), chunks=(host_driven(0, 0, 3),)))
    watch.absorb(StepResult(0))
    watch.launch(StepPlan(1, appends=(AppendTokens(Row(0), (5,)),), chunks=(sample(0, 3, 4),)))
    with pytest.raises(AssertionError, match="position 4 beyond its 1 blocks"):
        watch.launch(StepPlan(2, num_decoding=1))


def test_a_reset_clears_all_rows_and_steps() -> None:
    watch = watching()
    watch.launch(
        StepPlan(5, starts=(seat_of(3, 0, [1]),), grants=grants({0: [2]}), chunks=(sample(0, 0, 1),), reset=True)
    )
    watch.absorb(StepResult(0))
    with pytest.raises(IndexError):
        watch.absorb(StepResult(0))


def holding(*, cached: tuple[int, ...] = (), room: tuple[int, ...] = ()) -> InFlightWatch:
    """Row 0 has computed its blocks, and another engine reads or fills some."""
    watch, owner = watching(in_flight=False), BlockOwner(RequestId(1), "", 0)
    tokens, (leased, filled) = np.zeros(0, np.int32), (np.array(each, np.int32) for each in (cached, room))
    watch.holds = {0: HeldPrefix(0, owner, tokens, leased, filled, Node("", b"", NO_BLOCKS, 0))}
    return watch


def test_what_another_engine_reads_or_fills_is_left_alone() -> None:
    holding(cached=(8,), room=(9,)).launch(taking(7))
    holding(cached=(1,)).launch(hit(8, 1, 2, 4))
    with pytest.raises(AssertionError, match="writes block 9, which another engine reads"):
        holding(cached=(9,)).launch(taking(9))
    with pytest.raises(AssertionError, match="another engine fills it"):
        holding(room=(9,)).launch(taking(9))
    with pytest.raises(AssertionError, match="held as room"):
        holding(room=(2,)).launch(taking(7, moves=moves(DEVICE, HOST, (2, 1))))
    with pytest.raises(AssertionError, match="which another engine holds"):
        holding(cached=(9,)).launch(taking(7, moves=moves(DEVICE, DEVICE, (1, 9))))
    watch = watching()
    held = holding(room=(2,)).holds[0]
    with pytest.raises(AssertionError, match="still in flight: another engine writes it"):
        watch.note_filled(held)
    watch.lose_steps()
    watch.note_filled(held)

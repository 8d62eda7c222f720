"""The arrows of a sequence's life, and what a family remembers."""

import numpy as np
import pytest

from quire.core.events import Cause, Event, What
from quire.core.ids import IntArray, RequestId, Row
from quire.core.request import MOST_EVENTS, BeamParams, Family, Request, Sequence, State
from quire.core.sampling import RowSampling
from quire.core.step import FinishReason


def tokens(*ids: int) -> IntArray:
    return np.array(ids, dtype=np.int32)


def family(count: int = 1, beam: BeamParams | None = None) -> Family:
    request = Request(RequestId(7), tokens(1, 2, 3), 5, RowSampling(), num_sequences=count, beam=beam)
    return Family(request, 40, 0.5)


def seated() -> Sequence:
    (sequence,) = family().members
    sequence.seat(Row(2), 11, 1)
    return sequence


def state_of(sequence: Sequence) -> State:
    """By a call, so that a checker does not take the last state for the next."""
    return sequence.state


def test_a_preempted_sequence_keeps_its_tokens_and_owns_nothing() -> None:
    sequence = seated()
    assert (sequence.num_planned, sequence.num_computed, sequence.seated_step) == (1, 1, 11)
    sequence.leave(13, None)
    sequence.release(tokens(8, 9))
    assert state_of(sequence) is State.WAITING and sequence.row is None and not sequence.finished
    assert sequence.tokens.tolist() == [1, 2, 3, 8, 9] and sequence.num_tokens == 5
    assert (sequence.num_planned, sequence.num_computed, sequence.caught_up) == (0, 0, False)
    sequence.seat(Row(0), 20, 4)


def test_a_finished_sequence_is_finished_before_its_row_is_released() -> None:
    sequence = seated()
    sequence.leave(13, FinishReason.STOP)
    assert sequence.finished and state_of(sequence) is State.LEAVING
    sequence.release(tokens())
    assert state_of(sequence) is State.FINISHED and sequence.row is None


def test_one_that_was_preempted_and_leaves_may_still_be_finished() -> None:
    sequence = seated()
    sequence.leave(13, None)
    sequence.finish(FinishReason.ABORT)
    assert state_of(sequence) is State.LEAVING
    sequence.release(tokens(8))
    assert state_of(sequence) is State.FINISHED
    with pytest.raises(AssertionError):
        sequence.finish(FinishReason.ABORT)


def test_a_waiting_sequence_is_finished_at_once() -> None:
    (sequence,) = family().members
    sequence.finish(FinishReason.EXPIRED)
    assert state_of(sequence) is State.FINISHED and sequence.family.finished


def test_arrows_that_do_not_exist_assert() -> None:
    (waiting,) = family().members
    with pytest.raises(AssertionError):
        waiting.leave(1, None)
    with pytest.raises(AssertionError):
        waiting.release(tokens())
    running = seated()
    with pytest.raises(AssertionError):
        running.seat(Row(1), 3, 0)
    with pytest.raises(AssertionError):
        running.finish(FinishReason.ABORT)


def test_the_last_token_is_never_computed() -> None:
    (sequence,) = family().members
    assert sequence.request.max_length == 8 and sequence.last_position == 6


def test_a_familys_members_are_numbered_and_those_of_a_beam_answer_in_part() -> None:
    assert [(member.id, member.index) for member in family(3).members] == [(40, 0), (41, 1), (42, 2)]
    assert family(3).order == 40 and len(family(3).answers) == 3
    assert [member.index for member in family(3, BeamParams(3, num_returned=2)).answers] == [0, 1]


def test_a_wait_is_noted_when_its_cause_changes() -> None:
    one = family()
    for step, cause in enumerate((Cause.SEATS, Cause.SEATS, Cause.BLOCKS, Cause.SEATS)):
        one.note(Event(step, What.WAITED, cause=cause))
    assert [event.step for event in one.story] == [0, 2, 3] and one.waits_for is Cause.SEATS
    one.note(Event(4, What.SEATED))
    assert one.waits_for is None


def test_a_long_story_keeps_its_beginning_and_its_end() -> None:
    one = family()
    for step in range(500):
        one.note(Event(step, What.SEATED))
    assert len(one.story) == MOST_EVENTS
    half = MOST_EVENTS // 2
    assert [event.step for event in one.story[:half]] == list(range(half))
    assert [event.step for event in one.story[half:]] == list(range(500 - half, 500))

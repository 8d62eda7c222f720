"""The arrows of a sequence's life, and what a family remembers."""

import numpy as np
import pytest

from quire.core.ids import IntArray, RequestId, Row
from quire.core.request import (
    MAX_EVENTS,
    BeamParams,
    EventKind,
    Request,
    RequestEvent,
    RequestGroup,
    Sequence,
    SequenceState,
    WaitCause,
)
from quire.core.sampling import RowSampling
from quire.core.step import FinishReason


def tokens(*ids: int) -> IntArray:
    return np.array(ids, dtype=np.int32)


def group(count: int = 1, beam: BeamParams | None = None) -> RequestGroup:
    request = Request(RequestId(7), tokens(1, 2, 3), 5, RowSampling(), num_sequences=count, beam=beam)
    return RequestGroup(request, 40, 0.5)


def assigned() -> Sequence:
    (sequence,) = group().sequences
    sequence.assign(Row(2), 11, 1)
    return sequence


def state_of(sequence: Sequence) -> SequenceState:
    """By a call, so that a checker does not take the last state for the next."""
    return sequence.state


def test_a_preempted_sequence_keeps_its_tokens_and_owns_nothing() -> None:
    sequence = assigned()
    assert (sequence.num_planned, sequence.num_computed, sequence.assigned_step) == (1, 1, 11)
    sequence.stop(13, None)
    sequence.release(tokens(8, 9))
    assert state_of(sequence) is SequenceState.WAITING and sequence.row is None and not sequence.finished
    assert sequence.tokens.tolist() == [1, 2, 3, 8, 9] and sequence.num_tokens == 5
    assert (sequence.num_planned, sequence.num_computed, sequence.caught_up) == (0, 0, False)
    sequence.assign(Row(0), 20, 4)


def test_a_finished_sequence_is_finished_before_its_row_is_released() -> None:
    sequence = assigned()
    sequence.stop(13, FinishReason.STOP)
    assert sequence.finished and state_of(sequence) is SequenceState.RELEASING
    sequence.release(tokens())
    assert state_of(sequence) is SequenceState.FINISHED and sequence.row is None


def test_a_preempted_sequence_may_be_finished_before_its_release() -> None:
    sequence = assigned()
    sequence.stop(13, None)
    sequence.finish(FinishReason.ABORT)
    assert state_of(sequence) is SequenceState.RELEASING
    sequence.release(tokens(8))
    assert state_of(sequence) is SequenceState.FINISHED
    with pytest.raises(AssertionError):
        sequence.finish(FinishReason.ABORT)


def test_a_waiting_sequence_is_finished_at_once() -> None:
    (sequence,) = group().sequences
    sequence.finish(FinishReason.EXPIRED)
    assert state_of(sequence) is SequenceState.FINISHED and sequence.group.finished


def test_invalid_transitions_assert() -> None:
    (waiting,) = group().sequences
    with pytest.raises(AssertionError):
        waiting.stop(1, None)
    with pytest.raises(AssertionError):
        waiting.release(tokens())
    running = assigned()
    with pytest.raises(AssertionError):
        running.assign(Row(1), 3, 0)
    with pytest.raises(AssertionError):
        running.finish(FinishReason.ABORT)


def test_the_last_token_is_never_computed() -> None:
    (sequence,) = group().sequences
    assert sequence.request.max_length == 8 and sequence.last_position == 6


def test_sequences_of_a_group_are_numbered_and_some_beams_are_returned() -> None:
    assert [(sequence.id, sequence.index) for sequence in group(3).sequences] == [(40, 0), (41, 1), (42, 2)]
    assert group(3).order == 40 and len(group(3).returned) == 3
    assert [sequence.index for sequence in group(3, BeamParams(3, num_returned=2)).returned] == [0, 1]


def test_a_wait_is_noted_when_its_cause_changes() -> None:
    one = group()
    for step, cause in enumerate((WaitCause.ROWS, WaitCause.ROWS, WaitCause.BLOCKS, WaitCause.ROWS)):
        one.note(RequestEvent(step, EventKind.WAITED, cause=cause))
    assert [event.step for event in one.events] == [0, 2, 3] and one.waits_for is WaitCause.ROWS
    one.note(RequestEvent(4, EventKind.ADMITTED))
    assert one.waits_for is None


def test_a_long_event_list_keeps_its_first_half_and_the_latest() -> None:
    one = group()
    for step in range(500):
        one.note(RequestEvent(step, EventKind.ADMITTED))
    assert len(one.events) == MAX_EVENTS
    half = MAX_EVENTS // 2
    assert [event.step for event in one.events[:half]] == list(range(half))
    assert [event.step for event in one.events[half:]] == list(range(500 - half, 500))

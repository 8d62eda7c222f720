"""Frames say the same on both ends; what is no frame is named and dropped, and never runs anything."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.core.errors import InvalidParameter, QueueFull, QuireError
from quire.core.ids import Row
from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason, PromptLogprobs, TopLogprobs
from quire.engine.messages import Accepted, AddRequest, FinishedSequence, FirstToken, StepOutput
from quire.engine.request_options import RequestOptions
from quire.engine.wire import (
    MAX_FRAME_BYTES,
    AbortFrame,
    BrokenFrame,
    FrameDecoder,
    Message,
    ProblemFrame,
    StartFrame,
    accepted_frame,
    accepted_of,
    error_of,
    order_frame,
    order_of,
    pack,
    problem_frame,
    progress_frame,
    progress_of,
    read_for_engine,
    read_for_front,
)

PARAMS = SamplingParams(
    n=3, temperature=0.5, stop=["a", "ü"], logit_bias={7: -1.5}, seed=2**62, logprobs=2, max_tokens=None
)
ORDER = AddRequest(
    5,
    [1, 2, 49151],
    PARAMS,
    ((1, 2), (3,)),
    RequestOptions(priority=-3, tenant="t", cache_salt="s", timeout_s=1.5),
    pooled=True,
    without_tokens=True,
)


def crossed(message: Message) -> bytes:
    (frame,) = FrameDecoder().feed(pack(message))
    return frame


def scores(token: int) -> TopLogprobs:
    return TopLogprobs(token, -0.25, 2, np.array([token, 1], dtype=np.int32), np.array([-0.25, -3.0], dtype=np.float32))


def test_an_order_crosses_whole():
    assert order_of(read_for_engine(crossed(order_frame(ORDER)))) == ORDER


def test_the_settings_cross_whole():
    for serving in (True, False):
        start = StartFrame(EngineConfig(model="m", threads=2, itl_target_ms=12.5), "script", serving)
        assert read_for_engine(crossed(start)) == start


def test_progress_crosses_whole():
    progress = StepOutput(
        9,
        np.array([3, 4], dtype=np.int64),
        np.array([70, 80], dtype=np.int32),
        (FirstToken(1, 2.5, 16), FirstToken(2, None, 0)),
        (FinishedSequence(1, 3, FinishReason.LENGTH, np.array([70], dtype=np.int32), -0.5, 2, True),),
        {3: scores(70)},
        {4: PromptLogprobs(Row(1), 1, (scores(8), scores(9)))},
        {5: np.array([0.5, -2.0], dtype=np.float32)},
    )
    back = progress_of(read_for_front(crossed(progress_frame(progress))))
    assert back.sequences.tolist() == [3, 4] and back.tokens.tolist() == [70, 80] and back.step == 9
    assert back.begun == progress.begun
    (over,) = back.ended
    assert over.tokens.tolist() == [70] and over[:3] == progress.ended[0][:3] and over[4:] == (-0.5, 2, True)
    assert back.logprobs[3].ids.tolist() == [70, 1] and back.logprobs[3][:3] == (70, -0.25, 2)
    assert [top.token for top in back.prompt_logprobs[4].scores] == [8, 9] and back.prompt_logprobs[4].start == 1
    assert back.pooled[5].dtype == np.float32 and back.pooled[5].tolist() == [0.5, -2.0]
    assert not back.empty and StepOutput(3).empty


def test_an_acceptance_crosses():
    assert accepted_of(read_for_front(crossed(accepted_frame(Accepted(1, 2, 3))))) == Accepted(1, 2, 3)


def test_an_error_arrives_as_it_was_raised():
    error = QueueFull(7, 5, "requests")
    error.retry_after_s = 3.0
    said = read_for_front(crossed(problem_frame(error, 4)))
    assert isinstance(said, ProblemFrame) and said.number == 4
    told = error_of(said)
    assert isinstance(told, QuireError)
    assert (told.status, told.code, told.message, told.retry_after_s) == (429, "queue_full", error.message, 3.0)


def test_what_the_door_would_refuse_is_refused_while_it_is_read():
    frame = crossed(order_frame(ORDER))
    assert b"\xa1n\x03" in frame
    with pytest.raises(InvalidParameter, match="n must be"):
        read_for_engine(frame.replace(b"\xa1n\x03", b"\xa1n\x00"))


@given(st.integers(1, 40), st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=30))
def test_frames_come_out_whole_however_the_bytes_arrive(size, numbers):
    stream = b"".join(pack(AbortFrame(number)) for number in numbers)
    unpacker = FrameDecoder()
    frames = [frame for at in range(0, len(stream), size) for frame in unpacker.feed(stream[at : at + size])]
    assert [read_for_engine(frame) for frame in frames] == [AbortFrame(number) for number in numbers]


def test_a_frame_longer_than_any_is_refused_before_it_is_read():
    with pytest.raises(BrokenFrame, match=str(MAX_FRAME_BYTES)):
        list(FrameDecoder().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big")))


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a frame ran code",))


@given(st.data())
def test_mutated_frames_are_read_or_named_and_run_nothing(data):
    frame = bytearray(crossed(order_frame(replace(ORDER, prompt=[1, 2, 3]))))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    for bad in (bytes(frame), bytes(frame[: data.draw(st.integers(0, len(frame)))]), pickle.dumps(Bomb())):
        for read in (read_for_engine, read_for_front):
            try:
                read(bad)
            except (BrokenFrame, QuireError):
                continue

"""Messages survive encoding and decoding; other bytes are logged and dropped, and execute nothing."""

import pickle
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.core.errors import InvalidParameter, QueueFull, QuireError
from quire.core.ids import Row
from quire.core.sampling import SamplingParams
from quire.core.shared_blocks import BlockAddress, DeviceMemory, NetworkMemory
from quire.core.step import FinishReason, PromptLogprobs, TopLogprobs
from quire.core.step_output import DraftCounts, FinishedSequence, FirstToken, StepOutput
from quire.engine.kv_events import KvEventsConfig
from quire.engine.messages import (
    AbortRequest,
    Accepted,
    AddRequest,
    Heartbeat,
    ImportPrefix,
    LeasePrefix,
    LoadProgress,
    PromptTransfer,
    Query,
    QueryReply,
    Refused,
    ReleaseLease,
    RequestOptions,
    StartEngine,
    StopSequence,
)
from quire.engine.prefix_transfer import EngineRole, PrefixLease, TransferFailure
from quire.engine.startup import StartupPhase
from quire.engine.stats import EngineInfo, EngineStats, MemoryUsage
from quire.engine.wire import (
    MAX_FRAME_BYTES,
    BrokenFrame,
    FrameDecoder,
    Message,
    ToEngine,
    ToFront,
    pack,
    read_for_engine,
    read_for_front,
    request_number,
)
from quire.sched.prompt_split import PrefillCosts
from tests.tiers import examples

PARAMS = SamplingParams(
    n=3, temperature=0.5, stop=["a", "ü"], logit_bias={7: -1.5}, seed=2**62, logprobs=2, max_tokens=None
)
REQUEST = AddRequest(
    5,
    [1, 2, 49151],
    PARAMS,
    ((1, 2), (3,)),
    RequestOptions(priority=-3, tenant="t", cache_salt="s", timeout_s=1.5, client="c"),
    pooled=True,
    without_tokens=True,
)

NUMBER = st.integers(0, 2**63 - 1)
TEXT = st.text(max_size=8)
SECONDS = st.floats(allow_nan=False, allow_infinity=False)


def array(dtype: type[np.generic]) -> st.SearchStrategy[np.ndarray]:
    numbers = (
        st.integers(-(2**31), 2**31 - 1) if issubclass(dtype, np.integer) else st.floats(width=32, allow_nan=False)
    )
    return st.lists(numbers, max_size=4).map(lambda values: np.array(values, dtype=dtype))


TOP = st.builds(TopLogprobs, NUMBER, SECONDS, NUMBER, array(np.int32), array(np.float32))
STEP_OUTPUT = st.builds(
    StepOutput,
    NUMBER,
    array(np.int64),
    array(np.int32),
    st.lists(st.builds(FirstToken, NUMBER, st.none() | SECONDS, NUMBER), max_size=2).map(tuple),
    st.lists(
        st.builds(
            FinishedSequence,
            NUMBER,
            NUMBER,
            st.sampled_from(FinishReason),
            array(np.int32),
            st.none() | SECONDS,
            NUMBER,
            st.booleans(),
        ),
        max_size=2,
    ).map(tuple),
    st.dictionaries(NUMBER, st.lists(TOP, min_size=1, max_size=2).map(tuple), max_size=2),
    st.dictionaries(
        NUMBER, st.builds(PromptLogprobs, NUMBER.map(Row), NUMBER, st.lists(TOP, max_size=2).map(tuple)), max_size=2
    ),
    st.dictionaries(NUMBER, array(np.float32), max_size=2),
    st.dictionaries(NUMBER, st.builds(DraftCounts, NUMBER, NUMBER), max_size=2),
)
ADDRESS = st.builds(
    BlockAddress,
    *[NUMBER] * 6,
    st.none() | st.builds(DeviceMemory, TEXT, NUMBER, NUMBER),
    TEXT,
    st.none() | st.builds(NetworkMemory, TEXT, NUMBER, NUMBER),
)
PROMPT = st.lists(st.integers(0, 2**31 - 1), max_size=5)
MESSAGES = {
    StartEngine: st.builds(
        StartEngine,
        st.just(EngineConfig(model="m", threads=2, itl_target_ms=12.5)),
        st.none() | TEXT,
        st.booleans(),
        st.sampled_from([None, KvEventsConfig(replay_endpoint="tcp://127.0.0.1:5558", topic="kv", rank=1)]),
        st.none() | TEXT,
        st.sampled_from(EngineRole),
    ),
    AddRequest: st.builds(
        AddRequest,
        NUMBER,
        PROMPT,
        st.sampled_from([SamplingParams(), PARAMS]),
        st.lists(st.lists(NUMBER, max_size=2).map(tuple), max_size=2).map(tuple),
        st.builds(RequestOptions, tenant=TEXT, timeout_s=st.none() | st.floats(0, 1e6)),
        st.booleans(),
        st.booleans(),
        st.none() | st.builds(PromptTransfer, NUMBER, SECONDS, st.none() | st.sampled_from(TransferFailure)),
        TEXT,
    ),
    AbortRequest: st.builds(AbortRequest, NUMBER),
    StopSequence: st.builds(StopSequence, NUMBER, NUMBER),
    Query: st.builds(Query, NUMBER, TEXT, NUMBER),
    LeasePrefix: st.builds(LeasePrefix, NUMBER, TEXT, PROMPT),
    ReleaseLease: st.builds(ReleaseLease, NUMBER, NUMBER),
    ImportPrefix: st.builds(
        ImportPrefix,
        NUMBER,
        NUMBER,
        TEXT,
        st.integers(-100, 100),
        PROMPT,
        st.builds(PrefixLease, ADDRESS, TEXT, NUMBER, PROMPT),
    ),
    StartupPhase: st.builds(StartupPhase, TEXT, SECONDS, TEXT),
    LoadProgress: st.builds(LoadProgress, NUMBER, NUMBER),
    EngineInfo: st.builds(
        EngineInfo, TEXT, *[NUMBER] * 5, TEXT, TEXT, st.builds(MemoryUsage, NUMBER, NUMBER), NUMBER, NUMBER
    ),
    Refused: st.builds(Refused, st.none() | NUMBER, st.builds(QueueFull, NUMBER, NUMBER, TEXT)),
    Accepted: st.builds(Accepted, NUMBER, NUMBER, NUMBER),
    StepOutput: STEP_OUTPUT,
    EngineStats: st.builds(
        EngineStats, **{f.name: SECONDS if f.name.endswith("_s") else NUMBER for f in fields(EngineStats)[:-1]}
    ),
    QueryReply: st.builds(QueryReply, NUMBER, st.binary(max_size=8)),
    Heartbeat: st.builds(Heartbeat, SECONDS, SECONDS),
    PrefillCosts: st.builds(PrefillCosts, st.lists(NUMBER).map(tuple), st.lists(SECONDS).map(tuple), NUMBER, SECONDS),
}


def sent(message: Message) -> bytes:
    (frame,) = FrameDecoder().feed(pack(message))
    return frame


def plain(value: object) -> object:
    """For comparison: arrays with their data types, errors by their fields."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, QuireError):
        return value.status, value.code, value.exit_code, value.message, value.param, value.retry_after_s
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return type(value).__name__, [plain(each) for each in value]
    if is_dataclass(value):
        return type(value).__name__, [plain(getattr(value, each.name)) for each in fields(value)]
    return value


@pytest.mark.parametrize("kind", (*ToEngine.__args__, *ToFront.__args__), ids=lambda kind: kind.__name__)
@settings(max_examples=examples(20, 60))
@given(data=st.data())
def test_every_message_is_decoded_as_it_was_sent(kind, data):
    message = data.draw(MESSAGES[kind])
    read = read_for_engine if kind in ToEngine.__args__ else read_for_front
    assert plain(read(sent(message))) == plain(message)


def test_an_array_is_decoded_as_its_field_is_typed_whatever_was_sent():
    wide = StepOutput(1, np.array([3], dtype=np.int32), np.array([7], dtype=np.int64))
    read = read_for_front(sent(wide))
    assert read.sequences.dtype == np.int64 and read.tokens.dtype == np.int32
    assert (read.sequences.tolist(), read.tokens.tolist()) == ([3], [7])


def test_a_parameter_out_of_bounds_is_refused_while_it_is_decoded():
    frame = sent(REQUEST)
    assert b"\xa1n\x03" in frame
    broken = frame.replace(b"\xa1n\x03", b"\xa1n\x00")
    with pytest.raises(InvalidParameter, match="n must be"):
        read_for_engine(broken)
    assert request_number(broken) == REQUEST.number


def test_only_a_new_request_has_a_number_to_be_refused_by():
    assert request_number(sent(REQUEST)) == 5
    assert [request_number(frame) for frame in (sent(AbortRequest(5)), b"", b"\x01", b"\x01\xff")] == [None] * 4


@given(st.integers(1, 40), st.lists(NUMBER, min_size=1, max_size=30))
def test_frames_come_out_whole_however_the_bytes_arrive(size, numbers):
    stream = b"".join(pack(AbortRequest(number)) for number in numbers)
    decoder = FrameDecoder()
    frames = [frame for at in range(0, len(stream), size) for frame in decoder.feed(stream[at : at + size])]
    assert [read_for_engine(frame) for frame in frames] == [AbortRequest(number) for number in numbers]


def test_a_frame_longer_than_the_bound_is_refused_before_it_is_read():
    with pytest.raises(BrokenFrame, match=str(MAX_FRAME_BYTES)):
        list(FrameDecoder().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big")))


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a frame ran code",))


@given(st.data())
def test_mutated_frames_are_decoded_or_named_and_run_nothing(data):
    message = data.draw(st.just(replace(REQUEST, prompt=[1, 2, 3])) | MESSAGES[StepOutput] | MESSAGES[Refused])
    frame = bytearray(sent(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    for bad in (bytes(frame), bytes(frame[: data.draw(st.integers(0, len(frame)))]), pickle.dumps(Bomb())):
        request_number(bad)
        for read in (read_for_engine, read_for_front):
            try:
                read(bad)
            except (BrokenFrame, QuireError):
                continue

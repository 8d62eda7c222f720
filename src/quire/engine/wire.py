"""The words between front and engine as bytes: msgspec frames with a length before each, over a stream socket.

Every frame is one of two closed unions, typed to the bone: what does not fit raises `BrokenFrame` and is dropped by
whoever reads. The one place that knows msgspec's messages; nothing here can be made to run code.
"""

from collections.abc import Iterator

import msgspec
import numpy as np

from quire.config import EngineConfig
from quire.core.errors import QuireError
from quire.core.fault_injection import FaultSite, trip
from quire.core.ids import Row
from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason, PromptLogprobs, TopLogprobs
from quire.engine.messages import Accepted, AddRequest, FinishedSequence, FirstToken, Refused, StepOutput
from quire.engine.request_options import RequestOptions
from quire.engine.stats import EngineInfo, EngineStats

MAX_FRAME_BYTES = 256 << 20
_LENGTH_BYTES = 4


class BrokenFrame(Exception):
    """Bytes that are no message."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """All of them are short arrays whose first item says which."""


# Front to engine.


class StartFrame(Message, tag=1, frozen=True):
    config: EngineConfig
    script: str | None  # the path of a scripted model's lines, in the place of a model
    serving: bool = True  # False: nobody waits for his next token


class AddRequestFrame(Message, tag=2, frozen=True):
    number: int
    prompt: list[int]
    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...]
    terms: RequestOptions
    pooled: bool
    without_tokens: bool


class AbortFrame(Message, tag=3, frozen=True):
    number: int


class StopFrame(Message, tag=4, frozen=True):
    number: int
    index: int


class AskFrame(Message, tag=5, frozen=True):
    """A question that is answered with the same token."""

    token: int
    what: str
    number: int = 0


class ArmFrame(Message, tag=6, frozen=True):
    """For tests of what breaks: the named site fails for one request. Ignored unless the engine was started for it."""

    site: str
    number: int


ToEngine = StartFrame | AddRequestFrame | AbortFrame | StopFrame | AskFrame | ArmFrame

# Engine to front.


class PhaseFrame(Message, tag=1, frozen=True):
    name: str
    seconds: float
    detail: str


class LoadingFrame(Message, tag=8, frozen=True):
    """Weights come in: a start that takes long is no start that hangs."""

    done_bytes: int
    total_bytes: int


class ReadyFrame(Message, tag=2, frozen=True):
    facts: EngineInfo


class ProblemFrame(Message, tag=3, frozen=True):
    """An error of the user's, in words: of one request, or of the start if the number is None."""

    number: int | None
    status: int
    code: str
    exit_code: int
    message: str
    param: str | None
    retry_after_s: float | None


class AcceptedFrame(Message, tag=4, frozen=True):
    number: int
    first_sequence: int
    step: int


class ScoresFrame(Message, frozen=True):
    token: int
    logprob: float
    rank: int
    ids: bytes
    logprobs: bytes


class PromptScoresFrame(Message, frozen=True):
    row: int
    start: int
    scores: list[ScoresFrame]


class FinishedFrame(Message, frozen=True):
    number: int
    sequence: int
    reason: FinishReason
    tokens: bytes
    score: float | None
    num_preemptions: int
    by_token: bool


class FirstTokenFrame(Message, frozen=True):
    number: int
    seated_s: float | None
    num_cached: int


class StepOutputFrame(Message, tag=5, frozen=True):
    step: int
    sequences: bytes
    tokens: bytes
    begun: list[FirstTokenFrame]
    ended: list[FinishedFrame]
    logprobs: dict[int, ScoresFrame]
    prompt_logprobs: dict[int, PromptScoresFrame]
    pooled: dict[int, bytes]


class HeartbeatFrame(Message, tag=6, frozen=True):
    """The loop is alive, and this is how it stands."""

    stats: EngineStats


class ReplyFrame(Message, tag=7, frozen=True):
    token: int
    body: bytes  # JSON


ToFront = (
    PhaseFrame
    | LoadingFrame
    | ReadyFrame
    | ProblemFrame
    | AcceptedFrame
    | StepOutputFrame
    | HeartbeatFrame
    | ReplyFrame
)

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_front = msgspec.msgpack.Decoder(ToFront)


def pack(message: Message) -> bytes:
    """One frame, its length before it."""
    buffer = bytearray(_LENGTH_BYTES)
    _encoder.encode_into(message, buffer, _LENGTH_BYTES)
    buffer[:_LENGTH_BYTES] = (len(buffer) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "big")
    return bytes(buffer)


class FrameDecoder:
    """Whole frames out of bytes as they arrive."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH_BYTES:
            length = int.from_bytes(self._buffer[start : start + _LENGTH_BYTES], "big")
            if length > MAX_FRAME_BYTES:
                raise BrokenFrame(f"a frame of {length} bytes; the most is {MAX_FRAME_BYTES}")
            stop = start + _LENGTH_BYTES + length
            if len(self._buffer) < stop:
                break
            yield bytes(self._buffer[start + _LENGTH_BYTES : stop])
            start = stop
        del self._buffer[:start]


def read_for_engine(frame: bytes) -> ToEngine:
    """A `QuireError` if the frame is well formed but asks for what cannot be (a parameter out of bounds)."""
    try:
        read: ToEngine = _to_engine.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BrokenFrame(f"{type(error).__name__}: {error}") from error
    return read


def read_for_front(frame: bytes) -> ToFront:
    try:
        read: ToFront = _to_front.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BrokenFrame(f"{type(error).__name__}: {error}") from error
    return read


# Plain messages to frames and back.


def order_frame(order: AddRequest) -> AddRequestFrame:
    return AddRequestFrame(
        order.number,
        list(order.prompt),
        order.params,
        order.bad_words,
        order.terms,
        order.pooled,
        order.without_tokens,
    )


def order_of(frame: AddRequestFrame) -> AddRequest:
    return AddRequest(
        frame.number,
        frame.prompt,
        frame.params,
        frame.bad_words,
        frame.terms,
        frame.pooled,
        frame.without_tokens,
    )


def accepted_frame(accepted: Accepted) -> AcceptedFrame:
    return AcceptedFrame(*accepted)


def accepted_of(frame: AcceptedFrame) -> Accepted:
    return Accepted(frame.number, frame.first_sequence, frame.step)


def problem_frame(error: QuireError, number: int | None) -> ProblemFrame:
    return ProblemFrame(
        number, error.status, error.code, error.exit_code, error.message, error.param, error.retry_after_s
    )


class RemoteError(QuireError):
    """An error of the engine's, as the front repeats it."""


def refused_of(frame: ProblemFrame) -> Refused:
    return Refused(-1 if frame.number is None else frame.number, error_of(frame))


def error_of(frame: ProblemFrame) -> QuireError:
    error = RemoteError(frame.message, param=frame.param)
    error.status, error.code, error.exit_code = frame.status, frame.code, frame.exit_code
    error.retry_after_s = frame.retry_after_s
    return error


def progress_frame(progress: StepOutput) -> StepOutputFrame:
    return StepOutputFrame(
        progress.step,
        progress.sequences.astype("<i8", copy=False).tobytes(),
        progress.tokens.astype("<i4", copy=False).tobytes(),
        [FirstTokenFrame(*begun) for begun in progress.begun],
        [_ended_frame(over) for over in progress.ended],
        {name: _scores_frame(top) for name, top in progress.logprobs.items()},
        {
            name: PromptScoresFrame(scored.row, scored.start, [_scores_frame(top) for top in scored.scores])
            for name, scored in progress.prompt_logprobs.items()
        },
        {name: total.astype("<f4", copy=False).tobytes() for name, total in progress.pooled.items()},
    )


def progress_of(frame: StepOutputFrame) -> StepOutput:
    return StepOutput(
        frame.step,
        np.frombuffer(frame.sequences, dtype="<i8"),
        np.frombuffer(frame.tokens, dtype="<i4"),
        tuple(FirstToken(begun.number, begun.seated_s, begun.num_cached) for begun in frame.begun),
        tuple(_ended_of(over) for over in frame.ended),
        {name: _scores_of(top) for name, top in frame.logprobs.items()},
        {
            name: PromptLogprobs(Row(scored.row), scored.start, tuple(_scores_of(top) for top in scored.scores))
            for name, scored in frame.prompt_logprobs.items()
        },
        {name: np.frombuffer(total, dtype="<f4") for name, total in frame.pooled.items()},
    )


def _ended_frame(over: FinishedSequence) -> FinishedFrame:
    trip(FaultSite.ENCODE_FRAME, over.number)
    tokens = over.tokens.astype("<i4", copy=False).tobytes()
    return FinishedFrame(
        over.number, over.sequence, over.reason, tokens, over.score, over.num_preemptions, over.by_token
    )


def _ended_of(frame: FinishedFrame) -> FinishedSequence:
    tokens = np.frombuffer(frame.tokens, dtype="<i4")
    return FinishedSequence(
        frame.number, frame.sequence, frame.reason, tokens, frame.score, frame.num_preemptions, frame.by_token
    )


def _scores_frame(top: TopLogprobs) -> ScoresFrame:
    ids = top.ids.astype("<i4", copy=False).tobytes()
    return ScoresFrame(top.token, top.logprob, top.rank, ids, top.logprobs.astype("<f4", copy=False).tobytes())


def _scores_of(frame: ScoresFrame) -> TopLogprobs:
    ids, logprobs = np.frombuffer(frame.ids, dtype="<i4"), np.frombuffer(frame.logprobs, dtype="<f4")
    return TopLogprobs(frame.token, frame.logprob, frame.rank, ids, logprobs)

"""Messages between the front process and the engine process as length-prefixed msgpack frames over a stream socket.

A frame is a length (4 bytes, big endian), a tag (1 byte: which message) and the message itself, encoded by msgspec.
Decoding is typed: bytes that are not a message raise `BrokenFrame`, and no frame can run code. This is the only module
that depends on the encoding; the messages themselves are plain data (`engine/messages.py`).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from quire.core.errors import QuireError
from quire.core.fault_injection import FaultSite, trip_any
from quire.core.step_output import StepOutput
from quire.engine.messages import (
    AbortRequest,
    Accepted,
    AddRequest,
    Heartbeat,
    ImportPrefix,
    LeasePrefix,
    LoadProgress,
    Query,
    QueryReply,
    Refused,
    ReleaseLease,
    StartEngine,
    StopSequence,
)
from quire.engine.startup import StartupPhase
from quire.engine.stats import EngineInfo, EngineStats
from quire.sched.prompt_split import PrefillCosts

MAX_FRAME_BYTES = 256 << 20
_LENGTH_BYTES = 4
_HEADER_BYTES = _LENGTH_BYTES + 1

ToEngine = StartEngine | AddRequest | AbortRequest | StopSequence | Query | LeasePrefix | ReleaseLease | ImportPrefix
ToFront = (
    StartupPhase | LoadProgress | EngineInfo | Refused | Accepted | StepOutput | EngineStats | QueryReply | Heartbeat
    | PrefillCosts
)  # fmt: skip
Message = ToEngine | ToFront


class BrokenFrame(Exception):
    """Bytes that are not a message."""


class RemoteError(QuireError):
    """An engine-process error, re-created in the front process."""


class _ErrorFields(NamedTuple):
    status: int
    code: str
    exit_code: int
    message: str
    param: str | None
    retry_after_s: float | None


class _Numbered(msgspec.Struct):
    number: int


def _encode_other(value: object) -> object:
    """What msgspec does not encode itself: arrays as data type and bytes, errors as their fields."""
    match value:
        case np.ndarray():
            return value.dtype.newbyteorder("<").str, np.ascontiguousarray(value, value.dtype.newbyteorder("<")).data
        case QuireError():
            return _ErrorFields(*(getattr(value, name) for name in _ErrorFields._fields))
    raise NotImplementedError(f"objects of type {type(value).__name__} are not sent")


def _decode_other(kind: Any, value: Any) -> object:
    if kind is QuireError:
        fields = msgspec.convert(value, _ErrorFields)
        error = RemoteError(fields.message, param=fields.param)
        error.status, error.code, error.exit_code = fields.status, fields.code, fields.exit_code
        error.retry_after_s = fields.retry_after_s
        return error
    data_type, data = value
    if data_type not in ("<i4", "<i8", "<f4"):
        raise ValueError(f"an array of {data_type!r:.20}")
    (element,) = kind.__args__[1].__args__
    return np.frombuffer(data, data_type).astype(element, copy=False)


class _Decoders:
    """One direction: the tag of a message is its place in the union."""

    def __init__(self, union: Any) -> None:
        self.tags: dict[type, int] = {kind: tag for tag, kind in enumerate(union.__args__)}
        self._by_tag = [msgspec.msgpack.Decoder(kind, dec_hook=_decode_other) for kind in union.__args__]

    def decode(self, frame: bytes) -> Any:
        """A `QuireError` if the frame is well formed but holds a value out of bounds, such as a sampling parameter."""
        try:
            return self._by_tag[frame[0]].decode(memoryview(frame)[1:])
        except (msgspec.DecodeError, ValueError, IndexError, RecursionError) as error:
            raise BrokenFrame(f"{type(error).__name__}: {error}") from error


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_to_engine, _to_front = _Decoders(ToEngine), _Decoders(ToFront)
_tags = _to_engine.tags | _to_front.tags
_number = msgspec.msgpack.Decoder(_Numbered)


def pack(message: Message) -> bytes:
    """One frame, with its length."""
    if isinstance(message, StepOutput):
        trip_any(FaultSite.ENCODE_FRAME, (over.number for over in message.finished))
    buffer = bytearray(_HEADER_BYTES)
    _encoder.encode_into(message, buffer, _HEADER_BYTES)
    buffer[:_HEADER_BYTES] = (len(buffer) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "big") + bytes(
        [_tags[type(message)]]
    )
    return bytes(buffer)


def read_for_engine(frame: bytes) -> ToEngine:
    message: ToEngine = _to_engine.decode(frame)
    return message


def read_for_front(frame: bytes) -> ToFront:
    message: ToFront = _to_front.decode(frame)
    return message


def request_number(frame: bytes) -> int | None:
    """The number of the request that a frame adds, read apart: the rest of the frame may be unreadable."""
    if frame[:1] != bytes([_tags[AddRequest]]):
        return None
    try:
        return _number.decode(memoryview(frame)[1:]).number
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def as_json(value: object) -> bytes:
    """The body of a `QueryReply`."""
    return msgspec.json.encode(value)


class FrameDecoder:
    """Whole frames, without their lengths, out of bytes as they arrive."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH_BYTES:
            length = int.from_bytes(self._buffer[start : start + _LENGTH_BYTES], "big")
            if length > MAX_FRAME_BYTES:
                raise BrokenFrame(f"a frame of {length} bytes; the limit is {MAX_FRAME_BYTES}")
            stop = start + _LENGTH_BYTES + length
            if len(self._buffer) < stop:
                break
            yield bytes(self._buffer[start + _LENGTH_BYTES : stop])
            start = stop
        del self._buffer[:start]

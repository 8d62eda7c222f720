"""The lines of a batch, as OpenAI has them: what is asked, what is answered, and what was answered before.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
    {"id": "…", "custom_id": "a", "response": {"status_code": 200, "request_id": "…", "body": {…}}, "error": null}

Knows no engine and no files.
"""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from quire.core.errors import QuireError, shown

BEGINNING = b'{"id":"batch_req_'  # of every line of an answer that is written here
_MAX_WORDS = 200  # characters of a parser's complaint


class BadLine(QuireError):
    """A line that asks for nothing that could be answered. What it calls itself is kept, where that can be read."""

    code = "invalid_line"

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


class _ModelBody(msgspec.Struct):
    stream: bool | None = None


class _RequestLine(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _NamedBody(msgspec.Struct):
    custom_id: str


class _ResponseLine(msgspec.Struct):
    status_code: int


class _AnswerLine(msgspec.Struct):
    custom_id: str | None
    response: _ResponseLine | None
    error: dict[str, object] | None


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request of a batch."""

    line: int  # from 1 on
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class BatchReply:
    """What an endpoint answered."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None = None


def read_line(line: int, text: bytes, urls: Iterable[str]) -> BatchRequest:
    """A request, or a `BadLine` that says what is wrong with it."""
    try:
        asked = msgspec.json.decode(text, type=_RequestLine)
        wants_stream = msgspec.json.decode(asked.body, type=_ModelBody).stream
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(f"Line {line} is no request: {str(error)[:_MAX_WORDS]}.", _custom_id(text)) from error
    served = tuple(urls)
    if asked.method != "POST" or asked.url not in served:
        there = ", ".join(served)
        raise BadLine(
            f"Line {line} asks for {shown(f'{asked.method} {asked.url}')}; a batch may POST to {there}.",
            asked.custom_id,
        )
    if wants_stream:
        raise BadLine(f"Line {line} asks for a stream; the answers of a batch come whole.", asked.custom_id)
    return BatchRequest(line, asked.custom_id, asked.url, bytes(asked.body))


def _custom_id(text: bytes) -> str | None:
    """Of a line whose other parts could not be read."""
    try:
        return msgspec.json.decode(text, type=_NamedBody).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def answered(asked: BatchRequest, reply: BatchReply) -> bytes:
    """The line of an answer, whatever its status."""
    try:
        body = msgspec.json.decode(reply.body)
    except msgspec.DecodeError:
        body = reply.body.decode(errors="replace")
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": body}
    return _line(asked.custom_id, response, None)


def refused(line: int, bad: BadLine) -> bytes:
    """The line of one that could not be asked."""
    return _line(bad.custom_id, None, {"code": bad.code, "message": bad.message, "line": line})


def _line(custom_id: str | None, response: object, error: object) -> bytes:
    entry = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(entry) + b"\n"


class FinishedLines:
    """What an earlier run has answered. What was refused or failed is not among it: who runs a batch again wants that
    answered which was not, and may have mended a line, a name or a machine meanwhile."""

    __slots__ = ("_custom_ids",)

    def __init__(self) -> None:
        self._custom_ids: set[str] = set()

    def note(self, text: bytes) -> bool:
        """Whether a line of its output is an answer. What is no such line raises `BadLine`: it is another's file."""
        try:
            entry = msgspec.json.decode(text, type=_AnswerLine)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadLine("The output holds a line that is no answer of a batch; write to another file.") from error
        if entry.custom_id is None or entry.response is None or entry.response.status_code != 200:
            return False
        self._custom_ids.add(entry.custom_id)
        return True

    def answered(self, asked: BatchRequest) -> bool:
        return asked.custom_id in self._custom_ids

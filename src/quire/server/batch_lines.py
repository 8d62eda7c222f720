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

_MAX_WORDS = 200  # characters of a parser's complaint


class BadLine(QuireError):
    """A line that asks for nothing that could be answered."""

    code = "invalid_line"


class _Body(msgspec.Struct):
    stream: bool | None = None


class _Asked(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Error(msgspec.Struct):
    line: int | None = None


class _Answer(msgspec.Struct):
    custom_id: str | None = None
    error: _Error | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a batch."""

    line: int  # from 1 on
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """What an endpoint answered."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None = None


def read_line(line: int, text: bytes, urls: Iterable[str]) -> Asked:
    """A request, or a `BadLine` that says what is wrong with it."""
    try:
        asked = msgspec.json.decode(text, type=_Asked)
        wants_stream = msgspec.json.decode(asked.body, type=_Body).stream
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(f"Line {line} is no request: {str(error)[:_MAX_WORDS]}.") from error
    served = tuple(urls)
    if asked.method != "POST" or asked.url not in served:
        there = ", ".join(served)
        raise BadLine(f"Line {line} asks for {shown(f'{asked.method} {asked.url}')}; a batch may POST to {there}.")
    if wants_stream:
        raise BadLine(f"Line {line} asks for a stream; the answers of a batch come whole.")
    return Asked(line, asked.custom_id, asked.url, bytes(asked.body))


def answered(asked: Asked, reply: Reply) -> bytes:
    """The line of an answer, whatever its status."""
    try:
        body = msgspec.json.decode(reply.body)
    except msgspec.DecodeError:
        body = reply.body.decode(errors="replace")
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": body}
    return _line(asked.custom_id, response, None)


def refused(line: int, error: QuireError) -> bytes:
    """The line of one that could not be asked."""
    return _line(None, None, {"code": error.code, "message": error.message, "line": line})


def _line(custom_id: str | None, response: object, error: object) -> bytes:
    entry = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(entry) + b"\n"


class Past:
    """What an earlier run has answered."""

    __slots__ = ("_custom_ids", "_lines")

    def __init__(self) -> None:
        self._custom_ids: set[str] = set()
        self._lines: set[int] = set()

    def note(self, text: bytes) -> None:
        """A line of its output. What is no such line raises `BadLine`: it is somebody else's file."""
        try:
            answer = msgspec.json.decode(text, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadLine("The output holds a line that is no answer of a batch; write to another file.") from error
        if answer.custom_id is not None:
            self._custom_ids.add(answer.custom_id)
        elif answer.error is not None and answer.error.line is not None:
            self._lines.add(answer.error.line)

    def __len__(self) -> int:
        return len(self._custom_ids) + len(self._lines)

    def answered(self, asked: Asked) -> bool:
        return asked.custom_id in self._custom_ids

    def refused(self, line: int) -> bool:
        return line in self._lines

"""Batch lines in OpenAI's format: input lines to requests, responses to output lines, finished lines of earlier runs.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
    {"id": "…", "custom_id": "a", "response": {"status_code": 200, "request_id": "…", "body": {…}}, "error": null}

Does not depend on the engine or on files.
"""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from quire.core.errors import QuireError, shown
from quire.server.request.decode import body_error

BEGINNING = b'{"id":"batch_req_'  # of every output line
_MAX_MESSAGE = 200  # characters of a parser's message


Kind = TypeVar("Kind", bound=msgspec.Struct)


class InvalidLine(QuireError):
    """An input line that is not a valid request. Keeps its custom_id where that can be read."""

    code = "invalid_line"

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


class _UnservedFields(msgspec.Struct):
    stream: bool | None = None
    background: object = None


class _RequestLine(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _CustomIdLine(msgspec.Struct):
    custom_id: str


class _ResponseLine(msgspec.Struct):
    status_code: int


class _OutputLine(msgspec.Struct):
    custom_id: str | None
    response: _ResponseLine | None
    error: dict[str, object] | None


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request of a batch."""

    line: int  # from 1
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class BatchReply:
    """The response of an endpoint."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None = None


def read_line(line: int, text: bytes, urls: Iterable[str]) -> BatchRequest:
    """The request of an input line; raises `InvalidLine`."""
    try:
        request = _decode(text, _RequestLine, "it")
        fields = _decode(request.body, _UnservedFields, "body")
    except QuireError as error:
        raise InvalidLine(f"Line {line} is not a request: {error.message}", custom_id_of(text)) from error
    allowed = tuple(urls)
    if request.method != "POST" or request.url not in allowed:
        names = ", ".join(allowed)
        raise InvalidLine(
            f"Line {line} asks for {shown(f'{request.method} {request.url}')}; a batch may POST to {names}.",
            request.custom_id,
        )
    if fields.stream:
        raise InvalidLine(f"Line {line} asks for a stream; a batch has no streams.", request.custom_id)
    if fields.background is True:
        raise InvalidLine(f"Line {line} asks for a background response; a batch waits for each.", request.custom_id)
    return BatchRequest(line, request.custom_id, request.url, bytes(request.body))


def _decode(text: bytes | msgspec.Raw, kind: type[Kind], name: str) -> Kind:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise body_error(str(error), bytes(text), kind, name) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise QuireError(f"{str(error)[:_MAX_MESSAGE]}.") from error


def custom_id_of(text: bytes) -> str | None:
    """The custom_id of a line, which may otherwise be invalid."""
    try:
        return msgspec.json.decode(text, type=_CustomIdLine).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def response_line(request: BatchRequest, reply: BatchReply) -> bytes:
    """The output line of a response, with any status."""
    try:
        body = msgspec.json.decode(reply.body)
    except msgspec.DecodeError:
        body = reply.body.decode(errors="replace")
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": body}
    return _line(request.custom_id, response, None)


def error_message(body: bytes) -> str:
    """What the body of an error reply says, in the form of any of the APIs."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:_MAX_MESSAGE].decode(errors="replace")


def error_line(line: int, invalid: InvalidLine) -> bytes:
    """The output line of an invalid input line."""
    return _line(invalid.custom_id, None, {"code": invalid.code, "message": invalid.message, "line": line})


def _line(custom_id: str | None, response: object, error: object) -> bytes:
    entry = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(entry) + b"\n"


class FinishedLines:
    """The custom_ids with a 200 in the output of an earlier run. Errors are not among them: a second run retries
    those, since the line, the model or the machine may have been fixed."""

    __slots__ = ("_custom_ids",)

    def __init__(self) -> None:
        self._custom_ids: set[str] = set()

    def add(self, text: bytes) -> bool:
        """Adds an output line. Whether it has a 200. Raises `InvalidLine` for a line of another kind of file."""
        try:
            entry = msgspec.json.decode(text, type=_OutputLine)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidLine("The output file has a line that is not batch output; write to another file.") from error
        if entry.custom_id is None or entry.response is None or entry.response.status_code != 200:
            return False
        self._custom_ids.add(entry.custom_id)
        return True

    def __contains__(self, request: BatchRequest) -> bool:
        return request.custom_id in self._custom_ids

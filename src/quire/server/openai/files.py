"""OpenAI's files: POST /v1/files, which streams an upload to disk, and list, retrieve, content, delete.

The body is multipart/form-data with a `file` and a `purpose`. It is parsed as it arrives; what was received of an
upload that fails or is cut off is removed. The same for a server with one model and with several.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from quire.core.errors import InvalidParameter, QuireError, shown
from quire.server.admission import client_of
from quire.server.context import ServerState
from quire.server.file_store import FileStore, FileWriter
from quire.server.http.auth import ANONYMOUS
from quire.server.http.request_context import context_of
from quire.server.http.sse import json_response

PURPOSES = ("batch", "user_data", "assistants", "fine-tune", "vision", "evals")
_MAX_FIELD_BYTES = 4096  # of all fields but the file
_FIELD_BYTES = 64  # that each counts for, however short
_MAX_NAME = 255
_MIN_EXPIRY_S, _MAX_EXPIRY_S = 3600, 2592000  # OpenAI's limits
_MAX_LISTED, _NUM_LISTED = 10_000, 10_000
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"


class FilesNotServed(QuireError):
    """The server was started without a folder for files."""

    status = 404
    code = "not_served"

    def __init__(self) -> None:
        super().__init__("Files and batches are off: start the server with --files-dir FOLDER.")


class InvalidUpload(QuireError):
    """A body that is not the form of an upload."""

    code = "invalid_upload"


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except FormParserError as error:
        raise InvalidUpload(f"The body is not multipart/form-data: {str(error)[:200]}.") from error


class UploadParser:
    """The parts of a form as they arrive: the file to disk, the others to memory."""

    def __init__(self, boundary: bytes, writer: FileWriter) -> None:
        self._writer = writer
        self._header_name, self._header_value = b"", b""
        self._disposition = b""
        self._name = ""
        self._num_field_bytes = 0
        self.fields: dict[str, bytes] = {}
        self.filename: str | None = None
        self.is_complete = False
        with _refusing():  # a boundary that is too long
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._add_header_name,
                    "on_header_value": self._add_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_data,
                    "on_part_data": self._add_data,
                    "on_end": self._end,
                },
            )

    def write(self, data: bytes) -> None:
        with _refusing():
            self._parser.write(data)

    def _begin_part(self) -> None:
        self._disposition = self._header_name = self._header_value = b""

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _begin_data(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name in self.fields or (self._name == "file" and self.filename is not None):
            raise InvalidUpload(f"The form has {shown(self._name)} twice.")
        if self._name == "file":
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace") or "file"
        else:
            self._count(len(self._name) + _FIELD_BYTES)
            self.fields[self._name] = b""

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._writer.write(data[start:end])
            return
        self._count(end - start)
        self.fields[self._name] += data[start:end]

    def _count(self, num_bytes: int) -> None:
        self._num_field_bytes += num_bytes
        if self._num_field_bytes > _MAX_FIELD_BYTES:
            raise InvalidUpload(f"The fields of the form have more than {_MAX_FIELD_BYTES} bytes beside the file.")

    def _end(self) -> None:
        self.is_complete = True

    def text(self, name: str) -> str | None:
        value = self.fields.get(name)
        return None if value is None else value.decode("utf-8", "replace")


async def upload(state: ServerState, request: Request) -> Response:
    files = files_of(state)
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidUpload("An upload is multipart/form-data with a boundary, a file and a purpose.")
    client = client_of(context_of(request.scope).identity, request.scope)
    writer = files.begin(owner_of(request), client.name)
    try:
        form = UploadParser(boundary, writer)
        async for piece in request.stream():
            await run_in_threadpool(form.write, piece)
        purpose, expires_in_s = _checked(form)
        await run_in_threadpool(writer.close)
        name = str(form.filename).replace("\\", "/").rpartition("/")[2][:_MAX_NAME] or "file"
        stored = files.add(writer.path, writer.owner, name, purpose, expires_in_s=expires_in_s)
    finally:
        files.end(writer)
    return json_response(stored.public())


def _checked(form: UploadParser) -> tuple[str, int | None]:
    """Purpose and lifetime of a complete upload."""
    if not form.is_complete:
        raise InvalidUpload("The form has no end: its last boundary is missing.")
    if form.filename is None:
        raise InvalidParameter("The form has no file; send it as the part file.", param="file")
    purpose = form.text("purpose")
    if purpose not in PURPOSES:
        raise InvalidParameter(f"purpose is {shown(purpose)}; it may be one of {', '.join(PURPOSES)}.", param="purpose")
    seconds, anchor = form.text(_SECONDS), form.text(_ANCHOR)
    if seconds is None:
        return purpose, None
    is_number = seconds.isascii() and seconds.isdigit() and len(seconds) < 10
    if anchor != "created_at" or not is_number or not _MIN_EXPIRY_S <= int(seconds) <= _MAX_EXPIRY_S:
        raise InvalidParameter(
            f"expires_after has the anchor created_at and seconds from {_MIN_EXPIRY_S} to {_MAX_EXPIRY_S}.",
            param="expires_after",
        )
    return purpose, int(seconds)


async def list_files(state: ServerState, request: Request) -> Response:
    purpose = request.query_params.get("purpose")
    found = [each for each in files_of(state).owned(owner_of(request)) if purpose in (None, each.purpose)]
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidParameter(f"order is {shown(order)}; it may be 'asc' or 'desc'.", param="order")
    ordered = found if order == "desc" else found[::-1]
    return page(request, [(each.id, each.public()) for each in ordered], _NUM_LISTED, _MAX_LISTED)


def page(request: Request, listed: Sequence[tuple[str, dict[str, object]]], usual: int, most: int) -> Response:
    """A page of a list, after an id."""
    limit, after = request.query_params.get("limit", str(usual)), request.query_params.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 5 and 1 <= int(limit) <= most):
        raise InvalidParameter(f"limit is {shown(limit)}; it must be from 1 to {most}.", param="limit")
    if after is not None:
        place = next((place for place, (each, _) in enumerate(listed) if each == after), None)
        if place is None:
            raise InvalidParameter(f"after is {shown(after)}, which is not in this list.", param="after")
        listed = listed[place + 1 :]
    shown_now = listed[: int(limit)]
    return json_response(
        {
            "object": "list",
            "data": [body for _, body in shown_now],
            "first_id": shown_now[0][0] if shown_now else None,
            "last_id": shown_now[-1][0] if shown_now else None,
            "has_more": len(shown_now) < len(listed),
        }
    )


async def retrieve_file(state: ServerState, request: Request) -> Response:
    stored = files_of(state).find(owner_of(request), request.path_params["file_id"])
    return json_response(stored.public())


async def file_content(state: ServerState, request: Request) -> Response:
    files = files_of(state)
    stored = files.find(owner_of(request), request.path_params["file_id"])
    return FileResponse(files.path_of(stored), media_type="application/octet-stream")


async def delete_file(state: ServerState, request: Request) -> Response:
    files = files_of(state)
    stored = files.find(owner_of(request), request.path_params["file_id"])
    if state.batches is not None and any(batch.input_file_id == stored.id for batch in state.batches.open):
        raise InvalidParameter("A batch that has not ended reads this file; cancel it first.", param="file_id")
    files.delete(stored)
    return json_response({"id": stored.id, "object": "file", "deleted": True})


def files_of(state: ServerState) -> FileStore:
    if state.batches is None:
        raise FilesNotServed
    return state.batches.files


def owner_of(request: Request) -> str:
    """The name of the key; without keys all clients are one owner, since addresses change between two starts."""
    identity = context_of(request.scope).identity
    return "" if identity is ANONYMOUS else client_of(identity, request.scope).name

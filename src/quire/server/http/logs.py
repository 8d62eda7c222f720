"""Log lines: JSON for machines, short text for people. An event is one line, whatever its fields contain.

A thread writes them from a bounded queue: if the log cannot be written (a blocked reader, a full disk), lines are
dropped and counted, and no request waits. The thread sleeps after it has emptied the queue, so a busy process does not
wake it for every line. An exception is logged with its type and stack, without its message, which may quote a request.
"""

import json
import logging
import os
import queue
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import Literal, TextIO

from quire.server.http.request_context import RequestRecord

LogFormat = Literal["text", "json"]

MAX_FIELD_CHARACTERS = 256
_MAX_STACK_CHARACTERS = 8192
_MAX_QUEUED_LINES = 8192
_REST_S = 0.02
_LAST_LINES_S = 1.0  # for the last lines, if the reader of the log is blocked
# Polled every few seconds, or opened each time that a page is looked at.
_NOT_LOGGED = frozenset({"/health", "/ready", "/metrics", "/engine/state", "/engine/events"})
_PAGE_ASSETS = "/pages/"  # the scripts and styles of a page, whose own request is logged

_LOST = "quire.log"  # the logger that reports dropped lines

_Lines = queue.SimpleQueue[logging.LogRecord | None]

_access = logging.getLogger("quire.access")


def log_request(ended: RequestRecord) -> None:
    """One line per request, for `secure(..., observers=[log_request])`. Polled routes and the files that a page loads
    have none, unless such a file failed."""
    if ended.route.startswith(_PAGE_ASSETS) and ended.error_code is None:
        return
    if ended.route in _NOT_LOGGED or not _access.isEnabledFor(logging.INFO):
        return
    fields: dict[str, object] = {
        "id": ended.request_id,
        "client_id": ended.label,
        "method": ended.method,
        "route": ended.route,
        "status": ended.status,
        "duration_ms": round(ended.duration_s * 1000, 3),
        "key": ended.identity_name,
        "prompt_tokens": ended.num_prompt_tokens,
        "completion_tokens": ended.num_completion_tokens,
        "error": ended.error_code,
    }
    record = _record(_access.name, logging.INFO, "request")  # `info` would look up the calling line of code
    record.fields = {name: value for name, value in fields.items() if value is not None}
    _access.handle(record)


class JsonLines(logging.Formatter):
    """One JSON object per line, in ASCII: no field can break a line or hold terminal escapes."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": _bounded(record.getMessage()),
        }
        line.update({name: _bounded(value) for name, value in _fields(record).items()})
        if record.exc_info:
            line["stack"] = _stack(record)
        return json.dumps(line)


class TextLines(logging.Formatter):
    """Time, event, and the fields in their order."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()} "
        fields = [f"{name}={_bounded(value)}" for name, value in _fields(record).items()]
        line = f"{time} {level}{' '.join([str(_bounded(record.getMessage())), *fields])}"
        safe = line
        if not line.isprintable():
            safe = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)
        return f"{safe}\n{_stack(record)}" if record.exc_info else safe


class PlainLines(logging.Formatter):
    """The message alone."""

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage()


_FORMS = {"json": JsonLines, "text": TextLines, "plain": PlainLines}


class LogWriter:
    """A handler and the thread that writes its records. `stop` waits for a bounded time."""

    __slots__ = ("_listener", "handler")

    def __init__(
        self, form: LogFormat | Literal["plain"], stream: TextIO | None, max_lines: int = _MAX_QUEUED_LINES
    ) -> None:
        lines: _Lines = queue.SimpleQueue()
        self.handler = DroppingHandler(lines, max_lines)
        self._listener = _Listener(lines, _DirectHandler(stream, _FORMS[form](), self.handler))

    def write(self, text: str) -> None:
        """Write a line without a logger."""
        self.handler.handle(_record("quire.remarks", logging.INFO, text))

    def start(self) -> None:
        self._listener.start()

    def stop(self) -> None:
        self._listener.stop()

    @contextmanager
    def writing(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop()

    def install(self) -> None:
        """Take over all logging of this process: quire from INFO on, libraries from WARNING on."""
        root = logging.getLogger()
        root.handlers[:] = [self.handler]
        root.setLevel(logging.WARNING)
        logging.getLogger("quire").setLevel(logging.INFO)


class DroppingHandler(QueueHandler):
    """Queues a record, or counts it as dropped if the queue is full. Formats nothing and never waits."""

    def __init__(self, lines: _Lines, max_lines: int) -> None:
        super().__init__(lines)
        self._lines = lines
        self._max_lines = max_lines
        self.num_dropped = 0
        self._num_unreported = 0  # of those

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() >= self._max_lines:
            self.lose(record)
            return
        self._lines.put(record)
        if self._num_unreported:
            self._lines.put(_lost(self._num_unreported))
            self._num_unreported = 0

    def lose(self, record: logging.LogRecord) -> None:
        """Count a record as dropped. If it was a report of dropped lines, those are to be reported again."""
        self.acquire()
        try:
            num_reported = _fields(record).get("lines", 0) if record.name == _LOST else 0
            self._num_unreported += num_reported if isinstance(num_reported, int) and num_reported else 1
            self.num_dropped += not num_reported
        finally:
            self.release()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the library's name
        self.lose(record)


class _Listener(QueueListener):
    def __init__(self, lines: _Lines, sink: "_DirectHandler") -> None:
        super().__init__(lines)
        self._sink = sink
        self._lines = lines
        self._stopped = threading.Event()

    def handle(self, record: logging.LogRecord) -> None:
        self._sink.handle(record)
        if self._lines.empty():
            self._stopped.wait(_REST_S)

    def stop(self) -> None:
        thread = self._thread
        if thread is None:
            return
        self._stopped.set()
        self._lines.put(None)
        thread.join(_LAST_LINES_S)


class _DirectHandler:
    """Writes lines. Not a `logging.Handler`: at exit the library would wait for a blocked one."""

    def __init__(self, stream: TextIO | None, formatter: logging.Formatter, handler: DroppingHandler) -> None:
        self._stream = _unshared(stream)
        self._formatter = formatter
        self._handler = handler

    def handle(self, record: logging.LogRecord) -> None:
        if self._stream is None:  # closed before the start
            return
        try:
            self._stream.write(self._formatter.format(record) + "\n")
            self._stream.flush()
        except Exception:  # a closed stream or a full disk: there is nowhere to report it
            self._handler.lose(record)


def _unshared(stream: TextIO | None) -> TextIO | None:
    """The same file with a separate buffer: at exit the process flushes the shared one, and would wait there for a
    thread that is blocked in a write."""
    if stream is None:
        return None
    try:
        return open(os.dup(stream.fileno()), "w", encoding=stream.encoding, errors=stream.errors)
    except OSError:  # an in-memory stream
        return stream


def _lost(num_lines: int) -> logging.LogRecord:
    record = _record(_LOST, logging.WARNING, "log_lines_lost")
    record.fields = {"lines": num_lines}
    return record


def _record(logger: str, level: int, event: str) -> logging.LogRecord:
    return logging.LogRecord(logger, level, "", 0, event, None, None)


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields = record.__dict__.get("fields", {})
    assert isinstance(fields, dict)
    return fields


def _bounded(value: object) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= MAX_FIELD_CHARACTERS else text[: MAX_FIELD_CHARACTERS - 1] + "…"


def _stack(record: logging.LogRecord) -> str:
    """Types and frames of an exception and its causes, without their messages."""
    error = record.exc_info[1] if record.exc_info else None
    parts: list[str] = []
    while error is not None and len(parts) < 8:
        frames = "".join(traceback.format_tb(error.__traceback__))
        parts.append(f"{frames}{type(error).__module__}.{type(error).__qualname__}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\nwhile handling\n".join(parts)[-_MAX_STACK_CHARACTERS:]

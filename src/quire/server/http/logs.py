"""Log lines: JSON for machines, short ones for people. A line is one event, whatever its fields hold.

Writing happens on a thread of its own behind a bounded queue: a log that cannot be written, since nobody reads it or
the disk is full, costs lines, which are counted, and never time. That thread rests between two looks, so that a busy
process wakes it now and then and not with every line. An exception is logged by its kind and stack; its message may
repeat what a client sent.
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
_FAREWELL_S = 1.0  # for the last lines, when the reader of the log has gone deaf
_NOT_LOGGED = frozenset({"/health", "/ready", "/metrics"})  # asked every few seconds by machines

_LOST = "quire.log"  # who tells of lines that were lost

_Lines = queue.SimpleQueue[logging.LogRecord | None]

_access = logging.getLogger("quire.access")


def log_request(answered: RequestRecord) -> None:
    """One line per request, for `secure(..., hear=[log_answer])`."""
    if answered.route in _NOT_LOGGED or not _access.isEnabledFor(logging.INFO):
        return
    fields: dict[str, object] = {
        "id": answered.request_id,
        "client_id": answered.label,
        "method": answered.method,
        "route": answered.route,
        "status": answered.status,
        "duration_ms": round(answered.duration_s * 1000, 3),
        "key": answered.identity_name,
        "prompt_tokens": answered.num_prompt_tokens,
        "completion_tokens": answered.num_completion_tokens,
        "error": answered.error_code,
    }
    record = _record(_access.name, logging.INFO, "request")  # `info` would look for the line of code that called it
    record.fields = {name: value for name, value in fields.items() if value is not None}
    _access.handle(record)


class JsonLines(logging.Formatter):
    """One JSON object a line, in ASCII: no field can break it or colour it."""

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
    """A short line for a person: the time, what happened, and the fields in their order."""

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
    """The words alone, of a report that has a form of its own."""

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage()


_FORMS = {"json": JsonLines, "text": TextLines, "plain": PlainLines}


class LogWriter:
    """A handler, and the thread that writes what it was given. `stop` waits only so long."""

    __slots__ = ("_listener", "handler")

    def __init__(
        self, form: LogFormat | Literal["plain"], stream: TextIO | None, max_lines: int = _MAX_QUEUED_LINES
    ) -> None:
        lines: _Lines = queue.SimpleQueue()
        self.handler = DroppingHandler(lines, max_lines)
        self._listener = _Listener(lines, _DirectHandler(stream, _FORMS[form](), self.handler))

    def say(self, text: str) -> None:
        """A line that no logger has to be asked about."""
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
        """Take over all logging of this process: ours from information on, others' from warnings on."""
        root = logging.getLogger()
        root.handlers[:] = [self.handler]
        root.setLevel(logging.WARNING)
        logging.getLogger("quire").setLevel(logging.INFO)


class DroppingHandler(QueueHandler):
    """Puts a record in the queue, or counts it where the queue is full. Formats nothing, waits for nothing."""

    def __init__(self, lines: _Lines, max_lines: int) -> None:
        super().__init__(lines)
        self._lines = lines
        self._max_lines = max_lines
        self.num_dropped = 0
        self._num_untold = 0  # of those

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() >= self._max_lines:
            self.lose(record)
            return
        self._lines.put(record)
        if self._num_untold:
            self._lines.put(_lost(self._num_untold))
            self._num_untold = 0

    def lose(self, record: logging.LogRecord) -> None:
        """It was not written. If it told of others, those are still to be told of."""
        self.acquire()
        try:
            num_told = _fields(record).get("lines", 0) if record.name == _LOST else 0
            self._num_untold += num_told if isinstance(num_told, int) and num_told else 1
            self.num_dropped += not num_told
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
        thread.join(_FAREWELL_S)


class _DirectHandler:
    """Where lines end. No handler of the library's: at the end it would wait for one that is stuck."""

    def __init__(self, stream: TextIO | None, formatter: logging.Formatter, handler: DroppingHandler) -> None:
        self._stream = _unshared(stream)
        self._formatter = formatter
        self._handler = handler

    def handle(self, record: logging.LogRecord) -> None:
        if self._stream is None:  # it was closed before we began
            return
        try:
            self._stream.write(self._formatter.format(record) + "\n")
            self._stream.flush()
        except Exception:  # a stream that is gone, or a full disk: there is nowhere to say so
            self._handler.lose(record)


def _unshared(stream: TextIO | None) -> TextIO | None:
    """The same file behind a buffer of its own: the process flushes the common one when it ends, and would wait there
    for a thread whose line nobody takes."""
    if stream is None:
        return None
    try:
        return open(os.dup(stream.fileno()), "w", encoding=stream.encoding, errors=stream.errors)
    except OSError:  # it is in memory
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
    """Kinds and frames of an exception and of what caused it, without their messages."""
    error = record.exc_info[1] if record.exc_info else None
    parts: list[str] = []
    while error is not None and len(parts) < 8:
        frames = "".join(traceback.format_tb(error.__traceback__))
        parts.append(f"{frames}{type(error).__module__}.{type(error).__qualname__}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\nwhile handling\n".join(parts)[-_MAX_STACK_CHARACTERS:]

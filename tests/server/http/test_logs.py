"""A log line is one event, whatever its fields contain; logging neither blocks nor raises."""

import errno
import io
import json
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.http.logs import MAX_FIELD_CHARACTERS, JsonLines, LogFormat, LogWriter, TextLines, log_request
from quire.server.http.request_context import RequestRecord
from tests.server.server_process import wait_until

RECORD = RequestRecord("/v1/echo", "POST", 200, 0.0123456, "holder", "abc", "my-id", 7, 1)


class Stuck(io.StringIO):
    """A log stream that blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.writing, self.released = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.writing.set()
        self.released.wait(30)
        return super().write(text)


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


class Disk(io.StringIO):
    """A disk that is full for a while."""

    room = False

    def write(self, text: str) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


@contextmanager
def logging_to(stream: io.StringIO, form: LogFormat = "json", max_lines: int = 100) -> Iterator[LogWriter]:
    writer = LogWriter(form, stream, max_lines)
    logger = logging.getLogger("quire")
    logger.addHandler(writer.handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # the test runner listens too, and is less patient
    writer.start()
    try:
        yield writer
    finally:
        logger.removeHandler(writer.handler)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
        writer.stop()


def test_a_request_is_a_line_of_json() -> None:
    stream = io.StringIO()
    with logging_to(stream):
        log_request(RECORD)
        log_request(RECORD._replace(label=None, num_prompt_tokens=None, num_completion_tokens=None))
    full, bare = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", full.pop("time"))
    assert full == {
        "level": "info", "event": "request", "id": "abc", "client_id": "my-id", "method": "POST", "route": "/v1/echo",
        "status": 200, "duration_ms": 12.346, "key": "holder", "prompt_tokens": 7, "completion_tokens": 1,
    }  # fmt: skip
    assert not {"client_id", "prompt_tokens", "completion_tokens"} & set(bare)


def test_a_request_is_a_short_line_of_text() -> None:
    stream = io.StringIO()
    with logging_to(stream, "text"):
        log_request(RECORD)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d request id=abc client_id=my-id method=POST route=/v1/echo status=200 duration_ms=12\.346 "
        r"key=holder prompt_tokens=7 completion_tokens=1\n",
        stream.getvalue(),
    )


@pytest.mark.parametrize("route", ["/health", "/ready", "/metrics", "/pages/chat.js"])
def test_polled_routes_and_files_of_pages_are_not_logged(route: str) -> None:
    stream = io.StringIO()
    with logging_to(stream):
        log_request(RECORD._replace(route=route))
    assert stream.getvalue() == ""


def test_a_file_of_a_page_that_failed_is_logged() -> None:
    stream = io.StringIO()
    with logging_to(stream):
        log_request(RECORD._replace(route="/pages/chat.js", status=500, error_code="internal_error"))
    assert "internal_error" in stream.getvalue()


def record(event: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("quire", logging.WARNING, "", 0, event.replace("%", "%%"), (), None)
    made.fields = fields
    return made


NASTY = st.text(max_size=600) | st.sampled_from(["\r\n", "\x1b[31m", "\u202e", "\u2028", "\x00", '"}', "\ud800"])


@given(NASTY, NASTY)
def test_no_field_breaks_a_line(event: str, value: str) -> None:
    line = JsonLines().format(record(event, label=value))
    assert line.isascii() and line.isprintable()
    read = json.loads(line)
    for written, original in ((read["event"], event), (read["label"], value)):
        assert len(written) <= MAX_FIELD_CHARACTERS
        assert written == original or written == original[: MAX_FIELD_CHARACTERS - 1] + "…"
    text = TextLines().format(record(event, label=value))
    assert text.isprintable() and len(text.splitlines()) == 1


def test_an_exception_is_logged_with_its_stack_and_without_its_message() -> None:
    stream = io.StringIO()
    with logging_to(stream):
        try:
            try:
                raise KeyError("the prompt")
            except KeyError as error:
                raise ValueError("the key") from error
        except ValueError:
            logging.getLogger("quire").exception("failed")
    line = json.loads(stream.getvalue())
    assert line["stack"].count("test_an_exception_is_logged") == 2
    assert "builtins.ValueError\nwhile handling\n" in line["stack"] and line["stack"].endswith("builtins.KeyError")
    assert "raise KeyError" in line["stack"]  # the source, which is ours
    assert [key for key in line if key not in ("time", "level", "event", "stack")] == []


def test_a_blocked_log_drops_lines_and_never_waits() -> None:
    stream = Stuck()
    with logging_to(stream, max_lines=5) as writer:
        log_request(RECORD)
        assert stream.writing.wait(30)
        for _ in range(50):
            log_request(RECORD)
        assert writer.handler.num_dropped == 45
        stream.released.set()
        while writer.handler.queue.qsize():  # type: ignore[attr-defined]
            pass
        log_request(RECORD)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["request"] * 7 + ["log_lines_lost"]
    assert lines[-1]["lines"] == 45


def test_a_closed_log_raises_nothing() -> None:
    with logging_to(Gone()) as writer:
        log_request(RECORD)
        logging.getLogger("quire").info("%d", "no number")  # what cannot even be formatted
        wait_until(lambda: writer.handler.num_dropped == 2)


def test_lines_dropped_by_a_full_disk_are_reported_later() -> None:
    stream = Disk()
    with logging_to(stream) as writer:
        for num_lost in (1, 2, 3):  # the second and third report the lines lost before, and are not written either
            log_request(RECORD)
            wait_until(lambda lost=num_lost: writer.handler._num_unreported == lost)  # type: ignore[misc]
        assert writer.handler.num_dropped == 3
        stream.room = True
        log_request(RECORD)
        wait_until(lambda: "log_lines_lost" in stream.getvalue())
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["event"], line.get("lines")) for line in lines] == [("request", None), ("log_lines_lost", 3)]

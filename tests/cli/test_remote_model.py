"""`quire chat --url` and `quire run --url`: a model of a server, in processes that never import torch."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pexpect
import pytest

from quire.cli.printed_reply import StopRequest
from quire.cli.remote_model import RemoteModel
from quire.core.errors import QuireError
from tests import children
from tests.cli.commands import PROMPT, QUIRE, Shell
from tests.server.local_server import local_server

LINES: list[dict[str, object]] = [
    {"when": "for ever", "say": "word " * 40, "end": False},
    {"when": "break", "say": "half of it", "break": True},
    {"when": "table", "say": "# Title\n\n- **one**\n"},
    {"say": "Hello."},
    {"step_ms": 5},
]
KEY = "sk-remote"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[str]:
    flags = ("--api-key", KEY, "--served-model-name", "first", "--served-model-name", "second")
    with local_server(tmp_path_factory.mktemp("remote"), LINES, *flags) as server:
        yield server.url


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", KEY)


def test_a_chat_with_a_server(url: str) -> None:
    terminal = pexpect.spawn(
        QUIRE, ["chat", "--url", url], encoding="utf-8", timeout=60, dimensions=(40, 100),
        env={**os.environ, "TERM": "xterm"}, preexec_fn=children.prepare,
    )  # fmt: skip
    try:
        terminal.expect_exact("› ")
        terminal.sendline("a table")
        terminal.expect_exact(PROMPT)
        assert "Title" in terminal.before and "# Title" not in terminal.before and "tok/s" in terminal.before
        terminal.sendline("go on for ever")
        terminal.expect_exact("word word")
        terminal.sendcontrol("c")
        terminal.expect_exact("(stopped)")
        terminal.sendline("/model second")
        terminal.expect_exact("second answers")
        terminal.sendline("/model third")
        terminal.expect_exact("serves no 'third'; it serves first, second.")
        terminal.sendline("/clear")
        terminal.sendline("hi")
        terminal.expect_exact("Hello.")
        terminal.sendline("break")
        terminal.expect_exact("The server ended the reply")
        terminal.expect_exact("› ")
        terminal.sendeof()
        terminal.expect(pexpect.EOF)
    finally:
        terminal.close(force=True)
    assert terminal.exitstatus == 0


@pytest.mark.parametrize("given", [("--chat",), ("second",)])
def test_run_prints_the_completion_alone(quire: Shell, url: str, given: tuple[str, ...]) -> None:
    result = quire("run", *given, "hi", "--url", f"{url}/v1", "--temperature", "0")
    assert result == (0, "Hello.\n", "")


def test_control_c_ends_a_completion(url: str) -> None:
    command = [sys.executable, "-X", "importtime", QUIRE, "run", "for ever", "--url", url, "--max-tokens", "4000"]
    pipe = subprocess.PIPE
    with children.started(command, stdout=pipe, stderr=pipe, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.read(4) == "word"
        running.send_signal(signal.SIGINT)
        _, imported = running.communicate()
        assert running.returncode == 130
        modules = {line.rpartition("|")[2].strip() for line in imported.splitlines()}
        assert "quire.cli.remote_model" in modules and "torch" not in modules


def test_wrong_input_is_answered_in_a_sentence(quire: Shell, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, said in (
        (("chat", "--url", "http://127.0.0.1:9"), "No server answers at http://127.0.0.1:9: Connection refused."),
        (("chat", "--url", "ftp://x"), "ftp://x is not a server address, such as http://127.0.0.1:8000."),
        (("run", "hi", "--url", f"{url}/nowhere"), "/nowhere/v1/models answers 404"),
        (("run", "third", "hi", "--url", url), "serves no 'third'; it serves first, second."),
        (("run", "hi", "--url", url, "--threads", "2"), "--threads is of an engine here"),
        (("run", "hi", "--url", url, "--max-tokens", "99999999"), "answers 400: "),
        (("run", "break", "--url", url), "The server ended the reply: "),
    ):
        result = quire(*arguments)
        assert said in result.err and result.err.count("\n") == 1 and "Traceback" not in result.err, arguments
        assert result.status in (1, 2)
    monkeypatch.delenv("QUIRE_API_KEY")
    result = quire("chat", "--url", url)
    assert (result.status, "Give its key with --api-key or QUIRE_API_KEY." in result.err) == (2, True)


@pytest.mark.parametrize(
    "stream, said",
    [
        (b'data: {"choices": [{"delta": {"content": "hal"}}]}\n\n', "The connection ended before the reply did."),
        (b"data: [1]\n\n", "not OpenAI's"),
        (b"data: {\n\n", "not OpenAI's"),
    ],
)
def test_a_stream_of_another_kind_is_a_failure(stream: bytes, said: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(b"application/json", b'{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.answer(b"text/event-stream", stream)

        def answer(self, kind: bytes, page: bytes) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\nconnection: close\r\n\r\n" + page)

        def log_request(self, code: object = "-", size: object = "-") -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            model = RemoteModel(f"127.0.0.1:{server.server_port}", None, None)
            failure = failure_of(model)
        finally:
            server.shutdown()
            thread.join()
    assert failure is not None and said in failure.message


def failure_of(model: RemoteModel) -> QuireError | None:
    try:
        return model.reply([{"role": "user", "content": "hi"}], {}, lambda text, _: None, StopRequest()).failure
    except QuireError as error:
        return error

"""`quire batch`: a batch file through the whole server, with a scripted model."""

import asyncio
import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from quire.core.errors import InvalidParameter
from quire.engine.engine_process import EngineProcess
from quire.engine.messages import StartEngine
from quire.server.batch import runner as batch
from quire.server.batch.lines import (
    BatchReply,
    BatchRequest,
    FinishedLines,
    InvalidLine,
    error_line,
    read_line,
    response_line,
)
from tests import children
from tests.cli.commands import QUIRE, CommandResult, Shell
from tests.server.local_server import local_engines

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
SCRIPT = """
{"say": "Nobody knows.", "when": "secret"}
{"say": "Bang", "break": true, "when": "boom"}
{"say": "Hello."}
"""


def request(custom_id: str, url: str, **body: object) -> dict[str, object]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id: str, text: str, **body: object) -> dict[str, object]:
    return request(custom_id, URLS[0], messages=[{"role": "user", "content": text}], **body)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Path:
    path = tmp_path_factory.mktemp("script") / "lines.jsonl"
    path.write_text(SCRIPT)
    return path


def run(script: Path, *arguments: str, lines: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    """In a process of its own."""
    command = [QUIRE, "batch", *arguments, "--script", str(script), "--max-model-len", "1k"]
    return children.run(command, input=lines, capture_output=True, timeout=120, check=False)


@pytest.fixture
def run_here(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., CommandResult]:
    """In this process, with its engine in a thread."""

    def batch(*arguments: str) -> CommandResult:
        with local_engines():
            return Shell(monkeypatch, capsys)("batch", *arguments, "--script", str(script), "--max-model-len", "1k")

    return batch


def written(lines: Iterable[object]) -> bytes:
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


def entries(output: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def test_every_endpoint_and_every_error_in_one_file(run_here: Callable[..., CommandResult], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(
        written(
            [
                chat("a", "a secret"),
                request("b", URLS[1], prompt=["x", "y"], max_tokens=3),
                b"{nonsense",
                request("c", URLS[2], input=["one", "two"]),
                b"",
                request("d", "/v1/files"),
                chat("a", "again"),
                chat("e", "hi", stream=True),
                chat("f", "hi", model="gpt-5"),
                chat("g", "boom"),
                chat("h", "hi", n=2),
            ]
        )
    )
    done = run_here(str(source), "-o", str(target))
    assert done.status == 1, done.err
    assert "4 answered, 2 refused, 4 unreadable." in done.err
    assert "Line 3 is not a request: " in done.err and f"{target} has the reason of each." in done.err
    received = entries(target.read_bytes())
    good = {entry["custom_id"]: entry["response"] for entry in received if entry["response"] is not None}
    assert set(good) == set("abcfgh") and len({entry["id"] for entry in received}) == len(received) == 10
    assert good["a"]["body"]["choices"][0]["message"]["content"] == "Nobody knows."
    assert good["a"]["request_id"] and len(good["h"]["body"]["choices"]) == 2
    assert [choice["index"] for choice in good["b"]["body"]["choices"]] == [0, 1]
    assert [len(each["embedding"]) for each in good["c"]["body"]["data"]] == [16, 16]
    statuses = {name: response["status_code"] for name, response in good.items()}
    assert statuses == {"a": 200, "b": 200, "c": 200, "h": 200, "f": 404, "g": 500}
    assert good["f"]["body"]["error"]["code"] == "model_not_found"
    invalid = {entry["error"]["line"]: entry for entry in received if entry["error"] is not None}
    assert {line: entry["custom_id"] for line, entry in invalid.items()} == {3: None, 6: "d", 7: "a", 8: "e"}
    assert all(
        f"Line {line}" in entry["error"]["message"] and entry["response"] is None for line, entry in invalid.items()
    )

    again = run_here(str(source), "-o", str(target))
    assert again.status == 1 and "0 answered, 2 refused, 4 unreadable, 4 answered before." in again.err
    later = entries(target.read_bytes())
    answered = {name for name in good if statuses[name] == 200}
    assert later[:4] == [entry for entry in received if entry["custom_id"] in answered and entry["error"] is None]
    assert sorted(map(_outcome, later)) == sorted(map(_outcome, received)), "one entry for each line, as before"


def _outcome(entry: dict[str, Any]) -> str:
    response = entry["response"] or {}
    return json.dumps([entry["custom_id"], response.get("status_code"), entry["error"]])


def test_a_second_run_retries_errors_only(run_here: Callable[..., CommandResult], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(written(chat(name, "hi") for name in "abcd"))  # the fourth was mended

    def entry(custom_id: str, status: int) -> bytes:
        return response_line(BatchRequest(1, custom_id, URLS[0], b"{}"), BatchReply(status, "id", b'{"old": true}'))

    target.write_bytes(
        entry("a", 200) + entry("b", 503) + entry("c", 404) + error_line(4, InvalidLine("Line 4 …", "d"))
    )
    target.chmod(0o640)
    done = run_here(str(source), "-o", str(target))
    assert done.status == 0 and "3 answered, 1 answered before." in done.err, done.err
    received = {entry["custom_id"]: entry["response"] for entry in entries(target.read_bytes())}
    assert set(received) == set("abcd") and len(target.read_bytes().splitlines()) == 4
    assert received["a"]["body"] == {"old": True}
    assert all(response["status_code"] == 200 for response in received.values())
    assert target.stat().st_mode & 0o777 == 0o640 and sorted(tmp_path.iterdir()) == [source, target]


def test_an_interrupted_run_is_resumed(run_here: Callable[..., CommandResult], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(written(chat(str(number), "hi") for number in range(12)))
    assert run_here(str(source), "-o", str(target), "--concurrency", "3").status == 0
    whole = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(whole[:5]) + whole[5][:40])  # the sixth line was cut off
    done = run_here(str(source), "-o", str(target))
    assert done.status == 0 and "7 answered, 5 answered before." in done.err
    assert sorted(int(entry["custom_id"]) for entry in entries(target.read_bytes())) == list(range(12))


def test_from_stdin_to_stdout(script: Path) -> None:
    done = run(script, "-", "-o", "-", lines=written([chat("1", "hi"), chat("2", "a secret")]))
    assert done.returncode == 0, done.stderr.decode()
    received = {entry["custom_id"]: entry["response"]["body"] for entry in entries(done.stdout)}
    assert received["2"]["choices"][0]["message"]["content"] == "Nobody knows." and len(received) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("absent.jsonl", "-o", "-"), "Cannot read absent.jsonl"),
        (("in.jsonl", "-o", "in.jsonl"), "both the input and the output"),
        (("in.jsonl", "-o", "no/such/folder.jsonl"), "Cannot write no/such/folder.jsonl"),
        (("in.jsonl", "-o", "foreign.jsonl"), "foreign.jsonl: The output file has a line that is not batch output"),
        (("in.jsonl", "-o", "unended.txt"), "unended.txt: The output file has a line that is not batch output"),
    ],
)
def test_invalid_files_are_refused(
    script: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_bytes(written([chat("1", "hi")]))
    Path("foreign.jsonl").write_text("name,age\n")
    Path("unended.txt").write_text("one line, whose end is not marked")
    shown = Shell(monkeypatch, capsys)("batch", *arguments, "--script", str(script), "--max-model-len", "1k")
    assert shown.status not in (0, 1) and words in " ".join(shown.err.split()), shown.err
    assert Path("foreign.jsonl").read_text() == "name,age\n"
    assert Path("unended.txt").read_text() == "one line, whose end is not marked"


def test_a_batch_configures_the_engine_for_throughput(
    run_here: Callable[..., CommandResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a batch has more rows and longer steps than a server."""
    started: list[StartEngine] = []

    def send(child: EngineProcess, message: StartEngine) -> None:
        started.append(message)
        raise InvalidParameter("Seen enough.", param="test")

    monkeypatch.setattr(EngineProcess, "send", send)
    path = tmp_path / "in.jsonl"
    path.write_bytes(written([chat("1", "hi")]))
    shown = run_here(str(path), "-o", "-")
    assert "Seen enough." in shown.err and [start.serving for start in started] == [False]


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"7",
        b"{}",
        b'{"custom_id": 5, "url": "/v1/completions", "body": {}}',
        b'{"custom_id": "a", "url": "/v1/completions"}',
        b'{"custom_id": "a", "url": "/v1/completions", "body": []}',
        b'{"custom_id": "a", "url": "/v1/completions", "body": {}, "method": "GET"}',
        b'{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_an_invalid_line_is_named_in_the_error(text: bytes) -> None:
    with pytest.raises(InvalidLine, match="Line 7"):
        read_line(7, text, URLS)


def test_a_streaming_endpoint_is_not_allowed_in_a_batch() -> None:
    """Its answer would be a row of events in one string, and count as answered even if it broke off."""
    with pytest.raises(
        InvalidLine,
        match=r"Line 7 asks for 'POST /generate_stream'; a batch may POST to .*, /generate, /completion, /infill",
    ):
        read_line(7, written([request("a", "/generate_stream", inputs="hi")]), batch.URLS)
    with pytest.raises(InvalidLine, match="Line 7 asks for a background response"):
        read_line(7, written([request("a", "/v1/responses", input="hi", background=True)]), batch.URLS)


def test_a_body_is_passed_on_unchanged() -> None:
    line = read_line(1, b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt":  "x", "seed": 1e400}}', URLS)
    assert line.body == b'{"prompt":  "x", "seed": 1e400}'


def test_finished_lines_are_those_with_a_200() -> None:
    finished = FinishedLines()
    line = read_line(1, written([request("a", URLS[1])]), URLS)
    for status in (400, 404, 429, 500, 503):
        assert not finished.add(response_line(line, BatchReply(status, "id", b"not JSON")))
    assert not finished.add(error_line(1, InvalidLine("Line 1 …", "a"))) and line not in finished
    assert finished.add(response_line(line, BatchReply(200, "id", b"{}"))) and line in finished


@pytest.mark.parametrize("text", [b"name,age", b'{"name": "x"}', written([chat("a", "hi")]), b'{"custom_id": "a"}'])
def test_a_line_of_another_format_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidLine, match="write to another file"):
        FinishedLines().add(text)


@pytest.mark.parametrize(
    "text",
    [
        b'{"custom_id": "a", "url": "/v1/completions"}',
        b'{"custom_id": "a", "url": "/v1/completions", "body": []}',
        b'{"custom_id": "a", "url": "/v1/completions", "body": {}, "method": "GET"}',
        b'{"custom_id": "a", "url": "/v1/nowhere", "body": {}}',
        b'{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}',
        b'{"custom_id": "a", "url": "/v1/completions", "body": {"stream": 3}}',
    ],
)
def test_an_invalid_line_keeps_its_custom_id(text: bytes) -> None:
    with pytest.raises(InvalidLine) as invalid:
        read_line(7, text, URLS)
    entry = json.loads(error_line(7, invalid.value))
    assert (entry["custom_id"], entry["error"]["code"], entry["error"]["line"]) == ("a", "invalid_line", 7)


def test_a_full_output_disk_is_one_line_of_error(run_here: Callable[..., CommandResult], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(written(chat(str(number), "hi") for number in range(8)))
    done = run_here(str(source), "-o", "/dev/full")
    last = done.err.splitlines()[-1]
    assert done.status == 2 and last.startswith("quire: Cannot write /dev/full: No space left on device."), last
    assert "Traceback" not in done.err


def test_a_busy_server_is_asked_again_and_one_that_a_request_ends_only_some_times() -> None:
    replies = [(429, b'"queue_full"')] * 20 + [(503, b'{"code":"engine_lost"}')] * 99
    asked: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        status, body = replies[len(asked)]
        asked.append(status)
        await send({"type": "http.response.start", "status": status, "headers": [(b"retry-after-ms", b"0")]})
        await send({"type": "http.response.body", "body": body})

    written: list[tuple[bytes, bool]] = []
    lines = [json.dumps(chat("a", "hi")).encode()]
    runner = batch.BatchRunner(
        app, lines, FinishedLines(), lambda line, ok: written.append((line, ok)), lambda counts: None, max_tries=1000
    )
    asyncio.run(runner.run(1))
    assert Counter(asked) == {429: 20, 503: 8}
    [(line, answered)] = written
    assert not answered and json.loads(line)["response"]["status_code"] == 503


def test_blank_lines_cost_no_turn_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    num_turns = 0
    on_thread = asyncio.to_thread

    async def counted(work: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal num_turns
        num_turns += 1
        return await on_thread(work, *arguments)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    monkeypatch.setattr(asyncio, "to_thread", counted)
    written: list[bytes] = []
    request = json.dumps(chat("a", "hi")).encode()
    lines = [b"\n"] * 10_000 + [request] + [b"  \n"] * 10_000
    runner = batch.BatchRunner(
        app, lines, FinishedLines(), lambda line, ok: written.append(line), lambda counts: None, max_tries=1
    )
    asyncio.run(runner.run(2))
    assert [json.loads(line)["custom_id"] for line in written] == ["a"]
    assert num_turns <= 3, "one for the request, and one for each worker at the end"

"""Every program in examples/ runs as it is shown, and so does what the first pages show of a server."""

import ast
import asyncio
import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests import children
from tests.docs.pages import ROOT, blocks
from tests.docs.running import SHOWN_ADDRESS, answer_to
from tests.server.local_server import LocalServer, local_server

EXAMPLES = ROOT / "examples"
SMALL = ["--max-model-len", "1k", "--threads", "1"]
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "get_temperature", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    for city in ("Cairo", "Oslo")
)
SCRIPT = [{"when": "29 degrees", "say": "It is warmer in Cairo."}, {"say": CALLS}]


def output_of(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    result = children.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.fixture(scope="module")
def servers(shallow_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of a server with a real model and of one with a script, in threads of this process."""
    with local_server(tmp_path_factory.mktemp("script"), SCRIPT, *SMALL) as scripted:
        real = LocalServer(str(shallow_model_path), *SMALL)
        try:
            yield f"{real.url}/v1", f"{scripted.url}/v1"
        finally:
            real.stop()


@pytest.mark.usefixtures("shallow_default")
def test_offline_batch(capsys: pytest.CaptureFixture[str]) -> None:
    run_path(str(EXAMPLES / "offline_batch.py"), run_name="__main__")  # in this process: torch is imported once for all
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("The best thing about") for line in lines) == 8
    assert lines[-1].startswith("8 requests, ") and lines[-1].endswith("tok/s")


@pytest.mark.usefixtures("shallow_default")
def test_streaming(capsys: pytest.CaptureFixture[str]) -> None:
    run_path(str(EXAMPLES / "streaming.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "[length]" in said or "[stop]" in said
    assert said.endswith("stopped after 8 tokens\n")


def test_structured_output(servers: tuple[str, str]) -> None:
    person, mood = output_of("structured_output.py", servers[0]).splitlines()
    assert person.startswith("{'name': ") and "'age': " in person
    assert mood in ("positive", "negative")


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md"])
def test_the_curl_of_a_page_is_answered(page: str, servers: tuple[str, str]) -> None:
    (curl,) = re.findall(r"^curl .*$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    answer = answer_to(curl, servers[1].removesuffix("/v1"))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]


def test_the_python_of_getting_started_runs(servers: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for code in blocks(ROOT / "docs" / "getting-started.md", "python"):
        exec(compile(code.replace(f"{SHOWN_ADDRESS}/v1", servers[0]), "getting-started.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_agent_with_tools(servers: tuple[str, str]) -> None:
    assert output_of("agent_with_tools.py", servers[1]).splitlines() == [
        "get_temperature({'city': 'Cairo'}) -> 29 degrees",
        "get_temperature({'city': 'Oslo'}) -> 4 degrees",
        "It is warmer in Cairo.",
    ]


@pytest.mark.usefixtures("shallow_default")
def test_fastapi_app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with TestClient(import_module("fastapi_app").app) as client:
        question = {"text": "Name a colour.", "max_tokens": 8}
        answer = client.post("/ask", json=question).json()
        assert answer["answer"] and answer["tokens"] <= 8
        assert client.post("/stream", json=question).text == answer["answer"]
        assert client.post("/ask", json={"text": "hi", "max_tokens": 0}).status_code == 422
        refused = client.post("/ask", json={"text": "word " * 9000})
        assert refused.status_code == 400 and "maximum context length" in refused.json()["error"]
        assert client.portal is not None
        assert client.portal.call(steps_after_leaving, client.app) < 200, "of 256 tokens"


async def steps_after_leaving(app: Any) -> int:
    """The steps that the engine makes for a client that goes away after the first piece of a long stream."""
    body = json.dumps({"text": "Name many colours.", "max_tokens": 256}).encode()
    scope = {"type": "http", "method": "POST", "path": "/stream", "query_string": b"", "http_version": "1.1"}
    scope |= {"headers": [(b"content-type", b"application/json")], "asgi": {"version": "3.0", "spec_version": "2.3"}}
    has_begun = asyncio.Event()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, object]:
        for message in messages:
            return message
        await has_begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        if message.get("body"):
            has_begun.set()

    engine = app.state.llm
    scheduler = engine.llm.built.engine.scheduler
    before = scheduler.last_absorbed
    await app(scope, receive, send)
    while not await engine._on_engine_thread(lambda: engine.llm.client.idle):
        await asyncio.sleep(0)
    return int(scheduler.last_absorbed - before)


@pytest.mark.long(gpu=False)
@pytest.mark.usefixtures("shallow_default")
def test_multiprocess() -> None:
    lines = output_of("multiprocess.py", "1").splitlines()
    assert [line.partition(" is")[0] for line in lines] == ["Rain", "Snow", "Wind", "Fog"]
    assert len({line.rpartition("(")[2] for line in lines}) == 1, "one process did all"


@pytest.mark.usefixtures("shallow_default")
def test_recipes_of_the_cookbook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pandas, many, *cells = blocks(ROOT / "docs" / "cookbook.md", "python")
    table = run(pandas)["table"]
    assert set(table["mood"]) <= {"positive", "negative"} and len(table) == 3
    fewer = many.replace("10_000", "5").replace("256", "2")
    run(fewer)
    answers = tmp_path / "answers.jsonl"
    complete = answers.read_bytes()
    assert [json.loads(line)["id"] for line in complete.splitlines()] == [f"fact-{number}" for number in range(5)]
    answers.write_bytes(complete[:-7])
    run(fewer)
    assert answers.read_bytes() == complete, "only the line that was cut was done again"
    assert "1 of 5 prompts to do" in capsys.readouterr().out
    asyncio.run(run_cells(cells))
    assert capsys.readouterr().out.strip()


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(code, "cookbook.md", "exec"), names)
    return names


async def run_cells(cells: list[str]) -> None:
    """As a notebook runs them: one after the other in one namespace, with `await` at the top level."""
    names: dict[str, Any] = {}
    for cell in cells:
        waiting = eval(compile(cell, "cookbook.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)  # noqa: S307
        if waiting is not None:
            await waiting


def test_every_example_is_listed_and_tested() -> None:
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    page = (EXAMPLES / "README.md").read_text()
    tests = Path(__file__).read_text()
    assert {name for name in programs if f"`{name}`" not in page or f"def test_{name[:-3]}" not in tests} == set()

"""A log line has the token counts of a request, for every API."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import children
from tests.server.server_process import PATIENCE_S, QUIRE

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
HELLO = "Hello there."


@pytest.fixture(scope="module")
def lines(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What a server logged of each of these requests, by the client's id, and its responses."""
    script = tmp_path_factory.mktemp("script") / "script.jsonl"
    script.write_text(json.dumps({"say": HELLO}))
    command = [QUIRE, "serve", "--port", "0", "--script", str(script), "--log-format", "json"]
    requests: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("/v1/chat/completions", CHAT),
        "stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
        "two": ("/v1/completions", {"prompt": ["hi", "hi"], "n": 2}),
        "scores": ("/v1/completions", {"prompt": "hi", "max_tokens": 0, "echo": True}),
        "messages": ("/v1/messages", {**CHAT, "max_tokens": 100}),
        "responses": ("/v1/responses", {"input": "hi"}),
        "refused": ("/v1/completions", {"prompt": "hi", "n": 0}),
    }
    with children.started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(line for line in server.stderr if line.startswith("Ready")).split()[5]
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            response_text = {
                name: client.post(path, json=body, headers={"x-request-id": name}).text
                for name, (path, body) in requests.items()
            }
            response_text["left"] = disconnect_early(client)
        server.terminate()
        logged = [json.loads(line) for line in server.communicate(timeout=PATIENCE_S)[0].splitlines()]
    by_name = {line["client_id"]: line for line in logged if line["event"] == "request"}
    yield {name: (by_name[name], response_text) for name, response_text in response_text.items()}


def disconnect_early(client: httpx.Client) -> str:
    """What a client received of a stream before it disconnected."""
    body = {**CHAT, "stream": True, "ignore_eos": True, "max_tokens": 8000}
    with client.stream("POST", "/v1/chat/completions", json=body, headers={"x-request-id": "left"}) as stream:
        return next(line for line in stream.iter_lines() if '"content":"' in line and '"content":""' not in line)


def tokens(line: dict[str, Any]) -> tuple[int | None, int | None]:
    return line.get("prompt_tokens"), line.get("completion_tokens")


def test_token_counts_in_the_log_equal_the_usage(lines: dict[str, Any]) -> None:
    for name in ("chat", "two"):
        line, response_text = lines[name]
        usage = json.loads(response_text)["usage"]
        assert tokens(line) == (usage["prompt_tokens"], usage["completion_tokens"]) and usage["completion_tokens"] > 0
    for name in ("messages", "responses"):
        line, response_text = lines[name]
        usage = json.loads(response_text)["usage"]
        num_input = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
        assert tokens(line) == (num_input, usage["output_tokens"])


def test_a_stream_without_usage_is_counted_too(lines: dict[str, Any]) -> None:
    assert tokens(lines["stream"][0]) == tokens(lines["chat"][0]) != (None, None)


def test_an_aborted_stream_counts_its_tokens_so_far(lines: dict[str, Any]) -> None:
    line, _ = lines["left"]
    assert line["status"] == 499 and 0 < line["completion_tokens"] < 8000


def test_a_request_for_the_prompt_alone_logs_no_completion(lines: dict[str, Any]) -> None:
    assert tokens(lines["scores"][0]) == (1, None)


def test_a_refused_request_logs_no_tokens(lines: dict[str, Any]) -> None:
    assert tokens(lines["refused"][0]) == (None, None)


def test_a_log_line_has_the_error_code(lines: dict[str, Any]) -> None:
    line, response_text = lines["refused"]
    assert line["error"] == json.loads(response_text)["error"]["code"] and line["status"] == 400
    assert "error" not in lines["chat"][0]

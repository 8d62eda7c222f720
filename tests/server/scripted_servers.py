"""Scripted servers: real HTTP, processes and scheduling, with text that is known beforehand."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.server.local_server import LocalServer, local_server
from tests.server.server_process import Running, serving

CONTROL = "Hello there."  # what every script says when nothing else is asked for
LINES: tuple[dict[str, Any], ...] = (
    {"say": "Bang bang bang bang bang bang bang bang", "break": True, "when": "boom"},
    {"say": "", "break": True, "when": "dud"},
    {"say": "on and on and ", "end": False, "when": "endless"},
    {"say": "Nobody knows. 🙂 日本語", "when": "secret"},
    {"say": CONTROL},
)

SIZES = ("--max-model-len", "8k", "--kv-cache-memory", "3GiB")

Serve = Callable[..., AbstractContextManager[Running]]


@contextmanager
def scripted(folder: Path, *arguments: str, step_ms: float = 2, **streams: Any) -> Iterator[Running]:
    """A server of the lines above with this time per step."""
    file = folder / f"script-{step_ms}.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in ({"step_ms": step_ms}, *LINES)))
    with serving("--script", str(file), *SIZES, *arguments, **streams) as running:
        yield running


@contextmanager
def scripted_here(folder: Path, *arguments: str) -> Iterator[LocalServer]:
    """The same in this process: for tests that need options of their own, or stop it, and do without a process."""
    with local_server(folder, ({"step_ms": 2}, *LINES), *SIZES, *arguments) as server:
        yield server


def completion_body(text: str, **fields: object) -> dict[str, Any]:
    """A body for /v1/completions."""
    return {"prompt": text, "max_tokens": 2000, "temperature": 0, **fields}


def check_control(client: httpx.Client) -> None:
    """A valid request still works."""
    response = client.post("/v1/completions", json=completion_body("hi"))
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0] == {
        "index": 0, "text": CONTROL, "logprobs": None, "finish_reason": "stop", "stop_reason": None,
    }  # fmt: skip

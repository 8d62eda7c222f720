"""Scripted servers of several models: which answers what is known beforehand, and a load can be held up."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from quire.server.server import Tracer
from tests.server.local_server import LocalServer, local_engines
from tests.server.server_process import wait_until

SIZES = ("--max-model-len", "1k", "--kv-cache-memory", "256MiB")


def lines_of(name: str, step_ms: int = 1) -> str:
    """A script that says the name of its model, and goes on without end when asked to."""
    lines = ({"step_ms": step_ms}, {"say": f"{name} and ", "end": False, "when": "endless"}, {"say": f"I am {name}."})
    return "\n".join(map(json.dumps, lines))


def write_tables(folder: Path, **tables: dict[str, Any]) -> Path:
    """A config file with these models, each with a script."""
    text = []
    for name, table in tables.items():
        script = folder / f"{name}.jsonl"
        if not script.exists():
            script.write_text(lines_of(name))
        values = {"script": str(script), **table}
        text += [f"[models.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path = folder / "quire.toml"
    path.write_text("\n".join(text))
    return path


@contextmanager
def several_here(
    folder: Path, *arguments: str, tracer: Tracer | None = None, **tables: dict[str, Any]
) -> Iterator[LocalServer]:
    """A server of these models in threads of this process, which loads none of them before it is asked."""
    with local_engines():
        server = LocalServer("--config", str(write_tables(folder, **tables)), *SIZES, *arguments, tracer=tracer)
        try:
            yield server
        finally:
            server.stop()


def hold_load(folder: Path, name: str) -> Path:
    """The script of a model as a pipe: its load waits until `release_load`."""
    pipe = folder / f"{name}.jsonl"
    os.mkfifo(pipe)
    return pipe


def release_load(pipe: Path) -> None:
    """Let one load go on."""
    pipe.write_text(lines_of(pipe.stem))


def ask(client: httpx.Client, model: str | None, **fields: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, **fields}
    return client.post("/v1/chat/completions", json=body if model is None else {**body, "model": model})


def write_slow(folder: Path, name: str) -> None:
    """A script whose endless answer takes 100 s, for tests that need it to run."""
    (folder / f"{name}.jsonl").write_text(lines_of(name, step_ms=100))


def endless(model: str) -> dict[str, object]:
    """The body of a completion that streams a thousand tokens."""
    return {"model": model, "prompt": "endless", "max_tokens": 1000, "temperature": 0, "stream": True}


def answer(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def statuses(client: httpx.Client) -> dict[str, str]:
    """Of each model, by name."""
    return {each["id"]: each["status"]["value"] for each in client.get("/v1/models").json()["data"]}


def wait_for_waiting(client: httpx.Client, name: str, number: int) -> None:
    """Until so many requests wait for a model to be loaded."""
    wait_until(lambda: client.get("/load").json()["models"][name]["num_requests_waiting_for_load"] == number)

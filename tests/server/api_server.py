"""A scripted server for the tests of Responses and Messages, and a reader of its streams."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.server.local_server import local_server

MODEL = "smollm2-135m-instruct"
PLAIN = "Bonjour! 🙂 你好, naïve friend."
LINES: tuple[dict[str, Any], ...] = (
    {"say": "Bang bang bang", "break": True, "when": "boom"},
    {"say": "", "when": "nothing"},
    {"say": "on and on and ", "end": False, "when": "endless"},
    {"say": "Rules heard.", "when": "system\nRule one.\n\nRule two.<|im_end|>"},
    {"say": "and so on.", "when": "assistant\nOnce upon a time"},
    {"say": PLAIN},
)


@contextmanager
def scripted_server(folder: Path, lines: Sequence[dict[str, Any]] = LINES, *arguments: str) -> Iterator[str]:
    """The address of a running scripted server."""
    with local_server(folder, lines, "--max-model-len", "1k", *arguments) as server:
        yield server.url


def named_events(stream: str) -> list[dict[str, Any]]:
    """The bodies of a stream of named events; each body repeats the name."""
    bodies = []
    for block in stream.strip().split("\n\n"):
        name, data = block.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert body["type"] == name.removeprefix("event: ")
        bodies.append(body)
    return bodies

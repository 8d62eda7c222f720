"""A scripted server for the tests of Responses and Messages, and a reader of its streams."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import children
from tests.server.server_process import QUIRE

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
    script = folder / "script.jsonl"
    script.write_text("\n".join(json.dumps(line) for line in lines))
    command = [QUIRE, "serve", "--port", "0", "--script", str(script), "--max-model-len", "1k", *arguments]
    process = children.start(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        output = []
        for line in process.stderr:
            output.append(line)
            if line.startswith("Ready"):
                break
        else:
            raise AssertionError("the server ended before it was ready:\n" + "".join(output))
        yield line.split()[5]
    finally:
        process.terminate()
        try:
            process.communicate(timeout=30)
        finally:
            children.end(process)


def named_events(stream: str) -> list[dict[str, Any]]:
    """The bodies of a stream of named events; each body repeats the name."""
    bodies = []
    for block in stream.strip().split("\n\n"):
        name, data = block.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert body["type"] == name.removeprefix("event: ")
        bodies.append(body)
    return bodies

"""A scripted server as a user starts it, with any chat template."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import openai

from quire.catalog.names import DEFAULT_MODEL
from tests import children
from tests.server.server_process import QUIRE

MODEL = DEFAULT_MODEL.name


@contextmanager
def speaking(
    folder: Path, lines: Sequence[Mapping[str, object]], template: str | None = None, *options: str
) -> Iterator[tuple[openai.OpenAI, str]]:
    """A client of the server, and the output of the server before it was ready."""
    script = folder / "script.jsonl"
    script.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    if template is not None:
        (folder / "template.jinja").write_text(template, encoding="utf-8")
        options = ("--chat-template", str(folder / "template.jinja"), *options)
    command = [QUIRE, "serve", "--port", "0", "--script", str(script), *options]
    process = children.start(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    output: list[str] = []
    try:
        for line in process.stderr:
            output.append(line)
            if line.startswith("Ready"):
                break
        else:
            raise AssertionError("the server ended before it was ready:\n" + "".join(output))
        url = output[-1].split()[5]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield client, "".join(output)
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            children.end(process)

"""`quire serve` as a user starts it, for as long as a block runs: with a script of what to say, or with the model."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests import children

QUIRE = str(Path(sys.executable).with_name("quire"))
SMALL = ("--threads", "1", "--max-model-len", "4k", "--kv-cache-memory", "512MiB")


@contextmanager
def serving(*flags: str, program: Sequence[str] = (QUIRE,), env: dict[str, str] | None = None) -> Iterator[str]:
    """The address of a server on a free port, once it says that it is ready."""
    command = [*program, "serve", "--port", "0", *flags]
    with children.started(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        said = []
        try:
            for line in process.stderr:
                said.append(line)
                if line.startswith("Ready"):
                    process.stderr.readline()  # the curl line
                    yield line.split()[5]
                    break
            else:
                raise AssertionError("the server ended before it was ready:\n" + "".join(said))
        finally:
            process.terminate()
            process.communicate(timeout=60)


@contextmanager
def scripted(folder: Path, lines: Sequence[dict[str, object]], *flags: str) -> Iterator[str]:
    """A server that says these lines (engine/scripted_engine.py tells what may stand in one)."""
    script = folder / "script.jsonl"
    script.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serving("--script", str(script), *flags) as url:
        yield url

"""The output file of a batch: the responses of an earlier run, and those of this run. Does not depend on the engine.

Successful responses are kept. Lines that were refused, failed or cut off are removed first, because their requests run
again: a file never holds two entries for one request.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from quire.core.errors import ConfigError
from quire.server.batch.lines import BEGINNING, FinishedLines, InvalidLine

_STDOUT = 1


class BatchOutput:
    """An open output, and the requests that it has responses for."""

    def __init__(self, descriptor: int, finished: FinishedLines, target: Path | None) -> None:
        self._descriptor = descriptor
        self._target = target
        self.finished = finished
        self.num_written = 0

    def write(self, line: bytes) -> None:
        """Unbuffered: an interrupted run keeps the responses so far."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise ConfigError(self._error_text(error), param="output") from error
        self.num_written += 1

    def _error_text(self, error: OSError) -> str:
        if self._target is None:
            return f"Cannot write to stdout: {error.strerror}. With -o FILE the same command can be taken up again."
        return (
            f"Cannot write {self._target}: {error.strerror}. What it holds stays; the same command again answers "
            f"the rest."
        )


@contextmanager
def opened_output(target: Path | None) -> Iterator[BatchOutput]:
    """Target None: stdout."""
    if target is None:
        sys.stdout.flush()
        yield BatchOutput(_STDOUT, FinishedLines(), None)
        return
    with ExitStack() as stack:
        try:
            finished = _read_finished(target)
            file = stack.enter_context(target.open("ab", buffering=0))
        except OSError as error:
            raise ConfigError(f"Cannot write {target}: {error.strerror}.", param="output") from error
        yield BatchOutput(file.fileno(), finished, target)


def _read_finished(path: Path) -> FinishedLines:
    finished = FinishedLines()
    if not path.is_file():  # a pipe holds no responses
        return finished
    all_kept = True
    with path.open("rb") as file:
        for line in file:
            try:
                all_kept &= _is_kept(line, finished) and line.endswith(b"\n")
            except InvalidLine as bad:
                raise ConfigError(f"{path}: {bad.message}", param="output") from bad
    if not all_kept:
        _drop_others(path.resolve())
    return finished


def _is_kept(line: bytes, finished: FinishedLines) -> bool:
    was_cut = not line.endswith(b"\n") and line[: len(BEGINNING)] == BEGINNING[: len(line)]
    return not was_cut and finished.add(line)


def _drop_others(path: Path) -> None:
    """Write the kept lines to another file, which replaces this one when it is complete."""
    other = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with path.open("rb") as old, other.open("xb") as new:
            new.writelines(line.rstrip(b"\r\n") + b"\n" for line in old if _is_kept(line, FinishedLines()))
        shutil.copymode(path, other)
        other.replace(path)
    finally:
        other.unlink(missing_ok=True)

"""The file of a batch's answers: what an earlier run left there, and what this one adds. Knows no engine.

Answers stay. What is no answer (a line that was refused, failed or cut off) is taken out first, for it is asked again:
so a file never holds two entries for one line.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from quire.core.errors import ConfigError
from quire.server.batch.lines import BEGINNING, BadLine, FinishedLines

_STDOUT = 1


class BatchOutput:
    """Open for what this run adds."""

    def __init__(self, descriptor: int, past: FinishedLines, target: Path | None) -> None:
        self._descriptor = descriptor
        self._target = target
        self.past = past

    def write(self, line: bytes) -> None:
        """Past all buffers: whoever ends this keeps what was answered."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise ConfigError(self._complaint(error), param="output") from error

    def _complaint(self, error: OSError) -> str:
        if self._target is None:
            return f"Cannot write to stdout: {error.strerror}. With -o FILE the same command can be taken up again."
        return (
            f"Cannot write {self._target}: {error.strerror}. What it holds stays; the same command again answers "
            f"the rest."
        )


@contextmanager
def opened_output(target: Path | None) -> Iterator[BatchOutput]:
    """None: stdout."""
    if target is None:
        sys.stdout.flush()
        yield BatchOutput(_STDOUT, FinishedLines(), None)
        return
    with ExitStack() as stack:
        try:
            past = _take_up(target)
            file = stack.enter_context(target.open("ab", buffering=0))
        except OSError as error:
            raise ConfigError(f"Cannot write {target}: {error.strerror}.", param="output") from error
        yield BatchOutput(file.fileno(), past, target)


def _take_up(path: Path) -> FinishedLines:
    past = FinishedLines()
    if not path.is_file():  # a pipe has no past
        return past
    all_stay = True
    with path.open("rb") as file:
        for line in file:
            try:
                all_stay &= _stays(line, past) and line.endswith(b"\n")
            except BadLine as bad:
                raise ConfigError(f"{path}: {bad.message}", param="output") from bad
    if not all_stay:
        _keep_answers(path.resolve())
    return past


def _stays(line: bytes, past: FinishedLines) -> bool:
    was_cut = not line.endswith(b"\n") and line[: len(BEGINNING)] == BEGINNING[: len(line)]
    return not was_cut and past.note(line)


def _keep_answers(path: Path) -> None:
    """In another file, which takes the place of this one when it is whole."""
    other = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with path.open("rb") as old, other.open("xb") as new:
            new.writelines(line.rstrip(b"\r\n") + b"\n" for line in old if _stays(line, FinishedLines()))
        shutil.copymode(path, other)
        other.replace(path)
    finally:
        other.unlink(missing_ok=True)

"""Output of the commands: results go to `out`; progress bars, phases and notes go to `err`."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from quire.catalog.store import FetchProgress
from quire.core.errors import ConfigError

_UNLIMITED = 10_000  # columns: output to a file or a pipe is not wrapped


def _console(*, stderr: bool) -> Console:
    stream: TextIO | None = sys.stderr if stderr else sys.stdout
    terminal = stream is not None and stream.isatty()  # None: closed before the start
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=None if terminal else _UNLIMITED)


out = _console(stderr=False)
err = _console(stderr=True)


def size(num_bytes: float) -> str:
    """A number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.2f} GiB"


def write_file(path: Path, text: str, param: str) -> None:
    """Write what the option `param` names a file for."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.", param=param) from None


class StartupProgress:
    """Says that a start goes on, where nothing else was said for some seconds. In a `with`, until `end`."""

    def __init__(self, say: Callable[[str], None], every_s: float = 8.0) -> None:
        self._say = say
        self._every_s = every_s
        self._started_s = time.monotonic()
        self._news = threading.Event()
        self._ended = False

    def say(self, line: str) -> None:
        self._news.set()
        self._say(line)

    def end(self) -> None:
        self._ended = True
        self._news.set()

    def __enter__(self) -> "StartupProgress":
        threading.Thread(target=self._run, name="quire-startup", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _run(self) -> None:
        while not self._ended:
            if self._news.wait(self._every_s):
                self._news.clear()
            else:
                self._say(f"  starting  {time.monotonic() - self._started_s:5.0f} s")


class ProgressBars:
    """One bar per phase of a fetch or load on a terminal; one line per phase elsewhere."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def fetched(self, progress: FetchProgress) -> None:
        self._show(progress.phase.value, progress.done_bytes, progress.total_bytes)

    def loaded(self, done: int, total: int) -> None:
        if err.is_terminal:
            self._show("loading", done, total)

    def _show(self, name: str, done: int, total: int) -> None:
        if name not in self._tasks:
            if not err.is_terminal:
                err.print(f"{name} {size(total)}" if total else name)
            self._tasks[name] = self._progress.add_task(name, total=total or None)
        self._progress.update(self._tasks[name], completed=done, total=total or None)

    def start(self) -> None:
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()


@contextmanager
def progress_bars() -> Iterator[ProgressBars]:
    """Bars that are removed from the screen when the block ends."""
    bars = ProgressBars()
    bars.start()
    try:
        yield bars
    finally:
        bars.stop()

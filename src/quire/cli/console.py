"""What the commands show while they work: bars and start-up phases, on stderr, so that stdout is the answer alone."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from quire.catalog.progress import FetchProgress

err = Console(stderr=True, highlight=False)


def size(num_bytes: int) -> str:
    """Bytes as people say them."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} {unit}"
        num_bytes /= 1024  # type: ignore[assignment]
    return f"{num_bytes:,.2f} GiB"


class Bars:
    """One bar per phase of a fetch, drawn on a terminal; one line per phase elsewhere."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=err,
        )
        self._tasks: dict[str, object] = {}

    def fetched(self, progress: FetchProgress) -> None:
        self.show(progress.phase.value, progress.done_bytes, progress.total_bytes)

    def loaded(self, done: int, total: int) -> None:
        if err.is_terminal:
            self.show("loading", done, total)

    def show(self, name: str, done: int, total: int) -> None:
        if name not in self._tasks:
            if not err.is_terminal:
                err.print(f"{name} {size(total) if total else ''}".strip())
            self._tasks[name] = self._progress.add_task(name, total=total or None)
        self._progress.update(self._tasks[name], completed=done, total=total or None)  # type: ignore[arg-type]

    def start(self) -> None:
        if err.is_terminal:
            self._progress.start()

    def stop(self) -> None:
        if err.is_terminal:
            self._progress.stop()


@contextmanager
def bars() -> Iterator[Bars]:
    """Bars that are gone from the screen's way when the block ends."""
    drawn = Bars()
    drawn.start()
    try:
        yield drawn
    finally:
        drawn.stop()
        sys.stderr.flush()

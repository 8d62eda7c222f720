"""`quire batch`: a file of requests to a file of responses. This process never loads torch: the engine has its own."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire.catalog.names import DEFAULT_MODEL
from quire.cli.console import err, progress_bars
from quire.cli.options import check_serving, engine_config
from quire.cli.served_model_options import read_served_model
from quire.cli.streams import INTERRUPTED
from quire.engine.open_model import open_model
from quire.engine.startup import StartupPhase
from quire.version import __version__

_STANDARD = "-"  # stdin or stdout instead of a file
_MAX_WAITING = 4096


def batch(source: str, target: str, model: str | None, given: Mapping[str, Any]) -> int:
    """The exit status: 0 if every line has a successful response."""
    check_serving()
    from quire.cli.batch_output import opened_output
    from quire.server.batch.runner import BatchSettings, run_batch
    from quire.server.server import ServerConfig

    config = engine_config(model, given)
    served_model = read_served_model(given)
    with _open_input(source) as lines, opened_output(None if target == _STANDARD else Path(target)) as output:
        err.print(f"quire {__version__} · {config.model or DEFAULT_MODEL.name}")
        with progress_bars() as bars:
            opened = open_model(config, bars.fetched, scripted=served_model.script is not None)
        server = ServerConfig(
            opened=opened,
            config=config,
            **served_model._asdict(),
            max_waiting=config.max_waiting or _MAX_WAITING,
            serving=False,
        )
        with _bar(source) as bar:
            task = bar.tasks[0].id
            settings = BatchSettings(
                lines,
                output.finished,
                output.write,
                _show_phase,
                lambda counts: bar.update(task, completed=counts.num_lines),
                given["concurrency"],
            )
            try:
                counts = run_batch(server, settings)
            except KeyboardInterrupt:
                err.print(_interrupted(target, output.num_written))
                return INTERRUPTED
    summary = [f"{counts.num_answered} answered"]
    summary += [f"{counts.num_refused} refused"] if counts.num_refused else []
    summary += [f"{counts.num_unreadable} unreadable"] if counts.num_unreadable else []
    summary += [f"{counts.num_skipped} answered before"] if counts.num_skipped else []
    err.print(", ".join(summary) + "." if counts.num_lines else f"{source} has no requests.")
    if counts.first_problem is not None:
        where = "The output" if target == _STANDARD else target
        err.print(f"{counts.first_problem} {where} has the reason of each.")
    return 0 if counts.clean else 1


def _interrupted(target: str, num_written: int) -> str:
    if target == _STANDARD:
        return "Interrupted. With -o FILE instead of -o -, a run could be resumed."
    return f"Interrupted after {num_written} lines of this run. The same command continues: {target} keeps what it has."


@contextmanager
def _open_input(source: str) -> Iterator[IO[bytes]]:
    if source == _STANDARD:
        yield sys.stdin.buffer
        return
    with open(source, "rb") as file:
        yield file


@contextmanager
def _bar(source: str) -> Iterator[Progress]:
    bar = Progress(
        TextColumn("answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        disable=not err.is_terminal,
    )
    bar.add_task("answering", total=None if source == _STANDARD else _num_lines(source))
    with bar:
        yield bar


def _num_lines(source: str) -> int:
    with open(source, "rb") as file:
        return sum(1 for line in file if line.strip())


def _show_phase(phase: StartupPhase) -> None:
    err.print(f"  {phase.name:<10}{phase.seconds:5.1f} s   {phase.detail}")

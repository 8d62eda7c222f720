"""`quire bench scheduler` and `quire bench regimes`: what the paper tower costs and achieves. Needs no torch."""

import json
import platform
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path

import numpy as np
from rich.table import Table

from quire.bench.plot import Curve, Point, bars, svg
from quire.bench.regimes import Machine, Outcome, arrivals, compare_regimes, compare_stances
from quire.bench.scheduler import TURNOVERS, Line, measure
from quire.cli.console import err, out
from quire.core.errors import ConfigError
from quire.sched.policy import PREFIX
from quire.version import __version__
from quire.workload.arrivals import poisson
from quire.workload.samples import sample
from quire.workload.trace import TraceRow, read_trace


def scheduler(rows: Many[int], waiting: Many[int], rounds: int, plot: Path | None, as_json: bool) -> None:
    lines = measure(rows, waiting, rounds=rounds, say=lambda text: err.print(text, style="dim"))
    curves = _curves(lines)
    if plot is not None:
        _write(plot, svg("plan + absorb", "rows", "µs", curves))
    if as_json:
        print(json.dumps([_line(line) for line in lines]))
        return
    out.print(f"plan + absorb, µs of CPU time · quire {__version__} · {_machine()}")
    for turnover in TURNOVERS:
        table = Table(title=_title(turnover), title_justify="left")
        for column in ("rows", *(f"{count:,} waiting" for count in waiting), "most / least waiting"):
            table.add_column(column, justify="right")
        for count in rows:
            of_row = [line for line in lines if line.setting.rows == count and line.setting.turnover == turnover]
            figures = [line.quartile_us for line in of_row]
            table.add_row(f"{count:,}", *map(_figure, of_row), f"{figures[-1] / figures[0]:.2f}")
        out.print(table)
    for text in bars(curves):
        out.print(text)
    if all(line.median_instructions is None for line in lines):
        out.print("Instructions: this machine does not let us count them.")


def _title(turnover: float) -> str:
    return f"{turnover:.0%} of the rows finish and are replaced in each step" if turnover else "nobody comes or goes"


def _figure(line: Line) -> str:
    counted = line.median_instructions
    return f"{line.quartile_us:,.0f}" + ("" if counted is None else f" ({counted / 1000:,.0f}k instructions)")


def _line(line: Line) -> dict[str, float]:
    plain = {**line.setting._asdict(), "us": round(line.quartile_us, 2)}
    counted = line.median_instructions
    return plain if counted is None else {**plain, "instructions": round(counted)}


def _curves(lines: Many[Line]) -> list[Curve]:
    points: dict[tuple[float, int], list[Point]] = {}
    for line in lines:
        key = (line.setting.turnover, line.setting.waiting)
        points.setdefault(key, []).append(Point(line.setting.rows, line.quartile_us))
    return [
        Curve(f"{waiting:,} waiting, {turnover:.0%} turnover", tuple(some), dashed=turnover > 0)
        for (turnover, waiting), some in points.items()
    ]


def trace_rows(workload: str) -> list[TraceRow]:
    """Of a file, or of a sample that comes with the package."""
    path = Path(workload)
    return read_trace(path) if path.suffix in (".csv", ".jsonl", ".gz") else sample(workload)


def regimes(workload: str, requests: int | None, given: Mapping[str, float], as_json: bool) -> None:
    rows = trace_rows(workload)
    machine = Machine(num_blocks=int(given["blocks"]), max_model_len=int(given["max_model_len"]))
    if machine.num_blocks * machine.block_size < machine.max_model_len:
        raise ConfigError(
            f"A cache of {machine.num_blocks} blocks holds {machine.num_blocks * machine.block_size} tokens, fewer "
            f"than one request may have ({machine.max_model_len}). Give more --blocks, or a smaller --max-model-len.",
            param="blocks",
        )
    work = arrivals(poisson(rows[:requests], given["rate"], seed=0), machine)
    num_cut = sum(row.num_prompt + row.num_output > machine.max_model_len for row in rows[:requests])
    if num_cut:
        err.print(f"{num_cut} of {len(work)} requests are longer than {machine.max_model_len} tokens and were cut.")
    arc = compare_regimes(work, machine, lambda text: err.print(text, style="dim"))
    stances = compare_stances(work, machine, PREFIX, lambda text: err.print(text, style="dim"))
    if as_json:
        print(json.dumps({"regimes": [_outcome(each, arc[0]) for each in arc],
                          "stances": [_outcome(each, stances[0]) for each in stances]}))  # fmt: skip
        return
    out.print(f"{len(work)} requests of {workload}, {given['rate']:g} a second, simulated · quire {__version__}")
    out.print(_compared(arc, "the arc"))
    out.print(_compared(stances, "stances, where the running want twice the cache"))


def _outcome(outcome: Outcome, first: Outcome) -> dict[str, float | str]:
    account = outcome.account
    return {
        "name": outcome.name,
        "padding_share": round(account.padding_share, 4),
        "waste_reserved": round(account.waste_reserved, 4),
        "waste_held": round(account.waste_held, 4),
        "steps": account.steps,
        "mean_batch": round(account.mean_batch, 2),
        "preemptions": outcome.preemptions,
        "computed_tokens": account.tokens,
        "recomputed_share": round(outcome.recomputed_share, 4),
        "cached_share": round(outcome.cached_share, 4),
        "seconds": round(account.finished_s, 3),
        "throughput_ratio": round(outcome.tokens_per_s / first.tokens_per_s, 3),
    }


def _compared(outcomes: Many[Outcome], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    columns = ("", "padding", "waste of reserved", "waste in tables", "steps", "mean batch", "preemptions",
               "computed tokens", "recomputed", "from cache", f"speed / {outcomes[0].name}")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for each in outcomes:
        account = each.account
        table.add_row(
            each.name,
            f"{account.padding_share:.1%}",
            f"{account.waste_reserved:.1%}",
            f"{account.waste_held:.2%}",
            f"{account.steps:,}",
            f"{account.mean_batch:.1f}",
            f"{each.preemptions:,}",
            f"{account.tokens:,}",
            f"{each.recomputed_share:.2%}",
            f"{each.cached_share:.1%}",
            f"{each.tokens_per_s / outcomes[0].tokens_per_s:.2f}",
        )
    return table


def _machine() -> str:
    return f"Python {platform.python_version()} · numpy {np.__version__} · {platform.machine()}"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"The plot cannot be written to {path}: {error.strerror or error}.", param="plot") from None

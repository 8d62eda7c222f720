"""`quire bench scheduler`, `regimes` and `pacing`: the scheduler without a model. Needs no torch.

scheduler: CPU time of a step's planning. regimes: throughput and memory of batching policies, simulated. pacing: first
tokens and gaps between tokens with and without an ITL target, simulated.
"""

import json
import platform
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path

import numpy as np
from rich.table import Table

from quire.bench.scheduler import TURNOVERS, Curve, PlanningCost, Point, bars, measure, svg
from quire.bench.service_levels import LoadSummary, Percentiles, summarize
from quire.bench.simulated import (
    H200_MACHINE,
    RegimeResult,
    SimulatedMachine,
    StepSizing,
    arrivals,
    compare_overcommits,
    compare_regimes,
    simulate,
    sizings,
)
from quire.cli.console import err, out, write_file
from quire.core.errors import ConfigError
from quire.sched.policy import PREFIX
from quire.version import __version__
from quire.workload.traces import TraceWindow, poisson, trace_rows


def scheduler(rows: Many[int], waiting: Many[int], rounds: int, plot: Path | None, as_json: bool) -> None:
    lines = measure(rows, waiting, rounds=rounds, say=lambda text: err.print(text, style="dim"))
    curves = _curves(lines)
    if plot is not None:
        write_file(plot, svg("plan + absorb", "rows", "µs", curves), "plot")
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
        out.print("Instructions: this machine does not count them.")


def _title(turnover: float) -> str:
    return (
        f"{turnover:.0%} of the rows finish and are replaced in each step"
        if turnover
        else "no request starts or finishes"
    )


def _figure(line: PlanningCost) -> str:
    counted = line.median_instructions
    return f"{line.quartile_us:,.0f}" + ("" if counted is None else f" ({counted / 1000:,.0f}k instructions)")


def _line(line: PlanningCost) -> dict[str, float]:
    plain = {**line.setting._asdict(), "us": round(line.quartile_us, 2)}
    counted = line.median_instructions
    return plain if counted is None else {**plain, "instructions": round(counted)}


def _curves(lines: Many[PlanningCost]) -> list[Curve]:
    points: dict[tuple[float, int], list[Point]] = {}
    for line in lines:
        key = (line.setting.turnover, line.setting.waiting)
        points.setdefault(key, []).append(Point(line.setting.rows, line.quartile_us))
    return [
        Curve(f"{waiting:,} waiting, {turnover:.0%} turnover", tuple(some), dashed=turnover > 0)
        for (turnover, waiting), some in points.items()
    ]


def regimes(workload: str, requests: int | None, given: Mapping[str, float], as_json: bool) -> None:
    rows = trace_rows(workload)
    machine = SimulatedMachine(num_blocks=int(given["blocks"]), max_model_len=int(given["max_model_len"]))
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
    by_regime = compare_regimes(work, machine, lambda text: err.print(text, style="dim"))
    overcommits = compare_overcommits(work, machine, PREFIX, lambda text: err.print(text, style="dim"))
    if as_json:
        print(json.dumps({"regimes": [_figures(each, by_regime[0]) for each in by_regime],
                          "stances": [_figures(each, overcommits[0]) for each in overcommits]}))  # fmt: skip
        return
    out.print(f"{len(work)} requests of {workload}, {given['rate']:g} a second, simulated · quire {__version__}")
    out.print(_compared(by_regime, "regimes"))
    out.print(_compared(overcommits, "overcommit, where running requests need twice the KV cache"))


def _figures(result: RegimeResult, first: RegimeResult) -> dict[str, float | str]:
    account = result.account
    return {
        "name": result.name,
        "padding_share": round(account.padding_share, 4),
        "waste_reserved": round(account.waste_reserved, 4),
        "waste_held": round(account.waste_held, 4),
        "steps": account.steps,
        "mean_batch": round(account.mean_batch, 2),
        "preemptions": result.preemptions,
        "computed_tokens": account.tokens,
        "recomputed_share": round(result.recomputed_share, 4),
        "cached_share": round(result.cached_share, 4),
        "seconds": round(account.finished_s, 3),
        "throughput_ratio": round(result.tokens_per_s / first.tokens_per_s, 3),
    }


def _compared(results: Many[RegimeResult], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    columns = ("", "padding", "waste of reserved", "waste in tables", "steps", "mean batch", "preemptions",
               "computed tokens", "recomputed", "from cache", f"speed / {results[0].name}")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for each in results:
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
            f"{each.tokens_per_s / results[0].tokens_per_s:.2f}",
        )
    return table


def _machine() -> str:
    return f"Python {platform.python_version()} · numpy {np.__version__} · {platform.machine()}"


def pacing(
    workload: str, window: TraceWindow, itl_target_ms: float | None, ttft_target_ms: float | None, as_json: bool
) -> None:
    rows = window.select(trace_rows(workload), workload)
    policies = sizings(*(None if target is None else target / 1000 for target in (itl_target_ms, ttft_target_ms)))
    results = []
    for policy in policies:
        err.print(policy.name, style="dim")
        results.append(summarize(simulate(rows, H200_MACHINE, policy)))
    if as_json:
        runs = [_plain(policy, result) for policy, result in zip(policies, results, strict=True)]
        given = {"rate": window.rate, "scale": window.scale, "skip_s": window.from_s, "seconds": window.seconds}
        print(json.dumps({"bench": "pacing", "workload": workload, **given, "requests": len(rows), "runs": runs}))
        return
    out.print(f"{len(rows)} requests of {workload}, Llama-3.1-8B on an H200, simulated · quire {__version__}")
    table = Table("target", *(f"{what}, ms: {of}" for what in ("first token", "gaps") for of in ("p50", "p99", "max")),
                  "tokens/s")  # fmt: skip
    for policy, result in zip(policies, results, strict=True):
        name = policy.name if policy.target_s is None else f"{1000 * policy.target_s:.1f} ms, {policy.name}"
        times = [*_shown(result.ttft_ms), *_shown(result.itl_ms)]
        table.add_row(name, *times, f"{result.output_tokens_per_s:,.0f}")
    out.print(table)


def _shown(times: Percentiles | None) -> list[str]:
    return ["–"] * 3 if times is None else [f"{time:.1f}" for time in (times.p50, times.p99, times.max)]


def _plain(policy: StepSizing, result: LoadSummary) -> dict[str, object]:
    return {
        "name": policy.name,
        "target_ms": None if policy.target_s is None else 1000 * policy.target_s,
        "first_token_ms": None if result.ttft_ms is None else result.ttft_ms._asdict(),
        "gap_ms": None if result.itl_ms is None else result.itl_ms._asdict(),
        "tokens_per_s": round(result.output_tokens_per_s, 1),
    }

"""`quire bench serve`, `race` and `startup`: measurements of other processes, as a table or as one JSON object.

serve: the cost of the server. race: quire and another engine's command, interleaved. startup: phases of a cold and a
warm start.
"""

import json
import statistics
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import asdict

from rich.table import Table

from quire.bench.environment import environment
from quire.bench.serving import ServingLoad, ServingRepeat, measure_serving, median_ratio
from quire.bench.startup import StartupTimes, measure_starts
from quire.bench.versus import CommandComparison, compare_commands
from quire.cli.console import err, out
from quire.cli.load_model import headline
from quire.cli.options import check_serving, engine_config
from quire.engine.machine import pick_device
from quire.version import __version__


def serve(load: ServingLoad, repeats: int, as_json: bool) -> None:
    check_serving()
    measured = measure_serving(load, repeats, lambda text: err.print(text, style="dim"))
    if as_json:
        print(json.dumps(_summary(load, measured)))
        return
    out.print(
        f"{load.num_streams} streams of {load.num_output} tokens · {load.model or 'the default model'} · "
        f"quire {__version__}"
    )
    table = Table()
    columns = ("repeat", "engine alone tok/s", "over HTTP tok/s", "HTTP / alone", "CPU s: engine alone", "engine",
               "front", "client")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for number, each in enumerate(measured, 1):
        speeds = (f"{load.num_tokens / each.alone_s:.1f}", f"{load.num_tokens / each.http_s:.1f}", f"{each.ratio:.3f}")
        costs = (each.alone_cpu_s, each.engine_cpu_s, each.front_cpu_s, each.client_cpu_s)
        table.add_row(str(number), *speeds, *(f"{cost:.2f}" for cost in costs))
    out.print(table)
    front_us = 1e6 * sum(each.front_cpu_s for each in measured) / (load.num_tokens * len(measured))
    out.print(f"HTTP / alone, median: {median_ratio(measured):.3f} · front: {front_us:.0f} µs of CPU per token")


def _summary(load: ServingLoad, measured: list[ServingRepeat]) -> dict[str, object]:
    return {
        "quire": __version__,
        **asdict(load),
        "repeats": [{**asdict(each), "ratio": each.ratio} for each in measured],
        "median_ratio": median_ratio(measured),
    }


def race(ours: Many[str], theirs: Many[str], rounds: int, as_json: bool) -> None:
    comparisons = compare_commands(ours, theirs, rounds=rounds, say=lambda text: err.print(text, style="dim"))
    if as_json:
        print(json.dumps([_plain(each) for each in comparisons]))
        return
    columns = ("workload", "tokens out", "quire s", "rival s", "times faster", "drift")
    table = Table(*columns)
    for each in comparisons:
        table.add_row(
            each.workload,
            " ≠ ".join(f"{count:,}" for count in sorted(each.num_output)),
            _each(each.ours_s),
            _each(each.theirs_s),
            f"{each.ratio:.3f}" if each.same_work else "not the same work",
            f"{each.drift:.3f}",
        )
    out.print(table)
    out.print("Each turn of the other engine is compared with the mean of quire's turns before and after it;")
    out.print("drift is quire's slowest turn by its fastest.")


def _plain(each: CommandComparison) -> dict[str, object]:
    plain = {**asdict(each), "num_output": sorted(each.num_output), "same_work": each.same_work, "drift": each.drift}
    return {**plain, "ratios": each.ratios, "ratio": each.ratio} if each.same_work else plain


def _each(seconds: Many[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in seconds)


_CACHES = ("cold", "warm")


def startup(model: str | None, repeats: int, batch: bool, as_json: bool, given: Mapping[str, object]) -> None:
    config = engine_config(model, given)
    starts = measure_starts(config, repeats=repeats, batch=batch, say=lambda text: err.print(text, style="dim"))
    if as_json:
        plain = [{**start._asdict(), "phases": [phase._asdict() for phase in start.phases]} for start in starts]
        facts = environment(sys.argv[1:], pick_device(config.device).type)
        print(json.dumps({"bench": "startup", "model": model, "batch": batch, "starts": plain, **facts}))
        return
    out.print(_table(starts, headline(config)))
    out.print("Medians, in seconds. Cold: no compiled kernels; files that were read before are in memory in both.")


def _table(starts: Many[StartupTimes], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("", "cold", "warm", "what"):
        table.add_column(column, justify="right" if column in ("cold", "warm") else "left")
    for index, phase in enumerate(starts[0].phases):
        seconds = [_median([start.phases[index].seconds for start in _of(starts, caches)]) for caches in _CACHES]
        table.add_row(phase.name, *seconds, phase.detail)
    table.add_row("to the first token", *(_median([start.seconds for start in _of(starts, c)]) for c in _CACHES), "")
    return table


def _of(starts: Many[StartupTimes], caches: str) -> list[StartupTimes]:
    return [start for start in starts if start.caches == caches]


def _median(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f}"

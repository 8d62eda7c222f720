"""`quire bench goodput`: replicas against prefill and decode pools, simulated or as real processes. Loads no torch.

Simulated: goodput by the number of GPUs, as a table, a plot and JSON. With --engines: real servers on this machine's
CPU, with that number of engine processes each, in turns under the same load.
"""

import json
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

from rich.table import Table

from quire.bench.load_client import LoadSettings
from quire.bench.service_levels import (
    Percentiles,
    ServedRequest,
    ServiceLevel,
    attainment,
    percentiles_ms,
    plain,
    summarize,
)
from quire.bench.split_goodput import (
    KV_BYTES_PER_TOKEN,
    ClusterComparison,
    ClusterGoodput,
    SplitSearch,
    halves,
)
from quire.bench.split_serving import SetupRounds, SplitServing, measure_split, setups_of
from quire.cli.console import err, out, write_file
from quire.cli.options import check_serving
from quire.core.errors import EngineFailed
from quire.sim.cluster import LinkSpeed
from quire.version import __version__
from quire.workload.traces import TraceWindow, trace_rows


def _say(text: str) -> None:
    err.print(text, style="dim")


def simulated(given: Mapping[str, Any], levels: Many[ServiceLevel], plot: Path | None, as_json: bool) -> None:
    rows = [row for row in trace_rows(given["trace"]) if row.num_prompt <= (given["max_prompt"] or row.num_prompt)]
    choosing, reporting = halves(rows, given["seconds"], given["seed"], given["trace"])
    link = LinkSpeed(given["bandwidth"] * 1e9, KV_BYTES_PER_TOKEN, given["handoff_ms"] / 1000)
    search = SplitSearch(choosing, reporting, link, given["tolerance"], given["choose_up_to"], _say)
    found = [
        search.compare(num_gpus, level, split=given["split"]) for level in levels for num_gpus in sorted(given["gpus"])
    ]
    if plot is not None:
        title = f"{Path(given['trace']).name}: goodput per GPU, simulated H200s with Llama-3.1-8B"
        write_file(plot, _plot(title, found), "plot")
    if as_json:
        print(
            json.dumps(
                {"bench": "goodput", **_facts(given, _SIMULATED), "comparisons": [_plain(each) for each in found]}
            )
        )
        return
    out.print(
        f"{Path(given['trace']).name} · H200s with Llama-3.1-8B, simulated · {given['bandwidth']:g} GB/s to each "
        f"decode engine · quire {__version__}"
    )
    out.print(_table(found))
    out.print("Requests/s of which 99 % meet the level. Settings were chosen on the first half of the trace;")
    out.print("the figures are of the second half.")


_SIMULATED = ("gpus", "seconds", "seed", "bandwidth", "handoff_ms", "tolerance", "choose_up_to", "max_prompt", "split")
_SERVED = ("engines", "model", "threads", "rate", "seconds", "seed", "rounds", "max_prompt", "max_output")


def _facts(given: Mapping[str, Any], names: Many[str]) -> dict[str, object]:
    return {
        "quire": __version__,
        "command": ["quire", *sys.argv[1:]],
        "trace": Path(given["trace"]).name,
        **{name: given[name] for name in names},
    }


def _table(found: Many[ClusterComparison]) -> Table:
    table = Table()
    columns = ("GPUs", "level, ms", "replicas", "split: all", "prefill + decode", "split: by cost",
               "prefill + decode", "best split / replicas")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for each in found:
        cells = [_rate(each.replicas)]
        for split in (each.split, each.by_cost):
            sizes = None if split is None else split.setup.sizes
            cells += [_rate(split), "–" if sizes is None else f"{sizes.num_prefill} + {sizes.num_decode}"]
        table.add_row(str(each.num_gpus), str(each.level), *cells, "–" if each.gain is None else f"{each.gain:.2f}")
    return table


def _rate(found: ClusterGoodput | None) -> str:
    if found is None:
        return "–"
    return "none" if found.requests_per_s is None else f"{found.requests_per_s:.1f}"


def _plain(each: ClusterComparison) -> dict[str, object]:
    setups = {"replicas": each.replicas, "split": each.split, "by_cost": each.by_cost}
    return {
        "gpus": each.num_gpus,
        "level": str(each.level),
        **{name: None if found is None else _plain_goodput(found) for name, found in setups.items()},
        "gain": each.gain,
        "tried": [_plain_goodput(found) for found in each.tried],
    }


def _plain_goodput(found: ClusterGoodput) -> dict[str, object]:
    setup = found.setup
    return {
        "prefill": setup.sizes.num_prefill,
        "decode": setup.sizes.num_decode,
        "policy": setup.policy.value if setup.sizes.num_prefill else None,
        "sizing": setup.sizing._asdict(),
        "requests_per_s": found.requests_per_s,
        "probes": [probe._asdict() for probe in found.probes],
    }


def _plot(title: str, found: Many[ClusterComparison]) -> str:
    from quire.bench.scheduler import Curve, Point, svg  # loads torch

    levels = list(dict.fromkeys(each.level for each in found))
    panels = []
    for level in levels:
        of_level = [each for each in found if each.level == level]
        setups: dict[str, list[ClusterGoodput | None]] = {
            "replicas": [each.replicas for each in of_level],
            "split: all": [each.split for each in of_level],
            "split: by cost": [each.by_cost for each in of_level],
        }
        curves = []
        for name, rates in setups.items():
            points = [
                Point(each.num_gpus, rate.rate / each.num_gpus)
                for each, rate in zip(of_level, rates, strict=True)
                if rate is not None
            ]
            if points:
                curves.append(Curve(f"{name}, {level} ms", tuple(points), dashed=name != "replicas"))
        panels.append(curves)
    return svg(title, "GPUs", "requests/s per GPU", *panels)


def served(given: Mapping[str, Any], levels: Many[ServiceLevel], as_json: bool) -> None:
    """Real servers."""
    check_serving()
    setups = setups_of(given["engines"])
    window = TraceWindow(0.0, given["seconds"], 1.0, given["rate"], given["max_prompt"])
    rows = window.select(trace_rows(given["trace"]), given["trace"], given["seed"])
    cut = tuple(row._replace(num_output=min(row.num_output, given["max_output"])) for row in rows)
    load = LoadSettings(given["vocab_size"], given["seed"], num_warm_up=2)
    serving = SplitServing(given["model"], given["threads"], cut, load)
    _say(f"{len(cut)} requests of {given['trace']} over {given['seconds']:g} s, {given['rounds']} rounds")
    measured = measure_split(serving, setups, given["rounds"], _say)
    if as_json:
        setup_figures = [_plain_rounds(each, levels) for each in measured]
        print(json.dumps({"bench": "goodput", **_facts(given, _SERVED), "requests": len(cut), "setups": setup_figures}))
    else:
        out.print(f"{len(cut)} requests of {Path(given['trace']).name}, {given['rate']:g} a second · "
                  f"{given['model'] or 'the default model'} on this CPU · quire {__version__}")  # fmt: skip
        out.print(_served_table(measured, levels))
    records = [record for each in measured for round_ in each.rounds for record in round_]
    if not any(record.served for record in records):
        raise EngineFailed(f"No request was served: {records[0].error}")


def _plain_rounds(each: SetupRounds, levels: Many[ServiceLevel]) -> dict[str, object]:
    rounds = [plain(summarize(records), records, levels) for records in each.rounds]
    return {"prefill": each.setup.num_prefill, "decode": each.setup.num_decode, "rounds": rounds}


def _served_table(measured: Many[SetupRounds], levels: Many[ServiceLevel]) -> Table:
    table = Table()
    columns = ("engines", "round", "failed", *(f"{what}, ms: {of}" for what in ("TTFT", "TPOT", "ITL")
               for of in ("p50", "p99")), *(f"meet {level}" for level in levels))  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "engines" else "right")
    for each in measured:
        for number, records in enumerate(each.rounds, 1):
            table.add_row(each.setup.name, str(number), *_served_cells(records, levels))
    return table


def _served_cells(records: Many[ServedRequest], levels: Many[ServiceLevel]) -> list[str]:
    done = [record for record in records if record.served]
    times = (
        percentiles_ms([record.ttft_s for record in done]),
        percentiles_ms([tpot_s for record in done if (tpot_s := record.tpot_s) is not None]),
        percentiles_ms([gap_s for record in done for gap_s in record.gaps_s()]),
    )
    cells = [cell for each in times for cell in _two(each)]
    return [str(len(records) - len(done)), *cells, *(f"{attainment(records, level):.1%}" for level in levels)]


def _two(times: Percentiles | None) -> tuple[str, str]:
    return ("–", "–") if times is None else (f"{times.p50:,.0f}", f"{times.p99:,.0f}")

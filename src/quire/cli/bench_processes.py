"""`quire bench serve`, `capacity`, `overhead` and `race`: measurements of other processes, as a table or as JSON.

serve: open-loop load on a server, or the same simulated. capacity: the highest rate that holds a service level.
overhead: the cost of the server. race: quire and another engine's command, or other engines that it installs,
interleaved. Loads no torch.
"""

import json
import platform
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from quire.bench.load_client import LoadSettings, TargetServer, endpoint, send_load
from quire.bench.race import (
    CommandComparison,
    CpuInfo,
    RaceEntry,
    RaceRange,
    RaceResult,
    compare_commands,
    cpu_kind,
    run_race,
    spread,
)
from quire.bench.race_peer import Peer, PeerUnsupported, our_entry, peer_entry, peers_folder
from quire.bench.service_levels import (
    CapacityProbe,
    LevelViolations,
    LoadSummary,
    Percentiles,
    PlotPoint,
    ServedRequest,
    ServiceLevel,
    attainment,
    event_lines,
    find_capacity,
    percentile_curves,
    plain,
    summarize,
    violations,
)
from quire.bench.serving import ServingLoad, ServingRepeat, measure_serving, median_ratio
from quire.bench.simulated import H200_MACHINE, HTTP_OVERHEAD, simulate, sizings
from quire.bench.workload import RaceWorkload, find_race_workload
from quire.catalog.locate import Located, locate
from quire.catalog.names import HubName
from quire.catalog.store import Report
from quire.cli.console import err, out, progress_bars, size, write_file
from quire.cli.options import check_serving, engine_settings
from quire.core.errors import ConfigError, EngineFailed
from quire.version import __version__
from quire.workload.traces import TraceRow, TraceWindow, trace_rows


class LoadRun(NamedTuple):
    """Which requests go where. Read and checked before anything is sent."""

    trace: str
    window: TraceWindow
    server: TargetServer | None  # None: simulated
    settings: LoadSettings
    itl_s: float | None = None  # targets of the simulated server; None: its defaults
    ttft_s: float | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "LoadRun":
        if given["simulate"] == (given["url"] is not None):
            raise ConfigError("Give the address of a server with --url, or --simulate.", param="url")
        if given["rate"] is not None and given["scale"] is not None:
            raise ConfigError("Give --scale, a factor on the trace's rate, or --rate, not both.", param="rate")
        targets_s = [None if (ms := given[name]) is None else ms / 1000 for name in ("itl_target_ms", "ttft_target_ms")]
        if not given["simulate"] and targets_s != [None, None]:
            raise ConfigError("--itl-target and --ttft-target go with --simulate: a server has its own.", param="url")
        key_file: Path | None = given["api_key_file"]
        server = None
        if given["url"] is not None:
            server = endpoint(given["url"], given["model"], key_file.read_text().strip() if key_file else None)
        window = TraceWindow(
            given["from_s"], given["seconds"], given["scale"] or 1.0, given["rate"], given["max_prompt"]
        )
        settings = LoadSettings(given["vocab_size"], given["seed"], given["warm_up"], given["timeout_s"])
        return cls(given["trace"], window, server, settings, *targets_s)

    def rows(self, scale: float = 1.0) -> list[TraceRow]:
        """The requests, at a further factor on their rate."""
        window = self.window
        if window.rate is not None:
            window = window._replace(rate=window.rate * scale)
        else:
            window = window._replace(scale=window.scale * scale)
        return window.select(trace_rows(self.trace), self.trace, self.settings.seed)

    def send(self, rows: Many[TraceRow]) -> list[ServedRequest]:
        if self.server is None:
            return simulate(rows, H200_MACHINE, sizings(self.itl_s, self.ttft_s)[-1], HTTP_OVERHEAD)
        return send_load(rows, self.server, self.settings)

    @property
    def place(self) -> str:
        return "simulated H200, Llama-3.1-8B" if self.server is None else f"{self.server.url} ({self.server.model})"

    def facts(self) -> dict[str, object]:
        server = None if self.server is None else {"url": self.server.url, "model": self.server.model}
        return {
            "quire": __version__,
            "command": ["quire", *sys.argv[1:]],
            "simulated": self.server is None,
            "itl_target_s": self.itl_s,
            "ttft_target_s": self.ttft_s,
            "server": server,
            "trace": Path(self.trace).name,
            **self.window._asdict(),
            **self.settings._asdict(),
        }


def serve(run: LoadRun, levels: Many[ServiceLevel], events: Path | None, plot: Path | None, as_json: bool) -> None:
    rows = run.rows()
    _say(f"{len(rows)} requests of {run.trace} over {rows[-1].arrived_s:.0f} s to {run.place}")
    records = run.send(rows)
    summary = summarize(records)
    if events is not None:
        write_file(events, event_lines({"bench": "serve", **run.facts()}, records), "events")
    if plot is not None:
        title = f"{Path(run.trace).name}, {summary.requests_per_s:.2f} requests/s"
        write_file(plot, _percentile_plot(title, percentile_curves(records)), "plot")
    if as_json:
        print(json.dumps({"bench": "serve", **run.facts(), **plain(summary, records, levels)}))
    else:
        _print_load(run, summary, plain(summary, records, levels))
    if summary.failed == summary.requests:
        raise EngineFailed(f"No request was served: {summary.errors[0]}")


def _percentile_plot(title: str, found: Mapping[str, Many[PlotPoint]]) -> str:
    """TTFT, and below it ITL and TPOT."""
    from quire.bench.scheduler import Curve, Point, svg  # loads torch

    curves = {name: Curve(name, tuple(Point(*point) for point in points)) for name, points in found.items()}
    if not curves:
        raise ConfigError("No request was served: there is nothing to plot.", param="plot")
    panels = ([curves[name] for name in names if name in curves] for names in (("TTFT",), ("ITL", "TPOT")))
    return svg(title, "1 / (1 - quantile): 2 is p50, 10 p90, 100 p99", "ms", *filter(None, panels))


def _print_load(run: LoadRun, summary: LoadSummary, figures: Mapping[str, Any]) -> None:
    out.print(f"{summary.requests} requests of {run.trace} · {run.place} · quire {__version__}")
    table = Table()
    for column in ("ms", *Percentiles._fields):
        table.add_column(column, justify="left" if column == "ms" else "right")
    for name, times in (("TTFT", summary.ttft_ms), ("ITL", summary.itl_ms), ("TPOT", summary.tpot_ms),
                        ("E2E", summary.e2e_ms), ("sent late", summary.late_ms)):  # fmt: skip
        table.add_row(name, *([f"{value:,.1f}" for value in times] if times else ["–"] * len(Percentiles._fields)))
    out.print(table)
    cached = "" if summary.cached_tokens is None else f" ({summary.cached_tokens:,} cached)"
    out.print(
        f"{summary.requests_per_s:.2f} requests/s sent · {summary.prompt_tokens:,} prompt tokens{cached} · "
        f"{summary.output_tokens:,} output tokens, {summary.output_tokens_per_s:,.0f}/s over {summary.seconds:.1f} s"
    )
    for level in figures["levels"]:
        out.print(f"level {level['level']} ms: met by {level['met_share']:.1%}, goodput {level['goodput_per_s']:.2f}/s")
    if summary.short:
        out.print(f"{summary.short} had fewer tokens than asked for.")
    for error in summary.errors:
        out.print(f"{summary.failed} failed: {error}")


_FEWEST = 20  # requests: of fewer, the share that meets a level says little of the load


class CapacitySearch:
    """The search for one level. Keeps the load of its lowest rate, for the reason where no rate holds."""

    def __init__(self, run: LoadRun, level: ServiceLevel) -> None:
        self._run, self._level = run, level
        self._rows: list[TraceRow] = []  # of the last load
        self._records: list[ServedRequest] = []  # of the load at the lowest rate
        self._scale = inf  # of that
        self._lowest = min(_FEWEST / len(run.rows()), 1.0)
        self.probes: list[CapacityProbe] = []

    def search(self, tolerance: float) -> None:
        self.probes = find_capacity(self._probe, 1.0, tolerance, lowest=self._lowest)

    def _probe(self, scale: float) -> CapacityProbe | None:
        try:
            rows = self._run.rows(scale)
        except ConfigError:
            if scale < 1:  # no request comes within the window
                return None
            raise
        if rows == self._rows:  # what is left of the window comes at once
            return None
        self._rows, records = rows, self._run.send(rows)
        if scale < self._scale:
            self._scale, self._records = scale, records
        made = CapacityProbe(scale, summarize(records).requests_per_s, attainment(records, self._level))
        _say(f"level {self._level}: {made.requests_per_s:.2f} requests/s: met by {made.met_share:.1%}")
        return made

    @property
    def best(self) -> CapacityProbe | None:
        return max([each for each in self.probes if each.holds], key=lambda each: each.scale, default=None)

    @property
    def missed(self) -> LevelViolations | None:
        """None: some rate holds the level."""
        return violations(self._records, self._level) if self.best is None else None

    @property
    def too_few(self) -> bool:
        """Whether the search ended because lower rates have too few requests to judge them."""
        return self.best is None and self._scale <= self._lowest

    @property
    def bracketed(self) -> bool:
        return not all(each.holds for each in self.probes)

    def figures(self) -> dict[str, object]:
        best, missed = self.best, self.missed
        return {
            "level": str(self._level),
            "capacity_per_s": None if best is None else round(best.requests_per_s, 4),
            "scale": None if best is None else round(best.scale, 4),
            "bracketed": self.bracketed,
            "missed": None if missed is None else missed._asdict(),
            "probes": [each._asdict() for each in self.probes],
        }

    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        most = "none of the tried rates" if self.best is None else f"{self.best.requests_per_s:.2f}"
        scale = "–" if self.best is None else f"{self.best.scale:.2f}"
        return str(self._level), most if self.bracketed else f"at least {most}", scale, str(len(self.probes))


def capacity(run: LoadRun, levels: Many[ServiceLevel], tolerance: float, as_json: bool) -> None:
    searches = {level: CapacitySearch(run, level) for level in levels}
    for search in searches.values():
        search.search(tolerance)
    if as_json:
        found = [search.figures() for search in searches.values()]
        print(json.dumps({"bench": "capacity", **run.facts(), "levels": found}))
        return
    out.print(f"{run.trace} · {run.place} · quire {__version__}")
    table = Table("level, ms", "requests/s at which 99 % meet it", "factor on the given rate", "loads")
    for search in searches.values():
        table.add_row(*search.cells())
    out.print(table)
    for level, search in searches.items():
        if search.missed is not None:
            out.print(f"level {level}: {search.missed.reason()}")
        if search.too_few:
            out.print(f"Lower rates have fewer than some {_FEWEST} requests in the given seconds.", style="dim")


def overhead(load: ServingLoad, repeats: int, as_json: bool) -> None:
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


def race_peers(given: Mapping[str, object], rounds: int, json_file: str | None) -> None:
    """All settings are checked before anything is installed or started."""
    seed, busy, threads = int(str(given["seed"])), int(str(given["busy"])), given["threads"]
    assert threads is None or isinstance(threads, int), threads
    workloads = [find_race_workload(word.strip(), seed) for word in str(given["workloads"]).split(",")]
    settings = {text: engine_settings(text, threads) for text in _texts(given["settings"]) or ("",)}
    model = _locate(given["model"])
    kind = cpu_kind()
    longest = max(workload.longest for workload in workloads)
    entries = [our_entry(model, engine, text) for text, engine in settings.items()]
    skipped: dict[str, str] = {}
    for peer, precision in _contests(_peers(given["peers"]), _texts(given["precisions"]), skipped):
        try:
            entries.append(peer_entry(peer, precision, model, folder=peers_folder(), threads=threads, longest=longest,
                                      cores=kind.cores, say=_say))  # fmt: skip
        except PeerUnsupported as error:
            skipped[f"{peer.name} {precision}"] = error.message
    for name, reason in skipped.items():
        err.print(f"{name}: skipped: {reason}")
    result = run_race(entries, workloads, rounds=rounds, seed=seed, busy=busy, say=_say)
    if json_file is not None:
        facts = {"seed": seed, "busy": busy, "rounds": rounds, "model": model.name, "skipped": skipped}
        text = json.dumps(_race_report(result, entries, workloads, kind, facts))
        if json_file == "-":
            print(text)
            return
        Path(json_file).write_text(text + "\n", encoding="utf-8")
    beside = f"{busy} spinning processes" if busy else "nothing of ours"
    out.print(f"{model.name} · {_described(kind)} · quire {__version__} · beside it: {beside}")
    out.print(_starts(result))
    for workload in workloads:
        out.print(_race_table(result, workload))
    out.print("Median (lowest to highest of the rounds). Times faster: the other's seconds by ours, in the same round.")


def _say(text: str) -> None:
    err.print(text, style="dim")


def _texts(values: object) -> tuple[str, ...]:
    assert isinstance(values, tuple), values
    return values


def _peers(values: object) -> tuple[Peer, ...]:
    assert isinstance(values, tuple), values
    return values


def _locate(model: object) -> Located:
    with progress_bars() as bars:
        return locate(None if model is None else str(model), fetch_hub=_fetch_hub, report=bars.fetched)


def _fetch_hub(wanted: HubName, *, revision: str | None, token: str | None, report: Report) -> Path:
    from quire.catalog.hub import fetch  # slow to load, and not needed for a model on this disk

    return fetch(wanted, revision=revision, token=token, report=report)


def _contests(peers: tuple[Peer, ...], precisions: tuple[str, ...], skipped: dict[str, str]) -> list[tuple[Peer, str]]:
    """Each peer in each precision asked for that it has; by default in its first."""
    chosen = []
    for peer in peers:
        for precision in precisions or peer.precisions[:1]:
            if precision in peer.precisions:
                chosen.append((peer, precision))
            else:
                skipped[f"{peer.name} {precision}"] = f"it has {', '.join(peer.precisions)}"
    return chosen


def _described(kind: CpuInfo) -> str:
    features = ", ".join(kind.features) or "no known instruction sets"
    return f"{kind.name} ({features}), {kind.cores} cores, load {kind.load:.1f} before"


def _starts(result: RaceResult) -> Table:
    table = Table("engine", "version", "precision", "start to first token, s", "memory then", "how")
    for start in result.starts:
        table.add_row(start.entry, start.version, start.precision, f"{start.seconds:.1f}", size(start.rss_bytes),
                      result.failures.get(start.entry) or start.how)  # fmt: skip
    return table


def _race_table(result: RaceResult, workload: RaceWorkload) -> Table:
    ours = [start.entry for start in result.starts if start.ours]
    unit = "first token, s" if workload.first_token_only else "tokens out/s"
    table = Table(title=workload.title, title_justify="left")
    columns = ("engine", unit, *(f"{name}: times faster" for name in ours), "memory after", "peak", "CPU s",
               "tokens equal to ours")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "engine" else "right")
    for start in result.starts:
        turns = result.of(start.entry, workload.name)
        if not turns:
            state = "failed" if start.entry in result.failures else "not run"  # interrupted before
            table.add_row(start.entry, state, *["–"] * (len(columns) - 2))
            continue
        speeds = [turn.seconds if workload.first_token_only else workload.num_output / turn.seconds for turn in turns]
        ratios = [result.ratios(name, start.entry, workload.name) for name in ours]
        equal = result.equal_tokens(ours[0], start.entry, workload.name)
        table.add_row(
            start.entry,
            _range(spread(speeds)),
            *(
                _range(spread(each)) if each and name != start.entry else "–"
                for name, each in zip(ours, ratios, strict=True)
            ),
            size(turns[-1].rss_bytes),
            size(turns[-1].peak_bytes),
            f"{sum(turn.cpu_s for turn in turns) / len(turns):.1f}",
            "–" if equal is None else f"{equal} of {workload.outputs[0]}",
        )
    return table


def _range(values: RaceRange) -> str:
    return f"{values.median:.2f} ({values.low:.2f} to {values.high:.2f})"


def _race_report(
    result: RaceResult,
    entries: Many[RaceEntry],
    workloads: Many[RaceWorkload],
    kind: CpuInfo,
    facts: Mapping[str, object],
) -> dict[str, object]:
    ours, peers = ([start.entry for start in result.starts if start.ours is mine] for mine in (True, False))
    ratios = [
        {"workload": workload.name, "ours": mine, "peer": peer, "ratios": found, **spread(found)._asdict()}
        for workload in workloads
        for mine in ours
        for peer in peers
        if (found := result.ratios(mine, peer, workload.name))
    ]
    return {
        "bench": "race",
        "command": ["quire", *sys.argv[1:]],
        "quire": __version__,
        "python": platform.python_version(),
        **facts,
        "cpu": kind._asdict(),
        "workloads": [{"name": each.name, "title": each.title, "output_tokens": each.num_output} for each in workloads],
        "entries": [{"name": entry.name, "settings": dict(entry.settings)} for entry in entries],
        "starts": [start._asdict() for start in result.starts],
        "turns": [turn._asdict() for turn in result.turns],
        "failures": result.failures,
        "ratios": ratios,
    }

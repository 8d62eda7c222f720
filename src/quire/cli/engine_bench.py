"""`quire bench throughput` and `quire bench latency`: the engine offline, as a table or as JSON."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many

from rich.table import Table

from quire.bench import report
from quire.bench.circumstances import circumstances, settings
from quire.bench.closed import Measurement, measure
from quire.bench.device_clock import device_clock
from quire.bench.observer import Busy, Observer
from quire.bench.percentiles import Percentiles, percentiles_ms
from quire.bench.workload import Part
from quire.cli.console import err, out
from quire.cli.start import start
from quire.core.sampling import SamplingParams
from quire.engine.build import Built
from quire.engine.machine import pick_device
from quire.llm import LLM
from quire.version import __version__

_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "logprobs", "prompt_logprobs")


def throughput(model: str | None, workloads: Many[str], part: Part, given: Mapping[str, object]) -> None:
    columns = ("workload", "requests", "tokens in", "tokens out", "seconds (each repeat)", "tokens out/s", "GPU busy")
    _show(model, workloads, part, given, columns, _throughput_row, report.throughput)


def latency(model: str | None, workloads: Many[str], part: Part, given: Mapping[str, object]) -> None:
    columns = ("workload", "ms per token", "first token, ms: p50", "p99", "gaps, ms: p50", "p90", "p99", "max",
               "GPU busy in decode")  # fmt: skip
    _show(model, workloads, part, given, columns, _latency_row, report.latency)


def _show(
    model: str | None,
    workloads: Many[str],
    part: Part,
    given: Mapping[str, object],
    columns: Many[str],
    row: Callable[[Measurement], list[str]],
    plain: Callable[[Measurement], report.Report],
) -> None:
    asked = {name: given[name] for name in _SAMPLING}
    sampling = SamplingParams(**asked)  # type: ignore[arg-type]  # which it checks
    device = pick_device(str(given["device"])).type
    observer = Observer(time.monotonic, device_clock(device))
    built = start(model, given, report=True, observe=observer.around)
    measured = _measure(LLM.over(built), observer, workloads, part, sampling, given)
    if given["as_json"]:
        facts = {"model": built.name, "sampling": asked, "settings": settings(built),
                 **circumstances(sys.argv[1:], device)}  # fmt: skip
        for each in measured:
            print(json.dumps({**plain(each), **facts}), flush=True)
        return
    table = Table(*columns, title=_title(built, sampling), title_justify="left")
    try:
        for each in measured:
            table.add_row(*row(each))
    finally:
        if table.row_count:  # whoever has enough, or whatever fails, keeps what was measured before
            out.print(table)
    if not part.whole:
        out.print("Parts of the workloads: a trial, not to be compared with figures of the whole.")
    if device == "cpu":
        out.print(f"GPU busy: {report.NO_GPU}.")


def _measure(
    llm: LLM,
    observer: Observer,
    workloads: Many[str],
    part: Part,
    sampling: SamplingParams,
    given: Mapping[str, object],
) -> Iterator[Measurement]:
    seed = given["seed"]
    assert seed is None or isinstance(seed, int), seed
    for workload in workloads:
        yield measure(
            llm,
            observer,
            workload,
            seed=seed,
            part=part,
            repeats=int(str(given["repeats"])),
            sampling=sampling,
            say=lambda text: err.print(text, style="dim"),
        )


def _title(built: Built, sampling: SamplingParams) -> str:
    usual = SamplingParams(temperature=0.0)
    drawn = [
        f"{name} {getattr(sampling, name)}" for name in _SAMPLING if getattr(sampling, name) != getattr(usual, name)
    ]
    how = ", ".join(drawn) or "greedy"
    return f"{built.name} · {built.dtype} · {built.machine.device.upper()} · {how} · quire {__version__}"


def _throughput_row(measured: Measurement) -> list[str]:
    each = ", ".join(f"{run.seconds:.3f}" for run in measured.runs)
    return [
        measured.workload,
        f"{measured.num_requests:,}",
        f"{measured.num_input:,}",
        f"{measured.num_output:,}",
        f"{measured.seconds:.3f} ({each})",
        f"{measured.num_output / measured.seconds:,.1f}",
        _share(measured.runs[-1].gpu_busy),
    ]


def _latency_row(measured: Measurement) -> list[str]:
    gaps = percentiles_ms([gap for run in measured.runs for gap in run.gaps_s])
    first = percentiles_ms([first for run in measured.runs for first in run.first_tokens_s])
    assert first is not None, measured
    spoken = [f"{value:.3f}" for value in gaps or ()] or ["–"] * len(Percentiles._fields)
    return [
        measured.workload,
        f"{1000 * measured.seconds / measured.runs[0].longest_output:.3f}",
        f"{first.p50:.2f}",
        f"{first.p99:.2f}",
        *spoken,
        _share(measured.runs[-1].gpu_busy_in_decode),
    ]


def _share(found: Busy | None) -> str:
    """An upper bound is said to be one."""
    if found is None:
        return "–"
    return f"{'≤ ' if found.late_share else ''}{found.share:.1%}"

"""Measurements of `quire bench` that load torch, as a table or as JSON: `throughput`, `latency`, `steps`, `startup`,
`kernels`, `quality` and `transformers`."""

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.table import Table

from quire.bench import throughput as report
from quire.bench.attention_steps import AttentionStep
from quire.bench.environment import environment, settings
from quire.bench.observer import GpuBusy, Observer, device_clock
from quire.bench.quality import WeightQuality, measure_quality, read_text
from quire.bench.service_levels import Percentiles, percentiles_ms
from quire.bench.startup import StartupTimes, measure_starts
from quire.bench.step_times import RaggedStep, measure_steps
from quire.bench.throughput import BenchGrammar, Measurement, measure
from quire.bench.workload import WorkloadSlice
from quire.cli.console import err, out, write_file
from quire.cli.load_model import NamedModel, headline, start
from quire.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.sampling import SamplingParams
from quire.core.step import Runner
from quire.engine.build import BuiltEngine
from quire.engine.build_runner import weights_of
from quire.engine.machine import pick_device
from quire.kernels.cpu.usable_cores import usable_cores
from quire.llm import LLM
from quire.models.decoder import Decoder
from quire.runner.model_runner import ModelRunner
from quire.version import __version__

if TYPE_CHECKING:
    from quire.bench.attention import HeadShape, KernelFigure  # imports Triton
    from quire.bench.transformers_baseline import EngineComparison

_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "logprobs", "prompt_logprobs")


def throughput(model: NamedModel, workloads: Many[str], part: WorkloadSlice, given: Mapping[str, object]) -> None:
    columns = ("workload", "requests", "tokens in", "tokens out", "seconds (each repeat)", "tokens out/s", "GPU busy")
    _show(model, workloads, part, given, columns, _throughput_row, report.throughput)


def latency(model: NamedModel, workloads: Many[str], part: WorkloadSlice, given: Mapping[str, object]) -> None:
    columns = ("workload", "ms per token", "first token, ms: p50", "p99", "gaps, ms: p50", "p90", "p99", "max",
               "GPU busy in decode")  # fmt: skip
    if given["profile"]:
        _profile(model, given)
        return
    _show(model, workloads, part, given, columns, _latency_row, report.latency)


def _show(
    model: NamedModel,
    workloads: Many[str],
    part: WorkloadSlice,
    given: Mapping[str, object],
    columns: Many[str],
    row: Callable[[Measurement], list[str]],
    plain: Callable[[Measurement], report.Report],
) -> None:
    requested = {name: given[name] for name in _SAMPLING}
    sampling = SamplingParams(**requested)  # type: ignore[arg-type]  # which it checks
    device = pick_device(str(given["device"])).type
    observer = Observer(time.monotonic, device_clock(device))
    schema, grammar = given["grammar"], None
    if schema is not None:
        grammar = BenchGrammar.read(str(schema), float(str(given["grammar_share"])))
    if grammar is not None and model.opened.tokenizer is None:
        model.opened.tokenizer = report.synthetic_tokenizer(model.opened.checkpoint.spec.vocab_size)
    built = start(model, report=True, observe=observer.wrap)
    measured = _measure(LLM.over(built), observer, workloads, part, sampling, grammar, given)
    if given["as_json"]:
        facts = {"model": built.name, "sampling": requested, "settings": settings(built),
                 **environment(sys.argv[1:], device)}  # fmt: skip
        for each in measured:
            print(json.dumps({**plain(each), **facts}), flush=True)
        return
    table = Table(*columns, title=_title(built, sampling), title_justify="left")
    seconds: dict[tuple[str, bool], float] = {}
    try:
        for each in measured:
            table.add_row(*row(each))
            seconds[each.workload, each.grammar is None] = each.seconds
    finally:
        if table.row_count:  # after Ctrl-C or a failure too: workloads that ended are shown
            out.print(table)
    for workload in workloads if grammar else ():
        ratio = seconds[workload, True] / seconds[workload, False]
        out.print(f"{workload}: with the grammar {ratio:.3f} times the tokens per second without it.")
    if not part.whole:
        out.print("Parts of the workloads: a trial, not to be compared with figures of the whole.")
    if device == "cpu":
        out.print(f"GPU busy: {report.NO_GPU}.")


def _measure(
    llm: LLM,
    observer: Observer,
    workloads: Many[str],
    part: WorkloadSlice,
    sampling: SamplingParams,
    grammar: BenchGrammar | None,
    given: Mapping[str, object],
) -> Iterator[Measurement]:
    seed = given["seed"]
    assert seed is None or isinstance(seed, int), seed
    for workload in workloads:
        yield from measure(
            llm,
            observer,
            workload,
            seed=seed,
            part=part,
            repeats=int(str(given["repeats"])),
            sampling=sampling,
            say=lambda text: err.print(text, style="dim"),
            grammar=grammar,
        )


def _title(built: BuiltEngine, sampling: SamplingParams) -> str:
    greedy = SamplingParams(temperature=0.0)
    changed = [
        f"{name} {getattr(sampling, name)}" for name in _SAMPLING if getattr(sampling, name) != getattr(greedy, name)
    ]
    how = ", ".join(changed) or "greedy"
    return f"{built.name} · {built.dtype} · {built.machine.device.upper()} · {how} · quire {__version__}"


def _throughput_row(measured: Measurement) -> list[str]:
    each = ", ".join(f"{run.seconds:.3f}" for run in measured.runs)
    return [
        measured.title,
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
    columns = [f"{value:.3f}" for value in gaps or ()] or ["–"] * len(Percentiles._fields)
    return [
        measured.title,
        f"{1000 * measured.seconds / measured.runs[0].longest_output:.3f}",
        f"{first.p50:.2f}",
        f"{first.p99:.2f}",
        *columns,
        _share(measured.runs[-1].gpu_busy_in_decode),
    ]


def _share(found: GpuBusy | None) -> str:
    """An upper bound is marked with ≤."""
    if found is None:
        return "–"
    return f"{'≤ ' if found.late_share else ''}{found.share:.1%}"


def kernels(shape: "HeadShape", steps: Many[AttentionStep], beside: str | None, as_json: bool) -> None:
    from quire.bench.attention import measure_kernels

    figures = measure_kernels(shape, beside, steps)
    if as_json:
        options = {**shape._asdict(), "dtype": str(shape.dtype).removeprefix("torch."), "beside": beside}
        for figure in figures:
            print(json.dumps({**figure._asdict(), **options, "device": torch.cuda.get_device_name()}), flush=True)
        return
    table = Table()
    for column in ("step", "µs", "rate", *((f"{beside}, µs", f"by {beside}") if beside else ())):
        table.add_column(column, justify="left" if column == "step" else "right")
    for figure in figures:
        table.add_row(*_cells(figure, beside is not None))
    out.print(table)


def steps(model: NamedModel, wanted: Many[RaggedStep], as_json: bool) -> None:
    """On a GPU, every shape is captured first."""
    runner, built = _observed_runner(model)
    verifying = next((step.name for step in wanted if step.num_drafts), None)
    if verifying and not (built.resolved.drafters and built.machine.device.startswith("cuda")):
        raise ConfigError(
            f"{verifying} verifies drafts, as many in every step on a GPU with --speculative ngram; this is "
            f"{built.machine.device} with --speculative {model.config.speculative}."
        )
    while not runner.prepared:
        runner.prepare()
    figures = measure_steps(
        runner,
        wanted,
        num_blocks=built.resolved.num_blocks,
        block_size=built.resolved.block_size,
        max_rows=built.resolved.max_num_seqs,
        clock=device_clock(built.machine.device),
        num_captured=lambda: runner.num_replayed,
    )
    if as_json:
        facts = {"model": built.name, "settings": settings(built), **environment(sys.argv[1:], built.machine.device)}
        for each in figures:
            print(json.dumps({**each._asdict(), "tokens_per_s": each.tokens_per_s, **facts}), flush=True)
        return
    table = Table("step", title=_title(built, SamplingParams(temperature=0.0)), title_justify="left")
    for column in ("tokens", "ms", "µs per token", "tokens/s", "CUDA graph"):
        table.add_column(column, justify="right")
    for each in figures:
        per_token = 1000 * each.milliseconds / each.num_tokens
        table.add_row(each.name, f"{each.num_tokens:,}", f"{each.milliseconds:.3f}", f"{per_token:.1f}",
                      f"{each.tokens_per_s:,.0f}", "yes" if each.captured else "no")  # fmt: skip
    out.print(table)


def _observed_runner(model: NamedModel) -> tuple[ModelRunner, BuiltEngine]:
    """The runner of an engine that is not used otherwise."""
    seen: list[Runner] = []

    def observe(runner: Runner) -> Runner:
        seen.append(runner)
        return runner

    built = start(model, report=True, observe=observe)
    [runner] = seen
    assert isinstance(runner, ModelRunner), runner
    return runner, built


def _cells(figure: "KernelFigure", compared: bool) -> list[str]:
    cells = [figure.name, f"{figure.microseconds:.1f}", f"{figure.rate:.2f} {figure.unit}"]
    theirs = figure.beside_microseconds
    if theirs is not None:
        cells += [f"{theirs:.1f}", f"{figure.microseconds / theirs:.2f}"]
    elif compared:
        cells += ["–", "–"]  # the library does not run such steps
    return cells


_CACHES = ("cold", "warm")
_PARTS = {
    "linear": "linear layers and head",
    "attention": "attention",
    "other": "norms, rope and other native work",
    "rest": "Python, scheduler, rest",
}


def startup(config: EngineConfig, repeats: int, batch: bool, as_json: bool) -> None:
    starts = measure_starts(config, repeats=repeats, batch=batch, say=lambda text: err.print(text, style="dim"))
    if as_json:
        plain = [{**start._asdict(), "phases": [phase._asdict() for phase in start.phases]} for start in starts]
        facts = environment(sys.argv[1:], pick_device(config.device).type)
        print(json.dumps({"bench": "startup", "model": config.model, "batch": batch, "starts": plain, **facts}))
        return
    out.print(_startup_table(starts, headline(config)))
    out.print("Medians, in seconds. Cold: no compiled kernels; files that were read before are in memory in both.")


def _startup_table(starts: Many[StartupTimes], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("", "cold", "warm", "what"):
        table.add_column(column, justify="right" if column in ("cold", "warm") else "left")
    for index, phase in enumerate(starts[0].phases):
        seconds = [
            _median_seconds([start.phases[index].seconds for start in _with_caches(starts, caches)])
            for caches in _CACHES
        ]
        table.add_row(phase.name, *seconds, phase.detail)
    table.add_row(
        "to the first token",
        *(_median_seconds([start.seconds for start in _with_caches(starts, c)]) for c in _CACHES),
        "",
    )
    return table


def _with_caches(starts: Many[StartupTimes], caches: str) -> list[StartupTimes]:
    return [start for start in starts if start.caches == caches]


def _median_seconds(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f}"


def _profile(model: NamedModel, given: Mapping[str, object]) -> None:
    runner, built = _observed_runner(model)
    assert isinstance(runner.model, Decoder), runner
    found = report.profile_steps(LLM.over(built), runner.model, int(str(given["repeats"])))
    if given["as_json"]:
        facts = {"model": built.name, "settings": settings(built), **environment(sys.argv[1:], built.machine.device)}
        derived = {"floor_ms": found.floor_ms, "times_floor": found.times_floor}
        print(json.dumps({"bench": "step profile", **found._asdict(), **derived, **facts}))
        return
    table = Table("one row", "ms per step", "share", title=f"{built.name} · {built.dtype}")
    for name in ("linear", "attention", "other", "rest"):
        milliseconds = getattr(found, f"{name}_ms")
        table.add_row(_PARTS[name], f"{milliseconds:.3f}", f"{milliseconds / found.step_ms:.1%}")
    table.add_row("step", f"{found.step_ms:.3f}", f"mean of {found.num_steps}")
    table.add_row("floor", f"{found.floor_ms:.3f}", f"{found.times_floor:.2f}× it")
    out.print(table)
    megabytes, speed = found.weight_bytes / 1e6, found.read_bytes_per_s / 1e9
    out.print(f"Floor: {megabytes:.1f} MB of weights at {speed:.1f} GB/s, the speed of a sum.")


def quality(
    model: NamedModel, forms: Mapping[str, Mapping[str, object]], text: Path | None, num_positions: int, window: int,
    as_json: bool,
) -> None:  # fmt: skip
    sample = read_text(text, model.opened, num_positions)
    found = list(measure_quality(model.config, model.opened, forms, sample.ids, window,
                                 lambda line: err.print(line, style="dim")))  # fmt: skip
    if as_json:
        facts = {"bench": "quality", "model": model.opened.name, "text": sample.name, "text_sha256": sample.sha256}
        rows = [each._asdict() for each in found]
        print(json.dumps({**facts, "window": window, "forms": rows, **environment(sys.argv[1:], "cpu")}))
        return
    title = f"{model.opened.name} · {len(sample.ids):,} tokens of {sample.name}, windows of {window} · against float32"
    out.print(_quality_table(found, title))


def _quality_table(found: Many[WeightQuality], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("settings", "top-1", "mean KL", "worst KL", "worst gap", "weights"):
        table.add_column(column, justify="left" if column in ("settings", "weights") else "right")
    for each in found:
        numbers = (f"{each.mean_kl:.1e}", f"{each.worst_kl:.1e}", f"{each.worst_gap:.2f}")
        table.add_row(each.settings, f"{each.agreement:.2%}", *numbers, each.weights)
    return table


def speculation(model: NamedModel, given: Mapping[str, object]) -> None:
    from quire.bench.speculation import SpeculationFigure, measure_speculation  # imports help texts

    def started(drafts: str) -> LLM:
        return LLM.over(start(model._replace(config=replace(model.config, speculative=drafts)), report=False))

    drafts = str(given["speculative"])
    table = Table("task", "requests", "tokens/s without", "with", "times as fast (each repeat)", "drafts accepted",
                  title=f"{model.opened.name} · --speculative {drafts}", title_justify="left")  # fmt: skip

    def add(each: SpeculationFigure) -> None:
        speeds = (statistics.median(seconds) for seconds in (each.plain_s, each.drafting_s))
        ratios = ", ".join(f"{ratio:.2f}" for ratio in each.ratios)
        table.add_row(each.task, str(each.num_requests), *(f"{each.num_tokens / speed:.1f}" for speed in speeds),
                      f"{each.ratio:.2f} ({ratios})", f"{each.accepted} of {each.drafted}")  # fmt: skip

    figures = measure_speculation(
        started("off"),
        started(drafts),
        tasks=given["tasks"],  # type: ignore[arg-type]  # as the command line has checked them
        sizes=given["sizes"],  # type: ignore[arg-type]
        repeats=int(str(given["repeats"])),
        num_output=int(str(given["num_output"])),
        temperature=float(str(given["temperature"])),
        say=lambda line: err.print(line, style="dim"),
    )
    for each in figures:
        if given["as_json"]:
            print(json.dumps({**each._asdict(), "ratio": each.ratio, **environment(sys.argv[1:], "cpu")}), flush=True)
        add(each)
    if not given["as_json"]:
        out.print(table)


def planted_speculation(model: NamedModel, given: Mapping[str, object]) -> None:
    from quire.bench.speculation import PlantedFigure, measure_planted, planted_plot

    runners: list[Runner] = []

    def observe(runner: Runner) -> Runner:
        runners.append(runner)
        return runner

    built = start(model, report=True, observe=observe, planted_drafts=True)
    (runner,) = runners
    assert isinstance(runner, ModelRunner), runner
    table = Table("accepted", "requests", "ms per token without", "times as fast with the governor",
                  f"always {given['num_drafts']} drafts", title=built.name, title_justify="left")  # fmt: skip
    figures = measure_planted(
        LLM.over(built),
        runner,
        chances=given["chances"],  # type: ignore[arg-type]  # as the command line has checked them
        sizes=given["sizes"],  # type: ignore[arg-type]
        repeats=int(str(given["repeats"])),
        num_input=int(str(given["num_input"])),
        num_output=int(str(given["num_output"])),
        num_drafts=int(str(given["num_drafts"])),
        sampling=str(given["sampling"]),
        say=lambda line: err.print(line, style="dim"),
    )
    measured: list[PlantedFigure] = []
    for each in figures:
        measured.append(each)
        if given["as_json"]:
            facts = {"governed": each.governed, "fixed": each.fixed, "sampling": given["sampling"], "model": built.name,
                     "settings": settings(built)}  # fmt: skip
            device = built.machine.device
            print(json.dumps({**each._asdict(), **facts, **environment(sys.argv[1:], device)}), flush=True)
        plain_ms = 1000 * statistics.median(each.plain_s) / (each.num_tokens - 1)
        table.add_row(f"{each.chance:.0%}", str(each.num_requests), f"{plain_ms:.2f}", f"{each.governed:.2f}",
                      f"{each.fixed:.2f}")  # fmt: skip
    if isinstance(given["plot"], Path):
        write_file(given["plot"], planted_plot(f"{built.name} on {built.machine.device}", measured), "plot")
    if not given["as_json"]:
        out.print(table)


def compare_transformers(model: NamedModel, given: Mapping[str, object]) -> None:
    import transformers  # optional

    from quire.bench.transformers_baseline import as_llama, compare_with_transformers

    built = start(model, report=True)
    # quire's kernels have threads of their own and leave one to torch: the baseline gets as many as quire has.
    torch.set_num_threads(int(str(given["threads"] or usable_cores().num_threads)))
    dtype = torch.bfloat16 if given["dtype"] == "bfloat16" else torch.float32
    baseline = as_llama(built.checkpoint.spec, weights_of(built.checkpoint, dtype), dtype)
    comparisons = compare_with_transformers(
        LLM.over(built),
        baseline,
        num_requests=int(str(given["requests"])),
        batch_size=int(str(given["batch"])),
        repeats=int(str(given["repeats"])),
        say=lambda text: err.print(text, style="dim"),
    )
    out.print(f"{built.name} · {built.dtype} · quire {__version__} · transformers {transformers.__version__}")
    table = Table()
    for column in ("discipline", "quire tok/s", "transformers tok/s", "times faster (each repeat)"):
        table.add_column(column, justify="left" if column == "discipline" else "right")
    for each in comparisons:
        ratios = ", ".join(f"{ratio:.2f}" for ratio in each.ratios)
        table.add_row(
            f"{each.workload} / {each.baseline.name}",
            f"{each.quire.tokens_per_s:.1f}",
            f"{each.baseline.tokens_per_s:.1f}",
            f"{each.ratio:.2f} ({ratios})",
        )
    out.print(table)
    if given["as_json"]:
        print(json.dumps(_summary(comparisons, built.dtype, transformers.__version__)))


def _summary(comparisons: "list[EngineComparison]", dtype: str, baseline: str) -> dict[str, object]:
    return {
        "quire": __version__,
        "torch": str(torch.__version__),
        "transformers": baseline,
        "python": platform.python_version(),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "races": [
            {
                "discipline": each.workload,
                "rival": each.baseline.name,
                "tokens": each.quire.tokens,
                "quire_s": each.quire.seconds,
                "rival_s": each.baseline.seconds,
                "ratio": each.ratio,
            }
            for each in comparisons
        ],
    }

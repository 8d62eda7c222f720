"""Subcommands of `quire bench` that measure an engine: throughput, latency, steps, startup, kernels, a server under
load, and the comparison with another engine. Only options: the measurements are imported when they are called."""

import shlex
import shutil
import sys
from collections.abc import Callable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from quire.bench.attention_steps import STANDARD_STEPS, AttentionStep, find_step
from quire.bench.race_peer import PEERS, PRECISIONS, Peer, find_peers
from quire.bench.step_times import STANDARD_RAGGED_STEPS, RaggedStep, find_ragged_step
from quire.bench.workload import WorkloadSlice, find
from quire.cli.options import (
    DraftsType,
    FiniteRange,
    OutputFile,
    check_packages,
    complete_model,
    engine_settings,
    integer_list,
    measured_engine_options,
    model_argument,
)
from quire.cli.streams import loading_status
from quire.core.errors import ConfigError
from quire.core.speculative import parse_sources

if TYPE_CHECKING:
    from quire.bench.service_levels import ServiceLevel

Command = TypeVar("Command", bound=Callable[..., object])

THROUGHPUT = ("nano", "1k1k", "exp", "bs8", "bs64", "bs256")
_BESIDE = ("fa3", "torch")  # libraries whose attention a CUDA graph can capture
_DTYPES = ("bfloat16", "float16")
_SAMPLINGS = ("greedy", "penalties", "logprobs")  # of planted drafts
_FORMS = ("", "quantization=int8", "quantization=int4", "quantization=none,dtype=bfloat16", "kv_cache_dtype=int8")
_TASKS = ("quote", "repeat", "chat", "json")
LATENCY = ("bs1", "bs8", "bs64", "bs256", "prefill2k", "prefill8k")


def workload_list(allowed: Many[str]) -> Callable[[click.Context, click.Parameter, str], tuple[str, ...]]:
    """The callback of an option such as `nano,64x4096+16`."""

    def parse(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
        words = tuple(word.strip() for word in value.split(","))
        for word in words:
            try:
                find(word, allowed)
            except ConfigError as error:
                raise click.BadParameter(error.message) from None
        return words

    return parse


def _steps(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[AttentionStep, ...]:
    """The steps of an option such as `decode 24x700,chunk 300+5000`; without it, the standard ones."""
    if value is None:
        return STANDARD_STEPS
    try:
        return tuple(find_step(word.strip()) for word in value.split(","))
    except ConfigError as error:
        raise click.BadParameter(error.message) from None


def _ragged_steps(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[RaggedStep, ...]:
    """The steps of an option such as `decode 64x1024,decode 32x1000 & chunk 480`; without it, the standard ones."""
    try:
        return tuple(map(find_ragged_step, STANDARD_RAGGED_STEPS if value is None else value.split(",")))
    except ConfigError as error:
        raise click.BadParameter(error.message) from None


def _probabilities(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...]:
    """The numbers of an option such as `0.8,0`."""
    try:
        found = tuple(float(word) for word in (value or "").split(",") if word)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers from 0 to 1, such as 0.8,0.") from None
    if not all(0 <= number <= 1 for number in found):
        raise click.BadParameter(f"{value!r} has a number outside 0 to 1; write such as 0.8,0.")
    return found


def _model_option(command: Command) -> Command:
    return click.option("--model", metavar="NAME", shell_complete=complete_model,
                        help="A model, or a shape for --load-format dummy.")(command)  # fmt: skip


def _workload_options(allowed: Many[str], default: str) -> Callable[[Command], Command]:
    """The options that throughput and latency share."""
    options = (
        click.option("--workload", "workloads", callback=workload_list(allowed), default=default, show_default=True,
                     metavar="NAME,…", help=f"One or several of {', '.join(allowed)}, or of "
                          "other shapes, COUNTxIN+OUT tokens: 64x4096+16, 512x32..256+64."),
        click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Repetitions."),
        click.option("--seed", type=click.IntRange(0), help="Random requests other than the published ones."),
        click.option("--requests", type=click.IntRange(1), help="Only the first N: a trial, no figure."),
        click.option("--scale", type=FiniteRange(0, 1, min_open=True), default=1.0, show_default=True,
                     help="Scale the length of prompts and outputs by this factor: a trial, no figure."),
        click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
        click.option("--top-p", type=float, default=1.0, show_default=True, help="Nucleus sampling; 1: off."),
        click.option("--top-k", type=int, default=0, show_default=True, help="Most likely tokens; 0: all."),
        click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="1: off."),
        click.option("--logprobs", type=int, help="Logprobs of each token and of N alternatives."),
        click.option("--prompt-logprobs", type=int, help="The same for prompt tokens."),
        click.option("--grammar", metavar="json|FILE",
                     help="Also with answers that follow a JSON schema, in turns: a list of what it describes."),
        click.option("--grammar-share", type=FiniteRange(0, 1, min_open=True), default=1.0, show_default=True,
                     help="The share of the requests under the grammar; the others run beside them."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object per workload instead of a table."),
    )  # fmt: skip

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.command()
@_model_option
@_workload_options(THROUGHPUT, "nano")
@measured_engine_options
def throughput(
    model: str | None, workloads: tuple[str, ...], requests: int | None, scale: float, **given: object
) -> None:
    """Offline throughput: all requests at once, answers of forced lengths, greedy by default."""
    from quire.cli.load_model import open_named

    opened = open_named(model, given)
    with loading_status():
        from quire.cli.bench_engine import throughput as work

    work(opened, workloads, WorkloadSlice(requests, scale), given)


@click.command()
@_model_option
@_workload_options(LATENCY, "bs1")
@click.option("--profile", is_flag=True, help="Instead: where the time of a one-row step goes, on a CPU.")
@measured_engine_options
def latency(model: str | None, workloads: tuple[str, ...], requests: int | None, scale: float, **given: object) -> None:
    """Latency of a closed batch: time per token, time to first token, inter-token latency."""
    from quire.cli.load_model import open_named

    opened = open_named(model, given)
    with loading_status():
        from quire.cli.bench_engine import latency as work

    work(opened, workloads, WorkloadSlice(requests, scale), given)


@click.command()
@_model_option
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True, help="Repetitions of both starts.")
@click.option(
    "--batch", is_flag=True, help="Start as for offline batches, with more CUDA graphs captured at the start."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@measured_engine_options
def startup(model: str | None, repeats: int, batch: bool, as_json: bool, **given: object) -> None:
    """Time from process start to the first token of a server, with and without cached compiled kernels."""
    from quire.cli.load_model import open_named

    config = open_named(model, given).config
    with loading_status():
        from quire.cli.bench_engine import startup as work

    work(config, repeats, batch, as_json)


@click.command()
@click.option("--heads", type=click.IntRange(1), default=32, show_default=True, help="Query heads.")
@click.option("--kv-heads", type=click.IntRange(1), default=8, show_default=True, help="Key heads.")
@click.option("--head-dim", type=click.IntRange(16, 256), default=128, show_default=True, help="Head dimension.")
@click.option("--window", type=click.IntRange(0), default=0, show_default=True, help="Sliding window; 0: none.")
@click.option("--softcap", type=FiniteRange(0), default=0.0, show_default=True, help="Logit soft cap; 0: none.")
@click.option("--dtype", type=click.Choice(_DTYPES), default="bfloat16", show_default=True, help="Of all tensors.")
@click.option("--block-size", type=click.IntRange(1, 256), default=16, show_default=True, help="Tokens in a block.")
@click.option("--steps", callback=_steps, metavar="STEP,…",
              help="Other steps than the default ones, named as in the table: "
              "decode 24x700, decode 9x10..2000, verify 16x900+4, chunk 300+5000, chunks 3x40.")  # fmt: skip
@click.option("--beside", type=click.Choice(_BESIDE), help="A library to compare with, interleaved.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per step instead of the table.")
def kernels(
    heads: int, kv_heads: int, head_dim: int, window: int, softcap: float, dtype: str, block_size: int,
    steps: tuple[AttentionStep, ...], beside: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Time and throughput of attention on a GPU, and those of another library."""
    if heads % kv_heads:
        raise click.UsageError(f"--heads is {heads}, which {kv_heads} key heads do not divide.")
    check_packages("quire bench kernels", "gpu", "triton")
    with loading_status():
        import torch

        from quire.bench.attention import HeadShape
        from quire.cli.bench_engine import kernels as work

    shape = HeadShape(heads, kv_heads, head_dim, window, softcap, getattr(torch, dtype), block_size)
    work(shape, steps, beside, as_json)


@click.command()
@_model_option
@click.option("--ours", "settings", multiple=True, metavar="NAME=VALUE,…",
              help="Settings of quire, such as quantization=int8; several times. Default: as the file stores the "
              "weights, int8, int4, bfloat16, and an int8 KV cache.")  # fmt: skip
@click.option("--text", type=click.Path(dir_okay=False, exists=True, path_type=Path), metavar="FILE",
              help="Text to read. Default: Python's help texts.")  # fmt: skip
@click.option("--positions", type=click.IntRange(2, 1_000_000), default=1024, show_default=True, help="Tokens of it.")
@click.option("--window", type=click.IntRange(2), default=512, show_default=True, help="Longest context.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def quality(
    model: str | None, settings: tuple[str, ...], text: Path | None, positions: int, window: int, threads: int | None,
    as_json: bool,
) -> None:  # fmt: skip
    """What forms of weights and KV cache lose on a CPU: KL divergence and top-1 agreement with float32."""
    from quire.cli.load_model import open_named

    forms = {each: engine_settings(each) for each in settings or _FORMS}
    opened = open_named(model, {"device": "cpu", "threads": threads})
    with loading_status():
        from quire.cli.bench_engine import quality as work

    work(opened, forms, text, positions, window, as_json)


@click.command()
@_model_option
@click.option("--steps", callback=_ragged_steps, metavar="STEP,…",
              help="Other steps than the default ones: decode 64x1024 (rows, and keys of each), chunk 512+2048 (tokens "
              "+ earlier keys), chunks 4x100, rows beside chunks: decode 32x1000 & chunk 480; with --speculative ngram "
              "on a GPU, verify 16x1024+4 (tokens of each row, three of them drafts).")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per step instead of the table.")
@measured_engine_options
def steps(model: str | None, steps: tuple[RaggedStep, ...], as_json: bool, **given: object) -> None:
    """Time of whole steps by their shape: decoding rows, prompt chunks, both."""
    from quire.cli.load_model import open_named

    opened = open_named(model, given)
    with loading_status():
        from quire.cli.bench_engine import steps as work

    work(opened, steps, as_json)


@click.command()
@_model_option
@click.option("--task", "tasks", type=click.Choice(_TASKS), multiple=True, default=_TASKS, show_default=True,
              help="What the requests ask for; several times.")  # fmt: skip
@click.option("--requests", "sizes", default="1,4,16", show_default=True, callback=integer_list(1, 1024),
              metavar="N,N,…", help="Requests at the same time.")  # fmt: skip
@click.option("--tokens", "num_output", type=click.IntRange(2), default=128, show_default=True, help="Of each output.")
@click.option(
    "--repeats", type=click.IntRange(1), default=5, show_default=True, help="Pairs of runs, one warm-up more."
)
@click.option("--temperature", type=FiniteRange(0, 2), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--speculative", type=DraftsType(), default="auto", show_default=True, metavar="DRAFTS",
              help="As of quire serve; off: two engines without, which shows how exact the ratios are.")  # fmt: skip
@click.option("--planted", "chances", callback=_probabilities, metavar="P,P,…",
              help="On a GPU, instead of tasks: any draft is accepted with this probability; with the governor and "
              "without; drafted by prompt lookup, or by the draft model of --speculative draft:MODEL.")  # fmt: skip
@click.option("--drafts", "num_drafts", type=click.IntRange(1, 7), default=4, show_default=True,
              help="With --planted: of a request in a step, at most.")  # fmt: skip
@click.option("--input", "num_input", type=click.IntRange(1), default=512, show_default=True,
              help="With --planted: tokens of each prompt.")  # fmt: skip
@click.option("--sampling", type=click.Choice(_SAMPLINGS), default="greedy", show_default=True,
              help="With --planted: penalties and bias, or log-probabilities, of every request.")  # fmt: skip
@click.option("--plot", type=OutputFile(), metavar="FILE",
              help="With --planted: write the gain by number of requests as SVG.")  # fmt: skip
@click.option("--load-format", type=click.Choice(("auto", "dummy")), default="auto", show_default=True,
              help="dummy: random weights.")  # fmt: skip
@click.option("--device", type=click.Choice(("cpu", "cuda")), help="[default: cpu; with --planted: cuda]")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line instead of the table.")
def speculation(
    model: str | None, threads: int | None, device: str | None, load_format: str, chances: tuple[float, ...],
    sizes: tuple[int, ...], num_input: int, num_output: int, **given: object,
) -> None:  # fmt: skip
    """Speed of the engine with speculative decoding over that without, on real text, in turns."""
    if given["sampling"] != "greedy" and not chances:
        raise ConfigError(
            f"--sampling {given['sampling']} is for planted drafts: give --planted, as in --planted 0.8,0.",
            param="sampling",
        )
    if given["plot"] is not None and not chances:
        raise ConfigError(
            "--plot draws the gain of planted drafts: give --planted, as in --planted 0.8,0.", param="plot"
        )
    from quire.cli.load_model import open_named

    given |= {"sizes": sizes, "num_input": num_input, "num_output": num_output, "chances": chances}
    chosen: dict[str, object] = {"device": device or "cpu", "threads": threads, "load_format": load_format,
                                 "speculative": given["speculative"]}  # fmt: skip
    if chances:
        drafts = str(given["speculative"])  # planted drafts come from anywhere; a draft model takes its time
        chosen |= {"device": device or "cuda", "max_num_seqs": max(sizes),
                   "speculative": "ngram" if parse_sources(drafts).model is None else drafts,
                   "max_model_len": num_input + num_output}  # fmt: skip
    opened = open_named(model, chosen)
    with loading_status():
        from quire.cli import bench_engine

    (bench_engine.planted_speculation if chances else bench_engine.speculation)(opened, given)


@click.command("transformers")
@model_argument
@click.option("--requests", type=click.IntRange(1), default=32, show_default=True, help="Prompts of the mixed load.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Repetitions of each comparison.")
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Size of transformers' static batches.",
)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True,
              help="Number format of the weights.")  # fmt: skip
@click.option("--threads", type=int, help="CPU threads of each engine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def transformers(model: str | None, **given: object) -> None:
    """Compare with transformers' generate on the same weights, interleaved, in one process."""
    check_packages("quire bench transformers", "bench", "transformers")
    from quire.cli.load_model import open_named

    opened = open_named(model, given)
    with loading_status():
        from quire.cli.bench_engine import compare_transformers as work

    work(opened, given)


def _command(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str] | None:
    """The words of a command. Its program must exist now: it runs only after the first run of quire."""
    if value is None:
        return None
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not a command: {str(error).lower()}.") from None
    if not words:
        raise click.BadParameter("it is empty; give the other engine's command in quotes.")
    if shutil.which(words[0]) is None:
        raise click.BadParameter(f"there is no program {words[0]!r} on this machine.")
    return words


def _peer_list(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[Peer, ...]:
    try:
        return find_peers(",".join(PEERS) if value is None else value)
    except ConfigError as error:
        raise click.BadParameter(error.message) from None


def _precisions(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    words = tuple(word.strip() for word in value.split(",")) if value else ()
    for word in words:
        if word not in PRECISIONS:
            raise click.BadParameter(f"there is no precision {word!r} here; there are {', '.join(PRECISIONS)}.")
    return words


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--peers",
    metavar="NAME,…",
    callback=_peer_list,
    help=f"Engines to install and compare with: {', '.join(PEERS)}. Default: all that can be installed.",
)
@click.option(
    "--ours",
    "settings",
    multiple=True,
    metavar="NAME=VALUE,…",
    help="Settings of quire, such as dtype=bfloat16,threads=2; several times: each has its turns.",
)
@click.option(
    "--model", metavar="NAME", shell_complete=complete_model, help="A model; llama.cpp reads GGUF files only."
)
@click.option(
    "--precision",
    "precisions",
    metavar="NAME,…",
    callback=_precisions,
    help=f"Of the peers: {', '.join(PRECISIONS)}. Default: the file's own where the peer reads it.",
)
@click.option(
    "--workload",
    "workloads",
    default="one,batch,prefill,shared",
    show_default=True,
    metavar="NAME,…",
    help="These, or other shapes: COUNTxIN+OUT or COUNTxSHARED:IN+OUT, as 24x16..256+8..64, 8x800:32+32.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of lengths and token ids.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads of each engine. Default: its own.")
@click.option("--busy", type=click.IntRange(0), default=0, show_default=True, help="Processes that spin meanwhile.")
@click.option("--rounds", type=click.IntRange(1), help="Turns of each engine. Default: 3; with --rival 1.")
@click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value="-",
    metavar="[FILE]",
    help="Print one JSON object instead of the tables; with a FILE, write it there beside them.",
)
@click.option(
    "--rival",
    metavar="COMMAND",
    callback=_command,
    help="Instead of peers, a command that prints a JSON line for each workload: workload, seconds, "
    "output_tokens. After -- come throughput or latency and its options.",
)
@click.argument("ours", nargs=-1, type=click.UNPROCESSED, metavar="[-- throughput|latency OPTIONS…]")
def race(rival: list[str] | None, rounds: int | None, json_file: str | None, ours: tuple[str, ...],
         **given: object) -> None:  # fmt: skip
    """Compare with other engines on this machine's CPU, in turns, on the same token ids."""
    if rival is None:
        if ours:
            raise click.UsageError(f"{ours[0]!r} is not an option here; a command of quire bench goes with --rival.")
        from quire.cli.bench_processes import race_peers

        race_peers(given, rounds or 3, json_file)
        return
    if not ours or ours[0] not in ("throughput", "latency"):
        named = repr(ours[0]) if ours else "nothing"
        raise click.UsageError(f"after -- comes throughput or latency with its options, not {named}.")
    if json_file not in (None, "-"):
        raise click.UsageError("with --rival, --json prints and takes no file.")
    from quire.cli.bench_processes import race as work

    work([sys.executable, "-m", "quire", "bench", *ours, "--json"], rival, rounds or 1, json_file is not None)


def _levels(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> "tuple[ServiceLevel, ...]":
    from quire.bench.service_levels import parse_level

    try:
        return tuple(parse_level(text) for text in value)
    except ConfigError as error:
        raise click.BadParameter(error.message) from None


def _load_options(command: Command) -> Command:
    """The options of `serve` and `capacity`: which server, which requests, when."""
    options = (
        click.option("--url", metavar="URL", help="Address of an OpenAI-style server, such as http://127.0.0.1:8000."),
        click.option("--simulate", is_flag=True, help="Instead of a server: quire's scheduler on a simulated H200 with "
                     "Llama-3.1-8B."),
        click.option("--itl-target", "itl_target_ms", type=FiniteRange(0, min_open=True), metavar="MS",
                     help="Of the simulated server: its inter-token latency target."),
        click.option("--ttft-target", "ttft_target_ms", type=FiniteRange(0, min_open=True), metavar="MS",
                     help="Of the simulated server: its time-to-first-token target."),
        click.option("--trace", default="sharegpt", show_default=True, metavar="NAME",
                     help="A trace file (.csv, .jsonl, gzipped or not), or sharegpt, mooncake, stall."),
        click.option("--from", "from_s", type=FiniteRange(0), default=0.0, show_default=True, metavar="S",
                     help="Seconds of the trace before the first request."),
        click.option("--seconds", type=FiniteRange(0, min_open=True), default=60.0, show_default=True, metavar="S",
                     help="Seconds in which requests are sent."),
        click.option("--scale", type=FiniteRange(0, min_open=True), metavar="X",
                     help="Factor on the arrival rate of the trace. Default: 1."),
        click.option("--rate", type=FiniteRange(0, min_open=True), metavar="R",
                     help="Random (Poisson) arrivals per second. Default: those of the trace; 8 if it has none."),
        click.option("--max-prompt", type=click.IntRange(1), metavar="N", help="Leave out longer prompts (tokens)."),
        click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of prompts and arrivals."),
        click.option("--model", metavar="NAME", help="Model name to send. Default: the first that the server lists."),
        click.option("--api-key-file", type=click.Path(dir_okay=False, exists=True, path_type=Path), metavar="FILE",
                     help="File with the API key to send."),
        click.option("--vocab-size", type=click.IntRange(2), default=30_000, show_default=True,
                     help="Prompt token ids are below this."),
        click.option("--warm-up", type=click.IntRange(0), default=8, show_default=True,
                     help="Short requests before the first."),
        click.option("--timeout", "timeout_s", type=FiniteRange(0, min_open=True), default=600.0, show_default=True,
                     metavar="S", help="A request that takes longer has failed."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@_load_options
@click.option("--level", "levels", multiple=True, callback=_levels, default=("500/30", "2000/100"), show_default=True,
              metavar="TTFT/TPOT", help="Service level for the goodput, in ms; several times.")  # fmt: skip
@click.option("--events", type=OutputFile(), metavar="FILE",
              help="Write the raw events, one request per line.")  # fmt: skip
@click.option("--plot", type=OutputFile(), metavar="FILE",
              help="Write latencies by percentile as SVG.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def serve(levels: "tuple[ServiceLevel, ...]", events: Path | None, plot: Path | None, as_json: bool,
          **given: object) -> None:  # fmt: skip
    """Open-loop load on a server: a trace's requests at their times; TTFT, ITL, TPOT, E2E and goodput."""
    from quire.cli.bench_processes import LoadRun
    from quire.cli.bench_processes import serve as work

    work(LoadRun.read(given), levels, events, plot, as_json)


@click.command()
@_load_options
@click.option("--level", "levels", multiple=True, callback=_levels, default=("500/30",), show_default=True,
              metavar="TTFT/TPOT", help="Service level in ms; several times: one search each.")  # fmt: skip
@click.option("--tolerance", type=FiniteRange(0, 1, min_open=True), default=0.05, show_default=True,
              help="The search ends when the rate is known within this fraction.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def capacity(levels: "tuple[ServiceLevel, ...]", tolerance: float, as_json: bool, **given: object) -> None:
    """The highest rate at which 99 % of the requests meet a service level, by bisection of the arrival rate."""
    from quire.cli.bench_processes import LoadRun
    from quire.cli.bench_processes import capacity as work

    work(LoadRun.read(given), levels, tolerance, as_json)


@click.command()
@click.option("--split", is_flag=True, help="Compare with pools of prefill and decode engines. Without it: replicas.")
@click.option("--gpus", default="2,4,8", show_default=True, callback=integer_list(1, 64), metavar="N,N,…",
              help="Numbers of simulated GPUs, 1 to 64.")  # fmt: skip
@click.option("--engines", type=click.IntRange(1, 64), metavar="N",
              help="Instead of a simulation: real servers with N engine processes on this CPU, in turns.")  # fmt: skip
@click.option("--trace", default="sharegpt", show_default=True, metavar="NAME",
              help="A trace file (.csv, .jsonl, gzipped or not), or sharegpt, mooncake, stall.")  # fmt: skip
@click.option("--level", "levels", multiple=True, callback=_levels, default=("500/30",), show_default=True,
              metavar="TTFT/TPOT", help="Service level in ms; several times.")  # fmt: skip
@click.option("--seconds", type=FiniteRange(0, min_open=True), default=30.0, show_default=True, metavar="S",
              help="Seconds in which requests arrive.")  # fmt: skip
@click.option("--max-prompt", type=click.IntRange(1), metavar="N", help="Leave out longer prompts (tokens).")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of prompts and arrivals.")
@click.option("--bandwidth", type=FiniteRange(0, min_open=True), default=50.0, show_default=True, metavar="GB/S",
              help="Simulated: of the link to each decode engine; 50 is 400 Gb/s.")  # fmt: skip
@click.option("--handoff", "handoff_ms", type=FiniteRange(0), default=2.0, show_default=True, metavar="MS",
              help="Simulated: messages from a prefill to a decode engine.")  # fmt: skip
@click.option("--choose-up-to", type=click.IntRange(1, 64), default=16, show_default=True, metavar="N",
              help="Simulated: more GPUs than these are used as the largest number up to here.")  # fmt: skip
@click.option("--tolerance", type=FiniteRange(0, 1, min_open=True), default=0.05, show_default=True,
              help="Simulated: a search ends when the rate is known within this fraction.")  # fmt: skip
@click.option("--plot", type=OutputFile(), metavar="FILE",
              help="Simulated: write goodput per GPU as SVG.")  # fmt: skip
@click.option("--model", metavar="NAME", shell_complete=complete_model,
              help="With --engines: a model. Default: the default model.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="With --engines: of each.")
@click.option("--rate", type=FiniteRange(0, min_open=True), default=1.0, show_default=True, metavar="R",
              help="With --engines: random (Poisson) arrivals per second.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True, help="With --engines: of each setup.")
@click.option("--max-output", type=click.IntRange(1), default=64, show_default=True, metavar="N",
              help="With --engines: longer answers are cut (tokens).")  # fmt: skip
@click.option("--vocab-size", type=click.IntRange(2), default=30_000, show_default=True,
              help="With --engines: prompt token ids are below this.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def goodput(levels: "tuple[ServiceLevel, ...]", plot: Path | None, as_json: bool, **given: object) -> None:
    """Goodput at a service level: replicas with chunked prefill against prefill and decode pools."""
    if given["engines"] is None:
        from quire.cli.bench_goodput import simulated

        simulated(given, levels, plot, as_json)
        return
    if plot is not None:
        raise ConfigError("--plot draws goodput by the number of simulated GPUs: leave out --engines.", param="plot")
    from quire.cli.bench_goodput import served

    served(given, levels, as_json)


COMMANDS = (
    throughput, latency, steps, startup, kernels, quality, speculation, transformers, race, serve, capacity, goodput,
)  # fmt: skip

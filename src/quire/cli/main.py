"""The command `quire`: its subcommands and their options. A subcommand's code is imported when it is called, so that
`--help` is quick and loads no torch."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from quire.catalog.names import short_name
from quire.cli.config_file import describe_config, load_config, read_tables
from quire.cli.options import (
    FiniteRange,
    OutputFile,
    batch_options,
    check_batch_files,
    check_model,
    check_packages,
    check_remote,
    check_sampling,
    complete_model,
    engine_options,
    hub_options,
    integer_list,
    mistyped_variables,
    model_argument,
    name_variables,
    remote_options,
    sampling_options,
    serving_options,
)
from quire.cli.streams import flushed_output, loading_status, open_streams, stops_on_sigterm
from quire.cli.usage_errors import BenchGroup, QuireGroup, ServeCommand
from quire.config import EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.core.process import gc_frozen_imports

if TYPE_CHECKING:
    from quire.cli.printed_reply import ReplyModel

_VARIABLES = (
    "Each option is also a variable of the environment, --max-model-len as QUIRE_MAX_MODEL_LEN; flags override it."
)


def _print_version(ctx: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from quire.cli.build_info import describe_build

        print("\n".join(describe_build()))
        ctx.exit()


@click.group(cls=QuireGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("-V", "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version,
              help="Show the version and what it runs on, and exit.")  # fmt: skip
def app() -> None:
    """An LLM inference and serving engine: paged KV cache, continuous batching, prefix caching.

    MODEL is a path, a short name or a hub id; nothing means the default model.
    """


def _complete_file(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    return [CompletionItem(typed, type="file")]


@add_completion_class
class BashCompletion(BashComplete):
    """bash ends a word at a colon and at an equals sign, and puts a completion where the last part begins. It takes a
    completion with a space for two."""

    def get_completion_args(self) -> tuple[list[str], str]:
        args, last = super().get_completion_args()
        words: list[str] = []
        for word in (*args, last):
            if words and words[-1].startswith("--") and word == "=" and word is not last:
                continue
            if words and (word == ":" or words[-1].endswith(":")):
                words[-1] += word
            else:
                words.append(word)
        self._begun = words[-1].removesuffix(last) if last != ":" else words[-1]
        return words[:-1], words[-1]

    def format_completion(self, item: "CompletionItem[str]") -> str:
        item.value = item.value.removeprefix(self._begun)
        return super().format_completion(item)

    def complete(self) -> str:
        return "\n".join(line for line in super().complete().split("\n") if not any(map(str.isspace, line)))


def main() -> None:
    """The console script. An error that a user can cause ends in one sentence, not in a traceback."""
    open_streams()
    try:
        with flushed_output():
            app()
    except QuireError as error:
        print(f"quire: {error.message}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


@app.command()
@click.argument("words", nargs=-1, required=True, metavar='[MODEL] "PROMPT"', shell_complete=complete_model)
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Longest completion.")
@click.option("--chat", is_flag=True, help="Apply the model's chat template to the prompt.")
@remote_options
@sampling_options
@engine_options
@click.option("-v", "--verbose", is_flag=True, help="Print the startup steps, and the speed at the end.")
@click.pass_context
def run(ctx: click.Context, /, words: tuple[str, ...], **given: object) -> None:
    """Complete one prompt and print the text as it is generated. A prompt of - is read from stdin."""
    if len(words) > 2:
        raise click.UsageError(f"run takes [MODEL] and one prompt, not {len(words)} words: put the prompt in quotes.")
    if len(words) == 1 and short_name(words[0]):
        raise click.UsageError(f'{words[0]} is a model; say what to complete: quire run {words[0]} "PROMPT".')
    model, prompt = words if len(words) == 2 else (None, words[0])
    check_sampling(given)
    if given["url"] is None:
        check_model(model, ctx.params)
    from quire.cli.chat import read_prompt
    from quire.cli.chat import run as work

    text = read_prompt(prompt)
    raise SystemExit(work(_reply_model(ctx, model, report=bool(given["verbose"])), text, given))


@app.command()
@model_argument
@click.option("--max-tokens", type=int, help="Longest reply. Default: the rest of the context.")
@click.option("--system", help="A system message.")
@click.option("--markdown/--no-markdown", default=None,
              help="Render markdown, or print it as it is. Default: render it on a terminal.")  # fmt: skip
@remote_options
@sampling_options
@engine_options
@click.pass_context
def chat(ctx: click.Context, /, model: str | None, **given: object) -> None:
    """Chat in the terminal: with a model here, or with --url on any OpenAI-compatible server."""
    check_sampling(given)
    if given["url"] is None:
        check_model(model, ctx.params)
    from quire.cli.chat import chat as work

    work(_reply_model(ctx, model, report=True), given)


def _reply_model(ctx: click.Context, model: str | None, *, report: bool) -> "ReplyModel":
    """The model that answers: of a server with --url, else loaded here."""
    given = ctx.params
    check_remote(ctx)
    if given["url"] is not None:
        from quire.cli.remote_model import RemoteModel

        return RemoteModel(given["url"], given["api_key"], model)
    from quire.cli.load_model import open_named  # before torch: a wrong name is answered at once

    opened = open_named(model, given)
    with loading_status():
        from quire.cli.local_model import LocalModel
    local = LocalModel(opened, given, report=report)
    if ctx.info_name == "chat":
        local.check_chat()
    return local


@app.command(epilog=_VARIABLES, cls=ServeCommand)
@model_argument
@click.option("--config", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", is_eager=True,
              expose_value=False, callback=load_config, help="TOML file of options.")  # fmt: skip
@click.option("--print-config", is_flag=True, help="Print all options in force as such a file, and exit.")
@serving_options
@engine_options
@click.pass_context
def serve(ctx: click.Context, /, model: str | None, host: str, port: int, **given: object) -> None:
    """Serve a model over HTTP, with OpenAI-compatible APIs. Several models are tables [models.NAME] of --config."""
    if given.pop("print_config"):
        print(describe_config(ctx))
        return
    for warning in mistyped_variables(ctx.command, os.environ):
        print(f"quire: {warning}", file=sys.stderr)
    tables = read_tables(ctx)
    for table in tables if model is None else ():  # a model beside them is refused below
        with _named(table.name):
            check_model(table.given["model"], table.given)
    if not tables:
        check_model(model, given)
    from quire.cli.serve_checks import check_address

    check_address(host, given)
    with stops_on_sigterm():
        with loading_status("Stopped.", 0):
            from quire.cli.serve import serve as work

        work(model, host, port, given, tables)


@contextmanager
def _named(model: str) -> Iterator[None]:
    """Of several models, an error says whose it is."""
    try:
        yield
    except QuireError as error:
        error.message = f"[models.{model}]: {error.message}"
        raise


@app.command()
@click.argument("source", metavar="INPUT.jsonl", shell_complete=_complete_file)
@model_argument
@click.option("-o", "--output", "target", required=True, metavar="OUTPUT.jsonl", help="Output file; - is stdout.",
              shell_complete=_complete_file)  # fmt: skip
@click.option("--concurrency", type=click.IntRange(1), help="Concurrent requests. Default: enough to fill the engine.")
@batch_options
@engine_options
def batch(source: str, target: str, model: str | None, **given: object) -> None:
    """Run a file of requests in OpenAI's batch format; - is stdin.

    Results that the output file already has are kept, so an interrupted run can be resumed; lines that were rejected
    or failed are run again. Status 1 if a line could not be read or was rejected.
    """
    check_batch_files(source, target)
    check_model(model, given)
    with loading_status():
        from quire.cli.batch import batch as work

    raise SystemExit(work(source, target, model, given))


@app.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per model.")
def list_models(as_json: bool) -> None:
    """List the models on this machine: their names, sizes and paths."""
    from quire.cli import models as work

    work.list_models(as_json)


@app.command()
@model_argument
@hub_options
def pull(model: str | None, revision: str | None, token: str | None) -> None:
    """Download a model and print its path. What was interrupted is resumed.

    Of the hub: org/name, or one GGUF file as org/name:Q4_K_M or org/name:file.gguf. The disk's space is checked
    before, checksums after.
    """
    from quire.cli import models as work

    work.pull(model, revision, token)


@app.command()
@model_argument
@click.option("--verify", is_flag=True, help="Read all files and compare their checksums.")
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(model: str | None, verify: bool, revision: str | None, as_json: bool) -> None:
    """Show what a model's files say of it: architecture, size, context, chat format. Downloads nothing."""
    from quire.cli import models as work

    if verify:
        work.verify(model, revision)
    else:
        work.show(model, revision, as_json)


@app.command()
@click.argument("names", nargs=-1, required=True, metavar="MODEL…", shell_complete=complete_model)
def rm(names: tuple[str, ...]) -> None:
    """Remove downloaded models, by the names that quire list shows; from the hub's cache for other programs, too."""
    from quire.cli import models as work

    work.remove(names)


@app.command()
@click.argument("url", default="http://127.0.0.1:8000")
@click.option("--api-key-file", type=click.Path(dir_okay=False, exists=True, path_type=Path), metavar="FILE",
              help="API key: the first key of this file, which may be the server's key file.")  # fmt: skip
@click.option("--api-key", envvar="QUIRE_API_KEY", metavar="KEY",
              help="API key. The process list shows it: prefer the variable QUIRE_API_KEY.")  # fmt: skip
@click.option("--every", "every_s", type=FiniteRange(0.1, 3600), default=1.0, show_default=True,
              help="Seconds between two samples.")  # fmt: skip
@click.option("--once", is_flag=True, help="Take two samples, print one report.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per report.")
def top(url: str, api_key_file: Path | None, api_key: str | None, every_s: float, once: bool, as_json: bool) -> None:
    """Show requests, tokens and latencies of the server at URL, once per interval."""
    check_packages("quire top", "serve", "prometheus_client")
    from quire.cli.top import top as work

    work(url, api_key_file, api_key, every_s=every_s, once=once, as_json=as_json)


@app.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Report devices, packages and models: what is found, what would be used, what is missing."""
    with loading_status():
        from quire.cli.doctor import doctor as work

    work(as_json)


@app.command()
@click.option("--steps", type=click.IntRange(1), default=20_000, show_default=True, help="Audited steps to run.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same workloads.")
@click.option("--runner", type=click.Choice(["numpy", "torch", "ranks", "pipeline", "cuda"]), default="numpy",
              show_default=True,
              help="numpy: the oracle runner. torch: the integer model in the model runner. ranks: two of these. "
              "pipeline: two stages. cuda: on a GPU.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Number of processes.")
@click.option("--trial", type=int, help="Run only the scenario with this seed.")
@click.option("--record", type=OutputFile(), metavar="FILE",
              help="Run one scenario and write its journal, for quire replay.")  # fmt: skip
@click.option("--part", hidden=True, help="Internal: one of several jobs.")
def check(
    steps: int, seed: int, runner: str, jobs: int, trial: int | None, record: Path | None, part: str | None
) -> None:
    """Run random workloads through the scheduler and compare with an exact oracle. The last line is one JSON object."""
    from quire.cli.check import CheckOptions
    from quire.cli.check import check as work

    raise SystemExit(work(CheckOptions(steps, seed, runner, jobs, part, trial, record)))


@app.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--view", is_flag=True, help="Show the steps in the page /engine, on this machine.")
@click.option("--port", type=click.IntRange(0, 65535), metavar="PORT",
              help="Of the page; 0: any free one.  [default: 8001]")  # fmt: skip
def replay(file: str, view: bool, port: int | None) -> None:
    """Replay the scheduling decisions of a journal. The last line is one JSON object; status 1 if one differs."""
    if not view:
        if port is not None:
            raise ConfigError("--port is for --view: add it, or leave out --port.", param="port")
        from quire.cli.check import replay as work

        raise SystemExit(work(Path(file)))
    check_packages("quire replay --view", "serve", "starlette", "uvicorn", "msgspec")
    from quire.cli.check import view_replay

    view_replay(Path(file), 8001 if port is None else port)


@app.group(cls=BenchGroup)
def bench() -> None:
    """Benchmarks. Comparisons are ratios from one run; figures of one engine come with machine and command."""


@bench.command("overhead")
@click.option("--model", shell_complete=complete_model,
              help="A path, a short name or a hub id. Default: the default model.")  # fmt: skip
@click.option("--streams", type=click.IntRange(1, 4096), default=64, show_default=True, help="Concurrent streams.")
@click.option("--output-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens of each stream.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Repetitions, interleaved.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads of each engine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def bench_overhead(
    model: str | None, streams: int, output_tokens: int, repeats: int, threads: int | None, as_json: bool
) -> None:
    """Overhead of the server: the same streams through the engine alone and over HTTP, interleaved, with CPU times."""
    from quire.bench.serving import ServingLoad
    from quire.cli.bench_processes import overhead as work

    work(ServingLoad(model, streams, output_tokens, threads), repeats, as_json)


@bench.command("scheduler")
@click.option("--rows", callback=integer_list(1, 100_000), default="16,64,256,1024,4096", show_default=True,
              metavar="N,N,…", help="Numbers of running rows.")  # fmt: skip
@click.option("--waiting", callback=integer_list(0, 10_000_000), default="0,100,10000,100000", show_default=True,
              metavar="N,N,…", help="Numbers of waiting requests.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True, help="Rounds of 64 steps each.")
@click.option("--plot", type=OutputFile(), help="Write the curves to this SVG file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list instead of the table.")
def bench_scheduler(
    rows: tuple[int, ...], waiting: tuple[int, ...], rounds: int, plot: Path | None, as_json: bool
) -> None:
    """CPU time of the scheduler per step (plan and absorb), by running rows and waiting requests."""
    from quire.cli.bench_scheduler import scheduler as work

    work(rows, waiting, rounds, plot, as_json)


@bench.command("regimes")
@click.option("--workload", default="sharegpt", show_default=True, help="sharegpt, mooncake, or a trace file.")
@click.option("--requests", type=click.IntRange(1), help="Only the first N requests.")
@click.option("--rate", type=FiniteRange(0, min_open=True), default=64.0, show_default=True,
              help="Arrivals per second.")  # fmt: skip
@click.option("--blocks", type=click.IntRange(1), default=16_384, show_default=True, help="KV blocks of 16 tokens.")
@click.option("--max-model-len", type=click.IntRange(16), default=8192, show_default=True,
              help="Longest request; what contiguous regimes reserve for each.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the tables.")
def bench_regimes(workload: str, requests: int | None, as_json: bool, **given: float) -> None:
    """Batching regimes, from static batching to prefix caching, and overcommit policies, on a simulated machine."""
    from quire.cli.bench_scheduler import regimes as work

    work(workload, requests, given, as_json)


@bench.command("pacing")
@click.option("--workload", default="sharegpt", show_default=True, help="sharegpt, mooncake, or a trace file.")
@click.option("--rate", type=FiniteRange(0, min_open=True),
              help="Random arrivals per second. Default: the arrivals of the trace, or 8 if it has none.")  # fmt: skip
@click.option("--scale", type=FiniteRange(0, min_open=True), default=1.0, show_default=True,
              help="Factor on the arrival rate.")  # fmt: skip
@click.option("--skip", "skip_s", type=FiniteRange(0), default=0.0, show_default=True,
              help="Seconds to skip at the start of the trace.")  # fmt: skip
@click.option("--seconds", type=FiniteRange(0, min_open=True), default=60.0, show_default=True,
              help="Seconds of arrivals.")  # fmt: skip
@click.option("--itl-target", "itl_target_ms", type=FiniteRange(0, min_open=True), metavar="MS",
              help="Inter-token latency target, instead of the default.")  # fmt: skip
@click.option("--ttft-target", "ttft_target_ms", type=FiniteRange(0, min_open=True), metavar="MS",
              help="Time-to-first-token target, instead of the default.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def bench_pacing(
    workload: str, rate: float | None, scale: float, skip_s: float, seconds: float, itl_target_ms: float | None,
    ttft_target_ms: float | None, as_json: bool,
) -> None:  # fmt: skip
    """Effect of step sizing on time to first token and inter-token latency, on a simulated H200."""
    from quire.cli.bench_scheduler import pacing as work
    from quire.workload.traces import TraceWindow

    work(workload, TraceWindow(skip_s, seconds, scale, rate), itl_target_ms, ttft_target_ms, as_json)


@bench.command("first-token", hidden=True)
@click.option("--since", "since_s", type=float, required=True, help="When this process was started.")
@click.option("--batch", is_flag=True, help="As an engine for batches.")
def bench_first_token(since_s: float, batch: bool) -> None:
    """What `startup` starts: reads settings from stdin, makes one token, and says how long each part took."""
    reached_s = time.monotonic()
    with gc_frozen_imports():
        from quire.engine.startup import import_without_torch, preload_torch

        preload_torch()
        import_without_torch()
        from quire.engine.open_model import open_model

        opened = open_model(config := EngineConfig(**json.load(sys.stdin)))
        opened_s = time.monotonic()
        import torch  # noqa: F401  # timed alone: most of the import time

        torch_s = time.monotonic()
        from quire.bench.startup import ImportTimes, first_token

    times = ImportTimes(since_s, reached_s, opened_s, torch_s)
    print(json.dumps(first_token(config, opened, times, serving=not batch)))


for configured in (serve, batch, run, chat):
    name_variables(configured)

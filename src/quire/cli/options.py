"""Options in groups, as decorators: of the engine and of sampling, which several commands share, and of serving.

Numbers in options: several whole ones with commas between them, and one within limits.

Options of other engines that are not here: what whoever brings one along does instead.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from quire.config import ATTENTION_BACKENDS, DTYPES, OVERCOMMITS, REGIMES, EngineConfig
from quire.core.sampling import SamplingParams
from quire.formats.checkpoint import GenerationDefaults

_MANY = 20  # digits, which no limit has


class BoundedInt(click.FloatRange):
    """As click's own, which lets nan through: it lies on no side of any limit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number that can be counted with.", param, ctx)
        return number


def counts(least: int, most: int) -> Callable[[click.Context, click.Parameter, str], tuple[int, ...]]:
    """The callback of an option such as `16,64,256`, none outside its limits."""

    def parse(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
        words = [word.strip().replace("_", "") for word in value.split(",")]
        if not all(word.isdecimal() and len(word) < _MANY and least <= int(word) <= most for word in words):
            raise click.BadParameter(
                f"{value!r} is no list of whole numbers from {least} to {most:,}, such as 16,64,256."
            )
        return tuple(map(int, words))

    return parse


Command = TypeVar("Command", bound=Callable[..., object])

_UNITS = {"": 1, "k": 1000, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


class Size(click.ParamType):  # type: ignore[type-arg]  # generic only in newer releases
    """A whole number that may carry a unit: 32k, 2GiB, 500MB. Where it can be derived, `auto` says so."""

    name = "size"

    def __init__(self, *, binary_k: bool = False, derived: bool = False, least: int = 0) -> None:
        self._units = {**_UNITS, "k": 1 << 10} if binary_k else _UNITS
        self._derived = derived
        self._least = least

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if isinstance(value, int) or value is None:
            return value
        text = str(value).strip().lower()
        if text == "auto" and self._derived:
            return None
        parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text)
        if parts is None:
            self.fail(f"{value!r} is not a size; write a number, or for example 32k or 2GiB.", param, ctx)
        number = int(float(parts[1]) * self._units[parts[2] or ""])
        if number < self._least:
            self.fail(f"{value!r} is too small; it must be at least {self._least}.", param, ctx)
        return number


_MILD_TEMPERATURE = 0.7  # where neither user nor makers say anything

_PREFIX_CACHING = click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=True, show_default=True,
                               help="Find again what was computed for an earlier prompt.")  # fmt: skip

_ENGINE = (
    click.option("--revision", help="Branch, tag or commit of a hub id."),
    click.option("--token", help="Hub token, for models that need one."),
    click.option("--load-format", type=click.Choice(["auto", "dummy"]), default="auto", show_default=True,
                 help="dummy: invented weights at a named shape such as qwen3-0.6b."),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
                 help="Where the model runs."),
    click.option("--dtype", type=click.Choice(["auto", *DTYPES]), default="auto", show_default=True,
                 help="Number format of weights and KV cache."),
    click.option("--attention-backend", type=click.Choice(ATTENTION_BACKENDS), default="auto", show_default=True,
                 help="Whose attention runs on a GPU. auto: the fastest that is installed, as measured."),
    click.option("--max-model-len", type=Size(binary_k=True, derived=True),
                 help="Longest prompt plus completion, e.g. 32k. auto: what model and memory allow."),
    click.option("--block-size", type=int, default=16, show_default=True, help="Tokens in a KV block."),
    click.option("--kv-cache-memory", type=Size(derived=True), help="Bytes for the KV cache, e.g. 2GiB."),
    click.option("--gpu-memory-utilization", type=float, metavar="SHARE",
                 help="Share of the GPU's memory that quire may take in all. Default: 0.9."),
    click.option("--max-num-seqs", type=int,
                 help="Sequences that run at the same time. Default: 64 on a CPU; on a GPU 256, for batches 512."),
    click.option("--max-num-batched-tokens", type=Size(binary_k=True, derived=True), help="Tokens in one step."),
    click.option("--run-ahead", type=click.IntRange(0, 2), help="Steps in flight."),
    _PREFIX_CACHING,
    click.option("--host-kv-memory", type=Size(), default=0, show_default=True,
                 help="Bytes in the host's memory for KV that had to leave the cache, e.g. 8GiB."),
    click.option("--overcommit", type=click.Choice(OVERCOMMITS), default="hedge", show_default=True,
                 help="How far KV is promised beyond what there is: never preempt, hedge, or optimistic."),
    click.option("--itl-target", "itl_target_ms", type=float, metavar="MS",
                 help="Milliseconds between two tokens that prompts of others may not exceed."),
    click.option("--max-waiting", type=int,
                 help="Requests that may wait; more are refused. Default: no limit, 1024 in quire serve."),
    click.option("--regime", type=click.Choice(REGIMES), help="For experiments: schedule as earlier engines did."),
    click.option("--threads", type=int, help="CPU threads."),
)  # fmt: skip

# As what a model is served, and what speaks in its place: of serve and of batch.
_MODEL_GUISE = (
    click.option("--served-model-name", "aliases", multiple=True, metavar="NAME",
                 help="The name clients ask for; may be given several times, the first is the one that is told."),
    click.option("--chat-template", type=click.Path(dir_okay=False, exists=True, path_type=Path), metavar="FILE",
                 help="A chat template in the place of the model's own."),
    click.option("--tool-call-parser", metavar="NAME",
                 help="How the model writes calls of tools. Default: what its chat template shows."),
    click.option("--reasoning-parser", metavar="NAME",
                 help="How the model marks its thoughts. Default: what its chat template shows."),
    click.option("--script", type=click.Path(dir_okay=False, exists=True, path_type=Path), metavar="FILE",
                 help="Say the lines of this file instead of running the model: for tests of clients and agents."),
)  # fmt: skip

_SERVING = (
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free port."),
    click.option("--api-key", "api_keys", multiple=True, metavar="KEY",
                 help="A key that clients must show; may be given several times. Other users of this machine can read "
                 "it in the list of processes: --api-key-file keeps it from them."),
    click.option("--api-key-file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
                 help="One key per line, with name=, weight=, max_open= or trusted after it where wanted."),
    click.option("--admin-key", metavar="KEY",
                 help="The key of the admin's routes, for others to read like --api-key. Without an admin key these "
                 "routes are refused."),
    click.option("--admin-key-file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
                 help="One admin key per line."),
    click.option("--insecure-no-key", is_flag=True, help="Serve beyond this machine without any API key."),
    click.option("--allowed-origins", multiple=True, metavar="ORIGIN",
                 help="An origin whose web pages may use this server, or *; may be given several times."),
    click.option("--max-body", "max_body_bytes", type=Size(), default="16MiB", show_default=True,
                 help="Largest body of a request."),
    click.option("--ssl-keyfile", type=click.Path(dir_okay=False, path_type=Path), help="TLS: the private key."),
    click.option("--ssl-certfile", type=click.Path(dir_okay=False, path_type=Path), help="TLS: the certificate."),
    click.option("--root-path", default="", metavar="PATH", help="The path below which a proxy shows this server."),
    *_MODEL_GUISE,
    click.option("--max-waiting-tokens", type=Size(least=1), default="4m", show_default=True,
                 help="Prompt tokens that may wait; more requests are refused."),
    click.option("--shutdown-timeout", "drain_s", type=BoundedInt(0, 3600), default=30.0, show_default=True,
                 help="Seconds that open requests get after a SIGTERM."),
    click.option("--otlp-endpoint", metavar="URL",
                 help="Send a trace of each request to this OpenTelemetry collector, e.g. http://127.0.0.1:4318."),
    click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True,
                 help="How each request is logged, on stdout."),
)  # fmt: skip

_SAMPLING = (
    click.option("--temperature", type=float, help="0 is greedy. Default: what the model's makers say, else 0.7."),
    click.option("--top-p", type=float, help="Smallest set of tokens that reaches this probability."),
    click.option("--top-k", type=int, help="Only the k likeliest tokens."),
    click.option("--min-p", type=float, help="Only tokens this likely compared with the likeliest."),
    click.option("--repetition-penalty", type=float, help="Above 1: what stood before becomes less likely."),
    click.option("--presence-penalty", type=float, help="Above 0: what was said becomes less likely."),
    click.option("--frequency-penalty", type=float, help="Above 0: the more often said, the less likely."),
    click.option("--seed", type=int, help="The same seed gives the same text."),
    click.option("--stop", multiple=True, help="End when this text comes. May be given several times."),
)


def engine_options(command: Command) -> Command:
    for option in reversed(_ENGINE):
        command = option(command)
    return command


def measured_engine_options(command: Command) -> Command:
    """The same but for prefix caching, which is off unless it is what is measured."""
    command = click.option("--prefix-cache", "enable_prefix_caching", is_flag=True,
                           help="Switch prefix caching on; it is emptied before each repeat.")(command)  # fmt: skip
    for option in reversed(_ENGINE):
        if option is not _PREFIX_CACHING:
            command = option(command)
    return command


def serving_options(command: Command) -> Command:
    for option in reversed(_SERVING):
        command = option(command)
    return command


def batch_options(command: Command) -> Command:
    for option in reversed(_MODEL_GUISE):
        command = option(command)
    return command


def sampling_options(command: Command) -> Command:
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


def engine_config(model: str | None, given: Mapping[str, object]) -> EngineConfig:
    """The engine's settings out of all that a command was given."""
    names = {field.name for field in fields(EngineConfig)} - {"model", "seed"}
    said = {name: value for name, value in given.items() if name in names and value is not None}
    return EngineConfig(model=model, **said)  # type: ignore[arg-type]  # EngineConfig checks each


def sampling_params(given: Mapping[str, object], makers: GenerationDefaults) -> SamplingParams:
    """What the command line says, else what the model's makers say, else a mild temperature."""
    names = {field.name for field in fields(SamplingParams)}
    said: dict[str, object] = {"temperature": _MILD_TEMPERATURE}
    said.update({name: value for name, value in asdict(makers).items() if value is not None})
    said.update({name: value for name, value in given.items() if name in names and value is not None})
    said["stop"] = list(given.get("stop") or ()) or None  # type: ignore[call-overload]
    said["max_tokens"] = given["max_tokens"]
    return SamplingParams(**said)  # type: ignore[arg-type]  # SamplingParams checks each


_ONE_DEVICE = "a model runs on one device; leave it away"
_LOG = "each request is one line on stdout, without its prompt, as --log-format says; leave it away"

INSTEAD = {
    "--tensor-parallel-size": _ONE_DEVICE,
    "--pipeline-parallel-size": _ONE_DEVICE,
    "--data-parallel-size": _ONE_DEVICE,
    "--enforce-eager": "steps are recorded as CUDA graphs on GPUs alone, a few at the start; leave it away",
    "--enable-chunked-prefill": "prompts are always cut to the step; leave it away",
    "--quantization": "weights are taken as they are stored; give a .gguf file for packed ones",
    "--kv-cache-dtype": "the KV cache has the format of the weights, which --dtype says",
    "--trust-remote-code": "code of a model's folder is never run; leave it away",
    "--enable-auto-tool-choice": "tools are always on, as the chat template shows them; leave it away",
    "--generation-config": "the model's own is read, and a request's fields win over it; leave it away",
    "--seed": "each request brings its own seed; leave it away",
    "--max-num-queued-reqs": "say --max-waiting",
    "--swap-space": "say --host-kv-memory, with a unit such as 4GiB",
    "--disable-log-requests": _LOG,
    "--enable-log-requests": _LOG,
}

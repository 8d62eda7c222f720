"""Messages about mistaken command lines: commands and options of other engines with what does the same here, and the
command classes that say so. Settings of engines are in `config`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import click
from click.core import ParameterSource

from quire.cli.options import grouped_options
from quire.cli.streams import INTERRUPTED
from quire.config import foreign_hint

_MANY_OPTIONS = 16  # with so many, the help has groups
_MODEL_OPTIONS = ("--model", "--model-path", "--model-id", "-m")  # other engines and quire bench have the model so

# Commands of earlier versions, of Ollama, vLLM, SGLang and llama.cpp.
OTHER_COMMANDS = {
    "models": "quire list lists models, quire pull fetches one",
    "help": "use quire --help, or quire COMMAND --help",
    "version": "use quire --version",
    "ps": "quire top shows what a server does",
    "stop": "a server ends with Ctrl-C or SIGTERM; quire rm deletes a model",
    "create": "quire serve takes a folder, a .gguf file or a hub id as it is",
    "cp": "quire serve --served-model-name NAME gives a model another name",
    "generate": 'use quire run "PROMPT"',
    "complete": 'use quire run "PROMPT"',
    "cli": "use quire chat",
    "download": "use quire pull",
    "run-batch": "use quire batch",
    "server": "use quire serve",
    "plan": "quire bench capacity finds the rate that a machine serves within a latency",
    "sim": "quire bench serve --simulate runs the scheduler alone",
    "simulate": "quire bench serve --simulate runs the scheduler alone",
    "quantize": "--quantization int8 or int4 quantizes at load, on a CPU; GGUF files are read as they are",
    "convert": "safetensors and GGUF files are read as they are",
    "embed": "a server answers /v1/embeddings, and LLM.embed returns vectors",
    "completion": 'eval "$(_QUIRE_COMPLETE=bash_source quire)" completes commands in bash',
    "explain": "the page /engine explains a request, and GET /requests/ID/explain",
}

# Options of the benchmarks of vLLM, SGLang and llama.cpp.
OTHER_BENCH_OPTIONS = {
    "--num-prompts": "a trace has its own number of requests; --requests N shortens a workload, --seconds N a trace",
    "--request-rate": "use --rate R, requests a second; --scale X keeps the trace's own times",
    "--max-concurrency": "requests come when the trace says, whatever is open; quire bench capacity finds the limit",
    "--base-url": "use --url http://HOST:PORT",
    "--host": "use --url http://HOST:PORT",
    "--endpoint": "requests go to /v1/completions of --url",
    "--backend": "any server with /v1/completions is measured by quire bench serve --url, peers by quire bench race",
    "--dataset-name": "use --trace: a name such as sharegpt, or a file; throughput and latency have --workload",
    "--dataset-path": "use --trace FILE; throughput and latency have --workload",
    "--random-input-len": "lengths are those of the trace; throughput has --workload, such as 1k1k",
    "--input-len": "use --workload, such as 1k1k",
    "--output-len": "use --workload, such as 1k1k",
    "--batch-size": "use --workload bs8, or another number of requests at once: bs64, bs256",
    "--num-iters": "use --repeats N",
    "--num-iters-warmup": "one repeat more warms up; --repeats N counts the others",
    "--save-result": "use --json, and > FILE",
    "--output-json": "use --json, and > FILE",
    "--output-file": "use --json, and > FILE",
    "--percentile-metrics": "all of them are printed: TTFT, ITL, TPOT and end to end",
    "--goodput": "use --level TTFT/TPOT in ms, such as --level 500/30",
    "--burstiness": "requests come as in the trace",
    "--ignore-eos": "answers always have the length that the trace or workload says",
    "--tokenizer": "prompts are token ids, of --vocab-size",
    "-p": "use --workload, such as 1k1k",
    "-n": "use --workload, such as 1k1k",
    "-r": "use --repeats N",
}  # fmt: skip

OTHER_BENCH_COMMANDS = {
    "serving": "use quire bench serve",
    "one_batch": "use quire bench latency",
    "one_batch_server": "use quire bench serve --url, or --simulate",
    "offline_throughput": "use quire bench throughput",
    "sweep": "quire bench capacity finds the rate that a server keeps up with",
}

# Short options of llama.cpp and SGLang, by their long names.
SHORT_OPTIONS = {
    "-ngl": "n_gpu_layers", "-c": "ctx_size", "-np": "parallel", "-t": "n_threads", "-b": "n_batch", "-ub": "n_batch",
    "-fa": "flash_attn", "-hf": "hf_repo", "-n": "n_predict", "-tp": "tp_size", "-dp": "dp_size",
    "-cb": "cont_batching", "-tb": "n_threads", "-ctk": "cache_type_k", "-ctv": "cache_type_v", "-a": "alias",
    "-md": "model_draft", "-ts": "tensor_split", "-mg": "main_gpu", "-p": "prompt", "-f": "file", "-j": "json_schema",
    "-cnv": "conversation", "-no-cnv": "no_conversation", "-i": "interactive", "-sys": "system_prompt",
}  # fmt: skip
# Sampling options of other engines: flags of run and chat, fields of requests elsewhere.
SAMPLING_OPTIONS = {
    "temp": "temperature", "n_predict": "max_tokens", "num_predict": "max_tokens", "predict": "max_tokens",
    "max_new_tokens": "max_tokens", "repeat_penalty": "repetition_penalty",
}  # fmt: skip
_SHAPED = "requests of the API bring response_format, and SamplingParams takes json, regex, choice or grammar; omit it"
_SAMPLERS = "there are --temperature, --top-p, --top-k and --min-p; omit it"
_PRINTED = "the text is printed as it is generated; omit it"
# Options of llama.cpp's and Ollama's programs for a prompt or a chat.
PROMPT_OPTIONS = {
    "file": "quire run - < FILE reads the prompt from stdin", "conversation": "use quire chat",
    "interactive": "use quire chat", "system": "use quire chat --system", "system_prompt": "use quire chat --system",
    "no_conversation": "quire run continues the text, and quire chat answers; omit it", "stream": _PRINTED,
    "no_stream": _PRINTED, "json": _SHAPED, "json_schema": _SHAPED, "format": _SHAPED, "grammar": _SHAPED,
    "grammar_file": _SHAPED, "mirostat": _SAMPLERS, "typical": _SAMPLERS, "image": "the model reads text only; omit it",
}  # fmt: skip


# What click says of a number that is none.
_NUMBERS = {
    "a valid integer range": "a whole number", "a valid integer": "a whole number", "a valid float range": "a number",
    "a valid float": "a number",
}  # fmt: skip


class QuireCommand(click.Command):
    """A command that explains where model and prompt go, and what replaces an option of another engine."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)  # click consumes the other list
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            message = error.message
            for theirs, ours in _NUMBERS.items():
                message = message.replace(f" is not {theirs}", f" is not {ours}")
            param = error.param
            source = None if param is None or param.name is None else ctx.get_parameter_source(param.name)
            if param is None or source not in (ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP):
                if message == error.message:
                    raise
                raise click.BadParameter(message, error.ctx, param, error.param_hint) from None
            named = f"{param.envvar} in the environment" if source is ParameterSource.ENVIRONMENT else "--config"
            raise click.BadParameter(f"{message.rstrip('.')}, from {named}.", ctx, param) from None
        except click.NoSuchOption as error:
            usage = " ".join(self.collect_usage_pieces(ctx)[1:])
            option = _as_written(error.option_name, words)
            dashed = option.replace("_", "-")
            if any(dashed in param.opts for param in self.params):
                ctx.fail(f"There is no {option} here: use {dashed}.")
            hint = self._hint(option)
            if "[MODEL]" in usage and hint is not None:
                ctx.fail(f"There is no {option} here: {hint}.")
            if "[URL]" in usage and option == "--url":
                ctx.fail(f"The address goes without --url: {ctx.command_path} {_value_of(option, words, 'URL')}")
            if "[MODEL]" in usage and error.option_name in _MODEL_OPTIONS:
                arguments = usage.replace("[MODEL]", _value_of(error.option_name, words, "MODEL"))
                ctx.fail(f"The model goes without {error.option_name}: {ctx.command_path} {arguments}")
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options in groups, where there are many."""
        if len(self.params) < _MANY_OPTIONS:
            super().format_options(ctx, formatter)
            return
        groups = grouped_options(self)
        help_option = self.get_help_option(ctx)
        if help_option is not None:
            groups.setdefault("Other options", []).append(help_option)
        for group, params in groups.items():
            options = [param for param in params if isinstance(param, click.Option)]
            if records := [record for option in options if (record := option.get_help_record(ctx)) is not None]:
                with formatter.section(group):
                    formatter.write_dl(records)

    def _hint(self, option: str) -> str | None:
        """What replaces an option of another engine."""
        name = SHORT_OPTIONS.get(option, option).lstrip("-").replace("-", "_")
        if name in SAMPLING_OPTIONS:
            flag = f"--{SAMPLING_OPTIONS[name].replace('_', '-')}"
            own = any(flag in parameter.opts for parameter in self.params)
            return f"use {flag}" if own else f"each request brings its own {SAMPLING_OPTIONS[name]}; omit it"
        if any(param.name in ("words", "markdown") for param in self.params):  # run and chat
            if name == "prompt":
                return "the prompt is the last word: quire run PROMPT, in quotes"
            if name in PROMPT_OPTIONS:
                return PROMPT_OPTIONS[name]
        return foreign_hint(name, as_flags=True)


class ServeCommand(QuireCommand):
    """It says how several models are served."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if error.message.startswith("Got unexpected extra argument"):
                ctx.fail(
                    f"{error.message.rstrip('.')}. Several models are tables [models.NAME] of a file: --config FILE."
                )
            raise


def _as_written(option: str, words: list[str]) -> str:
    """click reads -ngl as -n, -g and -l: the word that the user wrote."""
    if option.startswith("--"):
        return option
    return next((word for word in words if word.startswith(option) and word.partition("=")[0] in SHORT_OPTIONS), option)


def _value_of(option: str, words: list[str], missing: str) -> str:
    for i, word in enumerate(words):
        if word.startswith(f"{option}="):
            return word.removeprefix(f"{option}=")
        if word == option and i + 1 < len(words):
            return words[i + 1]
    return missing


@contextmanager
def _interrupted() -> Iterator[None]:
    """Ctrl-C ends a command with status 130: click would say "Aborted!", with status 1."""
    try:
        yield
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


class QuireGroup(click.Group):
    """A group that suggests the nearest name for a mistyped subcommand."""

    command_class = QuireCommand

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if ctx.resilient_parsing:  # a shell completes the line
            return super().resolve_command(ctx, args)
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            others = OTHER_COMMANDS if ctx.parent is None else OTHER_BENCH_COMMANDS
            if args[0] in others:
                ctx.fail(f"There is no command {args[0]!r}: {others[args[0]]}.")
            near = get_close_matches(args[0], self.list_commands(ctx), n=1)
            shown = [name for name in self.list_commands(ctx) if not self.commands[name].hidden]
            hint = f" Did you mean {near[0]}?" if near else f" There are: {', '.join(shown)}."
            ctx.fail(f"There is no command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _interrupted():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> object:
        with _interrupted():
            return super().invoke(ctx)


class BenchGroup(QuireGroup):
    """Imports its larger commands when one of them is asked for: their options take longer than all others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        self._load()
        return super().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands:
            self._load()
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            if (hint := OTHER_BENCH_OPTIONS.get(error.option_name.replace("_", "-"))) and error.ctx is not None:
                error.ctx.fail(f"There is no {error.option_name} here: {hint}.")
            raise

    def _load(self) -> None:
        from quire.cli.bench import COMMANDS

        for command in COMMANDS:
            self.add_command(command)

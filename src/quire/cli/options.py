"""Options of the commands, in groups that several commands share, their types, and the packages that commands need.

Options of the engine are made from the declarations in `EngineConfig`.
"""

import importlib.util
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import Field, asdict, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from quire.catalog.locate import find_model, names_here, paths_beginning
from quire.catalog.names import SHORT_NAMES
from quire.catalog.store import hub_folder, models_folder, present
from quire.config import EngineConfig, check_names, foreign_value_hint, parse_size, setting_of
from quire.core.errors import ConfigError
from quire.core.sampling import SamplingParams
from quire.core.speculative import SPECULATIVE, SPECULATIVE_VALUES, is_speculative, parse_sources
from quire.formats.checkpoint import GenerationDefaults

if TYPE_CHECKING:
    from quire.server.autoscaling import ReplicaLimits

_MAX_DIGITS = 20  # of an integer: more than any bound has
_FEW_VALUES = 3  # a range of so few is shown in the help
_DEFAULT_TEMPERATURE = 0.7  # where neither the user nor the model's generation config sets one

Command = TypeVar("Command", bound=Callable[..., object])
Decorator = Callable[[Command], Command]


class FiniteRange(click.FloatRange):
    """As click's own, which lets NaN through: it fails every comparison with a bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class OutputFile(click.Path):
    """A file to write at the end of a measurement: where its folder is missing, it is refused before."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"there is no folder {path.parent}; create it first.", param, ctx)
        return path


def integer_list(low: int, high: int) -> Callable[[click.Context, click.Parameter, str], tuple[int, ...]]:
    """The callback of an option such as `16,64,256`. Every integer is within the bounds."""

    def parse(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
        words = [word.strip().replace("_", "") for word in value.split(",")]
        if not all(word.isdecimal() and len(word) < _MAX_DIGITS and low <= int(word) <= high for word in words):
            raise click.BadParameter(
                f"{value!r} is not a list of whole numbers from {low} to {high:,}, such as 16,64,256."
            )
        return tuple(map(int, words))

    return parse


class Size(click.ParamType):  # type: ignore[type-arg]  # generic only in newer releases
    """An integer that may have a unit: 32k, 2GiB, 500MB. `auto` is allowed where the size can be derived."""

    name = "size"

    def __init__(self, *, binary_k: bool = False, derived: bool = False, low: int = 0) -> None:
        self._binary_k = binary_k
        self._derived = derived
        self._low = low

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if isinstance(value, int) or value is None:
            return value
        if self._derived and str(value).strip().lower() == "auto":
            return None
        try:
            number = parse_size(str(value), binary_k=self._binary_k)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if number < self._low:
            self.fail(f"{value!r} is too small; it must be at least {self._low}.", param, ctx)
        return number


class SettingChoice(click.Choice):  # type: ignore[type-arg]  # generic only in newer releases
    """As click's own; a word of another engine gets a hint."""

    def __init__(self, name: str, choices: tuple[str, ...]) -> None:
        super().__init__(choices)
        self._setting = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            hint = foreign_value_hint(self._setting, value, as_flags=True)
            if hint is None:
                raise
            self.fail(f"{error.message.rstrip('.')}: {hint}.", param, ctx)


def complete_model(ctx: click.Context, param: click.Parameter, typed: str) -> list[str]:
    """For shells: the models with short names, those on this machine, and paths. Not the second word of `quire run`."""
    if param.name == "words" and ctx.params.get("words"):
        return []
    folder, removes = models_folder(), param.name == "names"  # of quire rm
    known = [model for model in SHORT_NAMES if not removes or present(model, folder)]
    unlisted = {Path(model.file_name).stem for model in SHORT_NAMES}  # they have their short names
    names = [name for model in known for name in (model.name, *model.aliases)]
    names += [name for name in names_here(folder, hub_folder()) if name not in unlisted]
    found = [name for name in names if name.startswith(typed)] + ([] if removes else paths_beginning(typed))
    while len(found) == 1 and found[0].endswith("/") and (inside := paths_beginning(found[0])):
        found = inside  # a shell ends the word of a single completion
    return found


model_argument = click.argument("model", required=False, shell_complete=complete_model)


class DraftsType(click.ParamType):  # type: ignore[type-arg]  # generic only in newer releases
    """Where drafts come from: `off`, `ngram`, `draft:MODEL`, `ngram+draft:MODEL` and others."""

    name = "drafts"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        values = [value for value in (*SPECULATIVE, "draft:", "eagle:") if value.startswith(incomplete)]
        if len(values) == 1 and values[0].endswith(":"):
            incomplete = values[0]
        model = parse_sources(incomplete).model
        if incomplete.find(":") < 0 or model is None:
            return [CompletionItem(value) for value in values]
        behind = incomplete.removesuffix(model)
        return [CompletionItem(behind + name) for name in complete_model(ctx, param, model)]

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not is_speculative(value):
            self.fail(f"{value!r} is not {SPECULATIVE_VALUES}.", param, ctx)
        return str(value)


def _engine_option(declared: Field[Any]) -> Decorator[Any]:
    """The option of one setting of the engine. `EngineConfig` checks the bounds."""
    setting = setting_of(declared)
    assert setting.flag is not None
    names = [setting.flag, declared.name]
    kind: Any = str
    match setting.kind:
        case "choice":
            kind = SettingChoice(declared.name, setting.choices)
        case "drafts":
            kind = DraftsType()
        case "number":
            kind = float
        case "switch":
            kind = bool
            names[0] += f"/--no-{setting.flag.removeprefix('--')}"
        case "integer" if setting.unit is not None:
            kind = Size(binary_k=setting.unit == "tokens", derived=setting.optional)
        case "integer" if setting.high - setting.low < _FEW_VALUES:
            kind = click.IntRange(setting.low, setting.high)
        case "integer":
            kind = int
    default: dict[str, Any] = {} if declared.default is None else {"default": declared.default, "show_default": True}
    return click.option(*names, type=kind, metavar=setting.metavar, help=setting.help, **default)


_ENGINE = {declared.name: _engine_option(declared) for declared in fields(EngineConfig) if setting_of(declared).flag}


class _PortOption(click.Option):
    """Kubernetes sets QUIRE_PORT to tcp://ADDRESS:PORT in every container beside a service called quire: no option."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        value = super().resolve_envvar_value(ctx)
        return None if value is not None and value.startswith("tcp://") else value


# Name, chat template, parsers and replacement of the served model: of serve and of batch.
_SERVED_MODEL = (
    click.option("--served-model-name", "aliases", multiple=True, metavar="NAME",
                 help="Model name in the API; may be given several times, responses use the first."),
    click.option("--chat-template", type=click.Path(dir_okay=False, exists=True, path_type=Path), metavar="FILE",
                 help="Chat template to use instead of the model's."),
    click.option("--tool-call-parser", metavar="NAME",
                 help="Format of the model's tool calls. Default: detected from its chat template."),
    click.option("--reasoning-parser", metavar="NAME",
                 help="Format of the model's reasoning. Default: detected from its chat template."),
    click.option("--script", type=click.Path(dir_okay=False, exists=True, path_type=Path), metavar="FILE",
                 help="Return the lines of this file instead of running the model: for tests of clients and agents."),
)  # fmt: skip

_SERVING = (
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    click.option("--port", cls=_PortOption, type=click.IntRange(0, 65535), default=8000, show_default=True,
                 help="0: any free port."),
    click.option("--api-key", "api_keys", multiple=True, metavar="KEY",
                 help="API key that clients must send; may be given several times. Visible to other users of this "
                 "machine in the process list: prefer --api-key-file."),
    click.option("--api-key-file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
                 help="One key per line, optionally followed by name=, weight=, max_open= or trusted."),
    click.option("--admin-key", metavar="KEY",
                 help="Key of the admin routes, visible in the process list like --api-key. Without an admin key these "
                 "routes are disabled."),
    click.option("--admin-key-file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
                 help="One admin key per line."),
    click.option("--insecure-no-key", is_flag=True, help="Listen on a non-local address without an API key."),
    click.option("--allowed-origins", multiple=True, metavar="ORIGIN",
                 help="CORS: an origin whose web pages may use this server, or *; may be given several times. Without "
                 "keys also a public name that the server answers to."),
    click.option("--max-body", "max_body_bytes", type=Size(), default="16MiB", show_default=True,
                 help="Largest request body."),
    click.option("--ssl-keyfile", type=click.Path(dir_okay=False, path_type=Path), help="TLS: the private key."),
    click.option("--ssl-certfile", type=click.Path(dir_okay=False, path_type=Path), help="TLS: the certificate."),
    click.option("--root-path", default="", metavar="PATH", help="Path prefix of this server behind a proxy."),
    *_SERVED_MODEL,
    click.option("--models-max", type=click.IntRange(1), metavar="N",
                 help="Several models: how many are loaded at a time. Default: one beside the pinned ones, or "
                 "with --models-memory as many as fit."),
    click.option("--models-memory", type=Size(low=1), metavar="SIZE",
                 help="Several models: weights and KV caches of the loaded ones take at most so much."),
    click.option("--unload-after", "unload_after_s", type=FiniteRange(0), metavar="SECONDS",
                 help="Several models: unload one after so long without a request. Default: when another needs its "
                 "place."),
    click.option("--max-waiting-tokens", type=Size(low=1), default="4m", show_default=True,
                 help="Most prompt tokens in the waiting queue; further requests are rejected. Half as many again are "
                 "reserved for clients below their fair share, as with --max-waiting."),
    click.option("--files-dir", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
                 help="Serve OpenAI's files and batches, kept in this folder."),
    click.option("--files-limit", "files_limit_bytes", type=Size(low=1), default="4GiB", show_default=True,
                 help="Most bytes that the files of one key may take."),
    click.option("--shutdown-timeout", "drain_s", type=FiniteRange(0, 3600), default=30.0, show_default=True,
                 help="Seconds that open requests may take to finish after a SIGTERM."),
    click.option("--replicas", type=click.IntRange(1, 64), default=1, show_default=True, metavar="N",
                 help="Engines of the same model behind this server; a request goes where its prompt is cached, or to "
                 "the one with fewest requests."),
    click.option("--ray", is_flag=True,
                 help="Run the engines on a Ray cluster: that of RAY_ADDRESS, the one that runs here, or else a new "
                 "one on this machine. As many as the queue needs, from --min-replicas to --max-replicas."),
    click.option("--min-replicas", type=click.IntRange(1, 64), metavar="N", help="With --ray: the fewest engines. "
                 "Default: 1."),
    click.option("--max-replicas", type=click.IntRange(1, 64), metavar="N",
                 help="With --ray: the most engines. Default: as many as --min-replicas."),
    click.option("--downscale-delay", "downscale_delay_s", type=FiniteRange(0), metavar="SECONDS",
                 help="With --ray: stop an engine that was not needed for so long. Default: 300."),
    click.option("--prefill-engines", type=click.IntRange(0, 64), default=0, show_default=True, metavar="N",
                 help="Further engines that compute long prompts for the others, which copy their KV blocks "
                 "(prefill/decode split). On a GPU with --kv-cache-memory."),
    click.option("--kv-transport", type=click.Choice(["auto", "memory", "nixl"]), default="auto", show_default=True,
                 help="How KV blocks get from prefill engines to the others: through the memory of one machine, or "
                 "over the network by NIXL. auto: NIXL between the nodes of --ray, where it is installed."),
    click.option("--kv-events-config", "kv_events", metavar="JSON",
                 help="Publish what the prefix cache stores and removes over ZMQ, in vLLM's messages, e.g. "
                 '{"endpoint": "tcp://127.0.0.1:5557"}. They have the tokens of all prompts.'),
    click.option("--record", metavar="FILE",
                 help="Record every decision of the scheduler in this file, for quire replay; up to 256 MiB. It holds "
                 "the tokens of all prompts and answers."),
    click.option("--otlp-endpoint", metavar="URL",
                 help="Send a trace of each request to this OpenTelemetry collector, e.g. http://127.0.0.1:4318."),
    click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True,
                 help="Format of the access log, on stdout."),
)  # fmt: skip

_SAMPLING = (
    click.option("--temperature", type=float, help="0 is greedy. Default: the model's generation config, else 0.7."),
    click.option("--top-p", type=float, help="Only the smallest set of tokens with this total probability."),
    click.option("--top-k", type=int, help="Only the k most likely tokens."),
    click.option("--min-p", type=float, help="Only tokens with this probability relative to the most likely one."),
    click.option("--repetition-penalty", type=float, help="Above 1: tokens that occurred become less likely."),
    click.option("--presence-penalty", type=float, help="Above 0: tokens of the output become less likely."),
    click.option("--frequency-penalty", type=float, help="Above 0: tokens become less likely per occurrence."),
    click.option("--seed", type=int, help="The same seed gives the same text."),
    click.option("--stop", multiple=True, help="Stop string. May be given several times."),
)

SAMPLING_NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "stop"),
)
_REMOTE = (
    click.option("--url", metavar="URL",
                 help="Use the server at this address instead, as http://127.0.0.1:8000: any OpenAI-compatible one."),
    click.option("--api-key", metavar="KEY", help="API key of that server. The process list shows it: prefer the "
                 "variable QUIRE_API_KEY."),
)  # fmt: skip


def _all_of(*options: Decorator[Any]) -> Decorator[Any]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


hub_options = _all_of(_ENGINE["revision"], _ENGINE["token"])
engine_options = _all_of(*_ENGINE.values())
serving_options = _all_of(*_SERVING)
batch_options = _all_of(*_SERVED_MODEL)
sampling_options = _all_of(*_SAMPLING)
remote_options = _all_of(*_REMOTE)

# As engine_options, but prefix caching is off unless it is what is measured.
measured_engine_options = _all_of(
    *(option for name, option in _ENGINE.items() if name != "enable_prefix_caching"),
    click.option("--prefix-cache", "enable_prefix_caching", is_flag=True,
                 help="Switch prefix caching on; it is emptied before each repeat."),
)  # fmt: skip


_GROUPS: Mapping[str, tuple[str, ...]] = {
    "Model": ("model", "revision", "token", "load_format", "aliases", "chat_template", "tool_call_parser",
              "reasoning_parser", "script"),
    "Several models": ("models_max", "models_memory", "unload_after_s"),
    "Address": ("url", "api_key", "host", "port", "root_path", "ssl_keyfile", "ssl_certfile"),
    "Keys and limits": ("api_keys", "api_key_file", "admin_key", "admin_key_file", "insecure_no_key",
                        "allowed_origins", "max_body_bytes", "max_waiting", "max_waiting_tokens", "files_dir",
                        "files_limit_bytes", "drain_s"),
    "Replicas": ("replicas", "ray", "min_replicas", "max_replicas", "downscale_delay_s", "prefill_engines",
                 "kv_transport"),
    "Sampling": ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
                 "frequency_penalty", "seed", "stop", "system", "chat", "markdown"),
    "Device and memory": ("device", "dtype", "quantization", "attention_backend", "batch_invariant", "threads",
                          "max_model_len", "block_size", "kv_cache_dtype", "kv_cache_memory", "gpu_memory_utilization",
                          "host_kv_memory", "tensor_parallel_size", "pipeline_parallel_size"),
    "Scheduling": ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "speculative", "itl_target_ms",
                   "ttft_target_ms", "overcommit", "run_ahead", "regime"),
}  # fmt: skip
_OTHERS = "Other options"
_VARIABLE_PREFIX = "QUIRE_"
_NEAR_VARIABLE = 0.85  # of difflib: QUIRE_PROT is one, QUIRE_PORT_8000_TCP is not


def option_name(param: click.Parameter) -> str:
    """The long form of an option, as it is typed."""
    return next(name for name in param.opts if name.startswith("--"))


def grouped_options(command: click.Command) -> dict[str, list[click.Parameter]]:
    """The options of a command by what they are about, in the order of the help; its model first."""
    own = {param.name: param for param in command.params if isinstance(param, click.Option) or param.name == "model"}
    found = {group: [own.pop(name) for name in names if name in own] for group, names in _GROUPS.items()}
    found[_OTHERS] = list(own.values())
    return {group: params for group, params in found.items() if params}


_OF_MODEL = ("Model", "Device and memory", "Scheduling")
_OF_MODEL_ALONE = ("max_waiting", "max_waiting_tokens", "unload_after_s")


def model_options(command: click.Command) -> list[click.Parameter]:
    """The options of a server that may differ between its models."""
    groups = grouped_options(command)
    names = {param.name for group in _OF_MODEL for param in groups[group]} | {*_OF_MODEL_ALONE}
    return [param for param in command.params if param.name in names]


def name_variables(command: click.Command) -> None:
    """Every option may be given in the environment, `--max-model-len` as QUIRE_MAX_MODEL_LEN; flags override it."""
    for param in command.params:
        if isinstance(param, click.Option):
            param.envvar = _VARIABLE_PREFIX + option_name(param).removeprefix("--").replace("-", "_").upper()
        elif param.name == "model":
            param.envvar = f"{_VARIABLE_PREFIX}MODEL"


def mistyped_variables(command: click.Command, environment: Mapping[str, str]) -> list[str]:
    """Warnings of variables that are almost one of an option. Others may be of another program, or of Kubernetes."""
    known = [param.envvar for param in command.params if isinstance(param.envvar, str)]
    found = []
    for name in sorted(environment):
        if name.startswith(_VARIABLE_PREFIX) and name not in known:
            near = get_close_matches(name, known, n=1, cutoff=_NEAR_VARIABLE)
            found += [f"{name} in the environment is not an option; did you mean {near[0]}?"] if near else []
    return found


def engine_config(model: str | None, given: Mapping[str, object]) -> EngineConfig:
    """The engine's settings among the options of a command."""
    settings = {name: given[name] for name in _ENGINE if given.get(name) is not None}
    return EngineConfig(model=model, **settings)  # type: ignore[arg-type]  # EngineConfig checks each


def engine_settings(text: str, threads: int | None = None) -> dict[str, object]:
    """`dtype=bfloat16,threads=2` as settings of `LLM`, checked."""
    found: dict[str, object] = {} if threads is None else {"threads": threads}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--ours has {pair!r}; write NAME=VALUE, such as dtype=bfloat16,threads=2.")
        found[name.strip().replace("-", "_")] = parse_value(value.strip())
    check_names(found)
    EngineConfig(**found)  # type: ignore[arg-type]  # EngineConfig checks each
    return found


def parse_value(text: str) -> object:
    """A number or truth value, if the text is one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def sampling_params(given: Mapping[str, object], model_defaults: GenerationDefaults) -> SamplingParams:
    """Each parameter from the command line, else from the model's generation config, else the default."""
    names = {field.name for field in fields(SamplingParams)}
    params: dict[str, object] = {"temperature": _DEFAULT_TEMPERATURE}
    params.update({name: value for name, value in asdict(model_defaults).items() if value is not None})
    params.update({name: value for name, value in given.items() if name in names and value is not None})
    params["stop"] = list(given.get("stop") or ()) or None  # type: ignore[call-overload]
    params["max_tokens"] = given["max_tokens"]
    return SamplingParams(**params)  # type: ignore[arg-type]  # SamplingParams checks each


def check_remote(ctx: click.Context) -> None:
    """Refuses options of an engine here beside --url, and a key without it."""
    remote = ctx.params["url"] is not None
    for param in ctx.command.params:
        typed = ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
        if typed and param.name == "api_key" and not remote:
            raise ConfigError("--api-key is the key of a server: give its address with --url.", param="api_key")
        if typed and param.name in _ENGINE and remote:
            raise ConfigError(
                f"{option_name(param)} is of an engine here; the server at --url has its own. Omit one of them.",
                param=param.name,
            )


def check_sampling(given: Mapping[str, object]) -> None:
    """Refuses an invalid parameter before a model is loaded."""
    sampling_params(given, GenerationDefaults())


def check_packages(needed_by: str, extra: str, *names: str) -> None:
    """Refuse if packages of an optional extra are missing."""
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        raise ConfigError(f'{needed_by} needs {", ".join(missing)}: pip install "quire[{extra}]".')


def check_serving() -> None:
    names = ("starlette", "uvicorn", "httptools", "uvloop", "msgspec", "llguidance", "prometheus_client",
             "python_multipart")  # fmt: skip
    check_packages("Serving", "serve", *names)


def check_model(model: str | None, given: Mapping[str, object]) -> None:
    """Refuse wrong settings and a wrong name, before the rest of a command is imported. Downloads nothing."""
    config = engine_config(model, given)
    if config.load_format != "dummy":
        find_model(config.model, config.revision, models_folder())


def check_batch_files(source: str, target: str) -> None:
    """Refuse an input that cannot be read, and an output that is the input or has no folder, before the command is
    imported."""
    folder = Path(target).parent
    if target != "-" and not folder.is_dir():
        raise ConfigError(f"Cannot write {target}: there is no folder {folder}; create it first.", param="output")
    if source == "-":
        return
    try:
        open(source, "rb").close()
    except OSError as error:
        raise ConfigError(f"Cannot read {source}: {error.strerror}.", param="input") from error
    if Path(source).resolve() == Path(target).resolve():
        raise ConfigError(f"{source} cannot be both the input and the output.", param="output")


def check_tracing() -> None:
    if not (_is_installed("opentelemetry.exporter.otlp.proto.http") and _is_installed("opentelemetry.sdk")):
        raise ConfigError('--otlp-endpoint needs OpenTelemetry: pip install "quire[otel]".', param="otlp_endpoint")


def read_replica_limits(given: Mapping[str, Any]) -> "ReplicaLimits | None":
    """The limits of --ray; options that are for it alone, or not for it, are refused."""
    names = ("min_replicas", "max_replicas", "downscale_delay_s")
    own = {name: given[name] for name in names if given.get(name) is not None}
    if not given.get("ray"):
        for name in own:
            flag = "--" + name.removesuffix("_s").replace("_", "-")
            raise ConfigError(f"{flag} is for --ray; use --replicas for engines on this machine.", param=name)
        return None
    if given["replicas"] > 1:
        raise ConfigError(
            f"--replicas {given['replicas']} starts engines on this machine, and --ray on the nodes of a cluster: use "
            f"--min-replicas {given['replicas']} with --ray.",
            param="replicas",
        )
    for name, flag in (("kv_events", "--kv-events-config"), ("record", "--record")):
        if given[name]:
            raise ConfigError(f"{flag} is for engines on this machine, not for --ray; omit one of them.", param=name)
    fewest = own.setdefault("min_replicas", 1)
    most = own.setdefault("max_replicas", fewest)
    if most < fewest:
        raise ConfigError(
            f"--max-replicas is {most}, and --min-replicas {fewest}: use --max-replicas {fewest} or more.",
            param="max_replicas",
        )
    check_packages("--ray", "ray", "ray")
    from quire.server.autoscaling import ReplicaLimits

    return ReplicaLimits(**own)


def check_transport(given: Mapping[str, Any]) -> None:
    """Refuse a transport of KV blocks that no engine would use, or that is not installed. On Ray, each node has its
    own packages."""
    if given["kv_transport"] == "auto":
        return
    if not given["prefill_engines"]:
        raise ConfigError(
            f"--kv-transport {given['kv_transport']} is for --prefill-engines; omit it, or use both.",
            param="kv_transport",
        )
    if given["kv_transport"] == "nixl" and not given["ray"]:
        check_packages("--kv-transport nixl", "nixl", "nixl_cu13")


def check_kv_events(text: str | None) -> None:
    """Refuse settings that cannot be read, before a model is loaded."""
    if text is None:
        return
    from quire.engine.kv_events import read_kv_events

    if read_kv_events(text) is not None:
        check_packages("--kv-events-config", "events", "zmq")


def check_record(text: str | None) -> None:
    """Refuse a place where no journal can be written, before a model is loaded."""
    if text is None:
        return
    folder = Path(text).absolute().parent
    if Path(text).is_dir():
        raise ConfigError(f"--record {text} is a folder; name a file in it, such as {text}/journal.", param="record")
    if not folder.is_dir():
        raise ConfigError(f"--record {text}: there is no folder {folder}; create it first.", param="record")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--record {text}: the folder {folder} may not be written to.", param="record")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent package
        return False

"""Engine settings: declared once in `EngineConfig`. `engine/resolved_config.py` derives numbers from them.

Each field declares its default, help text, bounds and unit. The options of the command line, the checks and the
signature of `LLM` come from these declarations. Settings are replaced, never changed in place. No environment variable
is read. Does not depend on torch or click.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from fractions import Fraction
from typing import Any, Literal, TypedDict, TypeVar

from quire.core.errors import ConfigError, QuireError, shown
from quire.core.speculative import SPECULATIVE, SPECULATIVE_VALUES, is_speculative
from quire.core.validation import convert_numpy

DEFAULT_SERVER_ROWS = 256  # default max_num_seqs of a server on a GPU
DTYPES = ("bfloat16", "float16", "float32")
QUANTIZATIONS = ("auto", "none", "int8", "int4")
KV_CACHE_DTYPES = ("auto", *DTYPES, "int8")
ATTENTION_BACKENDS = ("auto", "quire", "torch", "fa3", "flashinfer")
OVERCOMMITS = ("never", "hedge", "optimistic")
REGIMES = ("static", "dynamic", "continuous", "paged", "chunked", "prefix")

Unit = Literal["bytes", "tokens"]
Function = TypeVar("Function", bound=Callable[..., object])

_FLAG = re.compile(r"(--[a-z]+(?:-[a-z]+)*)( ?)(\w*)")
_MULTIPLES = {
    "": 1, "k": 1000, "m": 10**6, "g": 10**9, "t": 10**12,
    "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40,
}  # fmt: skip


def parse_size(text: str, *, binary_k: bool = False) -> int:
    """`32k`, `2GiB`, `500MB`. A binary k is 1024, as for context lengths. `ValueError`: a sentence for the user."""
    parts = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?)\s*([kmgt]i?)?b?", text.strip().lower(), re.ASCII)
    if parts is None:
        raise ValueError(f"{shown(text)} is not a size; write a number, or for example 32k or 2GiB.")
    multiple = 1 << 10 if parts[2] == "k" and binary_k else _MULTIPLES[parts[2] or ""]
    return int(Fraction(parts[1]) * multiple)


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one field of `EngineConfig`."""

    kind: Literal["text", "choice", "drafts", "integer", "number", "switch", "mapping"]
    help: str
    optional: bool = False  # None is allowed, and means: derive it
    flag: str | None = None  # of the command line; None: no option
    choices: tuple[str, ...] = ()
    low: int = 0  # of an integer: the minimum; of a number: exclusive
    high: int = 0  # reached
    unit: Unit | None = None  # of an integer that may be given as text with a unit
    metavar: str | None = None  # of a number on the command line

    def parse(self, name: str, value: object) -> object:
        """The value as it is stored: a size in plain bytes or tokens."""
        if self.unit is None or not isinstance(value, str):
            return value
        if self.optional and value.strip().lower() == "auto":
            return None
        try:
            return parse_size(value, binary_k=self.unit == "tokens")
        except ValueError as error:
            raise ConfigError(f"{name}: {error}", param=name) from None

    def check(self, name: str, value: object) -> None:
        if value is None and self.optional:
            return
        expected = self._expected(value)
        if expected is not None:
            hint = foreign_value_hint(name, value, as_flags=False)
            instead = "." if hint is None else f": {hint}."
            raise ConfigError(f"{name} must be {expected}, not {shown(value)}{instead}", param=name)

    def _expected(self, value: object) -> str | None:
        """What the value should have been, or None if it is valid. NaN fails every comparison."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        match self.kind:
            case "text":
                valid, expected = isinstance(value, str), "a text"
            case "choice":
                valid, expected = value in self.choices, f"one of {', '.join(self.choices)}"
            case "drafts":
                valid, expected = is_speculative(value), SPECULATIVE_VALUES
            case "integer":
                valid = number and isinstance(value, int) and self.low <= value <= self.high
                expected = f"a whole number from {self.low} to {self.high}"
            case "number":
                valid = number and self.low < value <= self.high  # type: ignore[operator]
                expected = f"a number above {self.low} and at most {self.high}"
            case "switch":
                valid, expected = isinstance(value, bool), "true or false"
            case "mapping":
                valid = isinstance(value, Mapping) and all(_is_weight(each) for each in value.values())
                expected = "a mapping of names to numbers above 0"
        return None if valid else expected


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _declare(default: object, setting: Setting) -> Any:
    return field(default=default, metadata={"setting": setting})


def _text(flag: str | None, help: str) -> Any:
    return _declare(None, Setting("text", help, optional=True, flag=flag))


def _choice(flag: str, default: str | None, choices: tuple[str, ...], help: str) -> Any:
    return _declare(default, Setting("choice", help, optional=default is None, flag=flag, choices=choices))


def _integer(flag: str | None, default: int | None, low: int, high: int, help: str, *, unit: Unit | None = None) -> Any:
    setting = Setting("integer", help, optional=default is None, flag=flag, low=low, high=high, unit=unit)
    return _declare(default, setting)


def _number(flag: str, low: int, high: int, help: str, *, metavar: str) -> Any:
    return _declare(None, Setting("number", help, optional=True, flag=flag, low=low, high=high, metavar=metavar))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings a user may give. None means: derive it. Sizes may be texts with a unit, such as "2GiB" or "32k"."""

    model: str | None = _text(None, "A path, a short name or a hub id.")
    revision: str | None = _text("--revision", "Branch, tag or commit of a hub id.")
    token: str | None = _text("--token", "Hub token, for models that need one.")
    load_format: str = _choice("--load-format", "auto", ("auto", "dummy"),
                               "dummy: random weights at a named shape such as qwen3-0.6b.")  # fmt: skip
    device: str = _choice("--device", "auto", ("auto", "cpu", "cuda"), "Where the model runs.")
    dtype: str = _choice("--dtype", "auto", ("auto", *DTYPES), "Number format of weights and, by default, KV cache.")
    quantization: str = _choice(
        "--quantization", "auto", QUANTIZATIONS,
        "Weights on a CPU. auto: as the file stores them; int8, int4: quantized at load; none: as --dtype says.",
    )  # fmt: skip
    kv_cache_dtype: str = _choice(
        "--kv-cache-dtype", "auto", KV_CACHE_DTYPES,
        "Number format of the KV cache on a CPU. int8: half the bytes of 16 bits, with a scale per token and head.",
    )  # fmt: skip
    attention_backend: str = _choice(
        "--attention-backend", "auto", ATTENTION_BACKENDS,
        "Attention kernels on a GPU. auto: the fastest installed ones, as measured.",
    )  # fmt: skip
    batch_invariant: bool = _declare(
        False, Setting("switch", "A request's logits have the same bits in every batch; slower on a GPU and with AMX.",
                       flag="--batch-invariant"),
    )  # fmt: skip
    max_model_len: int | None = _integer(
        "--max-model-len", None, 2, 2**24 - 1,
        "Longest prompt plus completion, e.g. 32k. auto: what model and memory allow.", unit="tokens",
    )  # fmt: skip
    block_size: int | None = _integer("--block-size", None, 1, 256, "Tokens in a KV block. Default: 16; on a CPU 32.")
    kv_cache_memory: int | None = _integer("--kv-cache-memory", None, 1, 2**60, "Bytes for the KV cache, e.g. 2GiB.",
                                           unit="bytes")  # fmt: skip
    gpu_memory_utilization: float | None = _number(
        "--gpu-memory-utilization", 0, 1,
        "Fraction of the GPU's memory that quire may use in total. Default: 0.9.", metavar="SHARE",
    )  # fmt: skip
    max_num_seqs: int | None = _integer(
        "--max-num-seqs", None, 1, 65536,
        "Sequences that run at the same time. Default: 64 on a CPU; on a GPU 256, for batches 512.",
    )  # fmt: skip
    max_num_batched_tokens: int | None = _integer("--max-num-batched-tokens", None, 1, 2**20, "Tokens in one step.",
                                                  unit="tokens")  # fmt: skip
    run_ahead: int | None = _integer("--run-ahead", None, 0, 2, "Steps in flight.")
    enable_prefix_caching: bool = _declare(
        True, Setting("switch", "Reuse the KV blocks of earlier prompts.", flag="--enable-prefix-caching")
    )
    host_kv_memory: int = _integer(
        "--host-kv-memory", 0, 0, 2**60,
        "Bytes of host memory for KV blocks evicted from the device, e.g. 8GiB.", unit="bytes",
    )  # fmt: skip
    speculative: str = _declare(
        "off", Setting(
            "drafts", "Draft tokens and verify several in a step; outputs stay the same. grammar: what a grammar "
            "forces; ngram: also from the request's own text; tree: from earlier requests with the same prefix; auto: "
            "all of these; draft:MODEL: from a smaller model with the same tokenizer; eagle:PATH: from an EAGLE-3 head "
            "of the model; mtp: from the multi-token-prediction layer in the model's files; these three also as "
            "ngram+draft:MODEL.",
            flag="--speculative", choices=SPECULATIVE, metavar="DRAFTS",
        ),
    )  # fmt: skip
    overcommit: str = _choice(
        "--overcommit", "hedge", OVERCOMMITS,
        "How much KV cache is overcommitted: never preempt, hedge, or optimistic.",
    )  # fmt: skip
    itl_target_ms: float | None = _number(
        "--itl-target", 0, 10**6,
        "Inter-token latency target in milliseconds: limits the prefill per step.", metavar="MS",
    )  # fmt: skip
    ttft_target_ms: float | None = _number(
        "--ttft-target", 0, 10**6,
        "Time-to-first-token target in milliseconds, of waiting prompts: a longer queue makes longer steps.",
        metavar="MS",
    )  # fmt: skip
    max_waiting: int | None = _integer(
        "--max-waiting", None, 1, 2**31 - 1,
        "Most requests in the waiting queue; more are rejected. Default: no limit, 1024 in quire serve.",
    )  # fmt: skip
    regime: str | None = _choice("--regime", None, REGIMES, "For experiments: batching techniques of earlier engines.")
    seed: int = _integer(None, 0, -(2**63) + 1, 2**63 - 1, "Base of the random numbers of requests without a seed.")
    threads: int | None = _integer("--threads", None, 1, 1023,
                                   "CPU threads. Default: one for each fast core, within the CPU quota.")  # fmt: skip
    tensor_parallel_size: int = _integer(
        "--tensor-parallel-size", 1, 1, 64,
        "Processes that divide every layer of the model among them, on CPUs.",
    )  # fmt: skip
    pipeline_parallel_size: int = _integer(
        "--pipeline-parallel-size", 1, 1, 64,
        "Stages that divide the layers of the model among them, each of --tensor-parallel-size processes, on CPUs.",
    )  # fmt: skip
    tenant_weights: Mapping[str, float] = field(
        default_factory=dict,
        metadata={"setting": Setting("mapping", "Weight of a tenant in fair scheduling; 1 if not given.")},
    )

    def __post_init__(self) -> None:
        convert_numpy(self, self.__slots__)
        if self.model is not None and not (isinstance(self.model, str) and self.model.strip()):
            raise ConfigError(
                f"model must be a path, a short name or a hub id, not {shown(self.model)}.",
                param="model",
            )
        for declared in fields(self):
            setting = setting_of(declared)
            value = setting.parse(declared.name, getattr(self, declared.name))
            setting.check(declared.name, value)
            object.__setattr__(self, declared.name, value)


def setting_of(declared: Field[Any]) -> Setting:
    setting: Setting = declared.metadata["setting"]
    return setting


class SettingsDict(TypedDict, total=False):
    """The keywords of `LLM`: the fields of `EngineConfig` but for the model. A test compares both."""

    revision: str | None
    token: str | None
    load_format: str
    device: str
    dtype: object  # a name, or torch's own
    quantization: str
    kv_cache_dtype: str
    attention_backend: str
    batch_invariant: bool
    max_model_len: int | str | None
    block_size: int | None
    kv_cache_memory: int | str | None
    gpu_memory_utilization: float | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | str | None
    run_ahead: int | None
    enable_prefix_caching: bool
    host_kv_memory: int | str
    speculative: str
    overcommit: str
    itl_target_ms: float | None
    ttft_target_ms: float | None
    max_waiting: int | None
    regime: str | None
    seed: int
    threads: int | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    tenant_weights: Mapping[str, float]


class UnknownSetting(ConfigError, TypeError):
    """A keyword that is not a setting; a `TypeError` too, which Python raises for an unexpected keyword."""


def check_names(names: Iterable[str]) -> None:
    """Reject the first keyword that is not a setting, with the hint of another engine's setting or the nearest name."""
    known = [declared.name for declared in fields(EngineConfig)]
    for name in names:
        if name in known:
            continue
        hint = foreign_hint(name, as_flags=False)
        if hint is None:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(known)}."
        else:
            hint += "."
        raise UnknownSetting(f"There is no {name} here: {hint}", param=name)


def foreign_hint(name: str, *, as_flags: bool) -> str | None:
    """What replaces an option or keyword of another engine, in the spelling of the command line or of Python."""
    hint = _FOREIGN.get(name) if as_flags else _FOREIGN_IN_PYTHON.get(name, _FOREIGN.get(name))
    return None if hint is None else _spelled(hint, as_flags)


def foreign_value_hint(name: str, value: object, *, as_flags: bool) -> str | None:
    """What replaces a setting's value in the words of another engine."""
    hint = _FOREIGN_VALUES.get(name, {}).get(value.lower()) if isinstance(value, str) else None
    return None if hint is None else _spelled(hint, as_flags)


def _spelled(hint: str, as_flags: bool) -> str:
    known = {declared.name: setting_of(declared).flag or declared.name for declared in fields(EngineConfig)}
    return hint.format_map(known if as_flags else {each: each for each in known})


@contextmanager
def keywords_in_errors() -> Iterator[None]:
    """An error of this block names settings as keywords of Python, `max_model_len=512`, instead of as flags."""
    try:
        yield
    except QuireError as error:
        error.message = flags_as_keywords(error.message)
        error.args = (error.message, *error.args[1:])
        raise


def flags_as_keywords(message: str) -> str:
    """`--dtype bfloat16` as `dtype="bfloat16"`, `--kv-cache-memory` without a value as `kv_cache_memory`."""
    declared = {setting_of(each).flag: each for each in fields(EngineConfig)}

    def replaced(found: re.Match[str]) -> str:
        flag, space, value = found.groups()
        positive = flag.replace("--no-", "--")
        if positive not in declared:
            return found[0]
        name, setting = declared[positive].name, setting_of(declared[positive])
        if setting.kind == "switch":
            return f"{name}={positive == flag}{space}{value}"
        if setting.kind == "integer" and value.isdecimal():
            return f"{name}={value}"
        if value in setting.choices:
            return f'{name}="{value}"'
        return f"{name}{space}{value}"

    return _FLAG.sub(replaced, message)


def shows_settings(function: Function) -> Function:
    """Give a function that takes `**settings` the signature and the description of every setting, for `help()`."""
    taken = inspect.signature(function).parameters.values()
    declared = [each for each in fields(EngineConfig) if each.name != "model"]
    keywords = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default={} if each.default is MISSING else each.default,
            annotation=SettingsDict.__annotations__[each.name],
        )
        for each in declared
    ]
    others = [each for each in taken if each.kind is not inspect.Parameter.VAR_KEYWORD]
    first = [each for each in others if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    last = [each for each in others if each.kind is inspect.Parameter.KEYWORD_ONLY]
    signature = inspect.Signature([*first, *keywords, *last], return_annotation=None)
    function.__dict__["__signature__"] = signature
    lines = [f"    {each.name}: {setting_of(each).help}" for each in declared]
    function.__doc__ = "\n".join([function.__doc__ or "", "", *lines])
    return function


_REPLICAS = "use --replicas of quire serve"
_REQUEST_LOG = "a server writes one line per request to stdout, without its prompt, in --log-format; omit it"
_MAPPED = "weights are read once, into memory that the engine owns; omit it"
_ADAPTERS = "LoRA adapters are not read: merge the adapter into the model and serve that"
_DRAFTS = "use {speculative}, with ngram, mtp, draft:MODEL or eagle:PATH"
_TOKENIZER = "the tokenizer is that of the model's files; omit it"
_SHAPE = "the model's shape and positions are those of its files; omit it"
_KV_PLACE = "the KV cache is where the model runs; omit it"
_ORDER = "requests are ordered by class, fair share, deadline and arrival; omit it"
_LENGTH, _ROWS, _STEP = "use {max_model_len}", "use {max_num_seqs}", "use {max_num_batched_tokens}"

# Options and keywords of vLLM, SGLang and llama.cpp that quire does not have, and what replaces each. Names in braces
# are settings, written as flags on the command line.
_FOREIGN = {
    "data_parallel_size": _REPLICAS,
    "tp": "use {tensor_parallel_size}",
    "tp_size": "use {tensor_parallel_size}",
    "pp": "use {pipeline_parallel_size}",
    "pp_size": "use {pipeline_parallel_size}",
    "dp_size": _REPLICAS,
    "n_gpu_layers": "all layers run on one device, which {device} chooses; omit it",
    "enforce_eager": "CUDA graphs are captured automatically on GPUs; omit it",
    "disable_cuda_graph": "CUDA graphs are captured automatically on GPUs; omit it",
    "enable_chunked_prefill": "chunked prefill is always on; omit it",
    "chunked_prefill_size": _STEP,
    "n_batch": _STEP,
    "cache_type_k": "use {kv_cache_dtype}, for keys and values",
    "cache_type_v": "use {kv_cache_dtype}, for keys and values",
    "trust_remote_code": "code of a model's folder is never run; omit it",
    "enable_auto_tool_choice": "tool calling is always enabled; omit it",
    "generation_config": "the model's own is read, and request fields override it; omit it",
    "seed": "each request brings its own seed; omit it",  # of the command line alone: LLM has it
    "max_num_queued_reqs": "use {max_waiting}",
    "max_queued_requests": "use {max_waiting}",
    "swap_space": "use {host_kv_memory}, with a unit such as 4GiB",
    "cpu_offload_gb": "weights stay on one device; {host_kv_memory} keeps KV blocks on the host",
    "disable_log_requests": _REQUEST_LOG,
    "enable_log_requests": _REQUEST_LOG,
    "disable_log_stats": _REQUEST_LOG,
    "n_ctx": _LENGTH,
    "ctx_size": _LENGTH,
    "context_length": _LENGTH,
    "max_seq_len_to_capture": "use {max_model_len}, which the CUDA graphs follow",
    "mem_fraction_static": "use {gpu_memory_utilization}",
    "max_running_requests": _ROWS,
    "n_parallel": _ROWS,
    "parallel": _ROWS,
    "disable_radix_cache": "switch {enable_prefix_caching} off",
    "n_threads": "use {threads}",
    "threads_batch": "use {threads}",
    "num_ctx": _LENGTH,
    "max_seq_len": _LENGTH,
    "batch_size": _STEP,
    "ubatch_size": _STEP,
    "num_gpu": "all layers run on one device, which {device} chooses; omit it",
    "gpu_layers": "all layers run on one device, which {device} chooses; omit it",
    "flash_attn": "fused attention kernels are always used, {attention_backend} chooses which; omit it",
    "hf_repo": "give the hub id as the model, without an option",
    "cont_batching": "batching is always continuous; omit it",
    "jinja": "the model's chat template is always used; omit it",
    "mlock": _MAPPED,
    "mmap": _MAPPED,
    "no_mmap": _MAPPED,
    "alias": "use --served-model-name",
    "keep_alive": "the model stays loaded while the server runs; omit it",
    "num_parallel": _ROWS,
    "enable_lora": _ADAPTERS,
    "lora_modules": _ADAPTERS,
    "lora_paths": _ADAPTERS,
    "lora": _ADAPTERS,
    "mmproj": "the model reads text only; omit it",
    "limit_mm_per_prompt": "the model reads text only; omit it",
    "speculative_config": _DRAFTS,
    "speculative_model": _DRAFTS,
    "speculative_algorithm": _DRAFTS,
    "model_draft": _DRAFTS,
    "draft_model": _DRAFTS,
    "hf_token": "use {token}",
    "torch_dtype": "use {dtype}",
    "load_in_8bit": "use {quantization}, with int8, on a CPU",
    "load_in_4bit": "use {quantization}, with int4, on a CPU",
    "device_map": "use {device}",
    "attn_implementation": "use {attention_backend}",
    "type_k": "use {kv_cache_dtype}, for keys and values",
    "type_v": "use {kv_cache_dtype}, for keys and values",
    "n_ubatch": _STEP,
    "use_mmap": _MAPPED,
    "use_mlock": _MAPPED,
    "lora_path": _ADAPTERS,
    "tokenizer_mode": _TOKENIZER,
    "tokenizer_revision": _TOKENIZER,
    "skip_tokenizer_init": _TOKENIZER,
    "hf_overrides": _SHAPE,
    "rope_scaling": _SHAPE,
    "rope_freq_base": _SHAPE,
    "compilation_config": "CUDA graphs are captured automatically on GPUs; omit it",
    "distributed_executor_backend": "ranks are processes of this machine; omit it",
    "mm_processor_kwargs": "the model reads text only; omit it",
    "cache_dir": "models are kept in the hub's cache, which HF_HOME moves; omit it",
    "download_dir": "models are kept in the hub's cache, which HF_HOME moves; omit it",
    "tokenizer": _TOKENIZER,
    "chat_template_file": "use --chat-template",
    "reasoning_format": "use --reasoning-parser",
    "guided_decoding_backend": "structured output is always enabled; omit it",
    "grammar_backend": "structured output is always enabled; omit it",
    "embedding": "embeddings are always served; omit it",
    "embeddings": "embeddings are always served; omit it",
    "metrics": "/metrics is always served; omit it",
    "slots": "/slots is always served; omit it",
    "tensor_split": "all layers run on one device, which {device} chooses; omit it",
    "main_gpu": "the variable CUDA_VISIBLE_DEVICES chooses a GPU; omit it",
    "max_tokens": "each request brings its own max_tokens; omit it",
    "num_gpu_blocks_override": "use {kv_cache_memory}",
    "kv_cache_memory_bytes": "use {kv_cache_memory}",
    "rope_theta": _SHAPE,
    "rope_freq_scale": _SHAPE,
    "override_kv": _SHAPE,
    "max_lora_rank": _ADAPTERS,
    "max_loras": _ADAPTERS,
    "lora_base": _ADAPTERS,
    "no_kv_offload": _KV_PLACE,
    "offload_kqv": _KV_PLACE,
    "split_mode": "all layers run on one device, which {device} chooses; omit it",
    "async_scheduling": "steps are planned ahead by themselves, {run_ahead} says how many; omit it",
    "scheduling_policy": _ORDER,
    "schedule_policy": _ORDER,
    "preemption_mode": "each preemption is chosen by its cost; omit it",
    "max_logprobs": "requests ask for at most 20 log-probabilities; omit it",
    "logits_processors": "requests bring logit_bias, bad_words and allowed_token_ids; omit it",
    "disable_custom_all_reduce": "sums between ranks are chosen by themselves; omit it",
    "enable_expert_parallel": "mixtures of experts are not read",
    "log_level": "errors go to stderr, a line per request to stdout in --log-format; omit it",
    "uvicorn_log_level": "errors go to stderr, a line per request to stdout in --log-format; omit it",
    "log_verbosity": "errors go to stderr, a line per request to stdout in --log-format; omit it",
    "verbose": "the steps of a start are always printed; omit it",
    "uds": "the server listens on TCP, at --host and --port",
    "workers": "one process answers all clients, --replicas adds engines; omit it",
}
# The same in Python, where it differs.
_OF_SERVE = "it is an option of quire serve; omit it"
_OF_REQUEST = "it is of a request: SamplingParams takes it"
_TEMPLATE = "chat takes chat_template, the text of a template"
_PARSERS = "chat finds the model's format of tool calls and reasoning by its template; omit it"
_METHODS = "one LLM has generate, chat, embed and score; omit it"
_FOREIGN_IN_PYTHON = {
    "alias": _OF_SERVE, "served_model_name": _OF_SERVE, "host": _OF_SERVE, "port": _OF_SERVE, "api_key": _OF_SERVE,
    "chat_template_file": _TEMPLATE, "chat_template": _TEMPLATE, "chat_format": _TEMPLATE,
    "reasoning_format": _PARSERS, "reasoning_parser": _PARSERS, "tool_call_parser": _PARSERS,
    "temperature": _OF_REQUEST, "top_p": _OF_REQUEST, "top_k": _OF_REQUEST, "min_p": _OF_REQUEST, "stop": _OF_REQUEST,
    "max_tokens": _OF_REQUEST, "max_new_tokens": "it is of a request: SamplingParams takes max_tokens",
    "logits_all": "it is of a request: SamplingParams takes prompt_logprobs",
    "task": _METHODS, "runner": _METHODS, "embedding": _METHODS, "embeddings": _METHODS,
    "repo_id": "the model is the hub id, or org/name:file.gguf",
    "filename": "the model is org/name:file.gguf, or a path",
    "numa": "the operating system places threads; omit it", "vocab_only": "LLM reads the weights, too; omit it",
    "low_cpu_mem_usage": "weights are read once; omit it", "use_cache": "the KV cache is always used; omit it",
    "random_seed": "use seed", "verbose": "nothing is printed but progress bars; omit it",
    "disable_log_stats": "nothing is printed but progress bars; omit it",
    "enable_sleep_mode": "close() frees the model's memory; omit it",
}  # fmt: skip
_HALF = "use float16, or on a CPU bfloat16"
_FLOAT16, _BFLOAT16, _FLOAT32 = "use float16", "use bfloat16", "use float32"
_AT_LOAD = "quantized weights are read from GGUF files, and on a CPU int8 or int4 quantizes others at load"
_NARROW = "weights of 8 or 4 bits are {quantization} int8 or int4, on a CPU, or a GGUF file"
_NARROW_KV = "8 bits are int8, on a CPU"
# Values of settings in the words of other engines.
_FOREIGN_VALUES = {
    "dtype": {
        "half": _HALF, "fp16": _HALF, "f16": _HALF, "bf16": _BFLOAT16, "float": _FLOAT32, "fp32": _FLOAT32,
        "f32": _FLOAT32, "fp8": _NARROW, "float8": _NARROW, "int8": _NARROW, "int4": _NARROW, "q8_0": _NARROW,
        "q4_0": _NARROW,
    },
    "quantization": {
        "awq": _AT_LOAD, "gptq": _AT_LOAD, "fp8": _AT_LOAD, "bitsandbytes": _AT_LOAD, "compressed-tensors": _AT_LOAD,
        "gguf": "a GGUF file is read as it is; omit it", "q8_0": "use int8", "q4_0": "use int4",
    },
    "kv_cache_dtype": {
        "half": _FLOAT16, "fp16": _FLOAT16, "f16": _FLOAT16, "bf16": _BFLOAT16, "fp32": _FLOAT32, "f32": _FLOAT32,
        "fp8": _NARROW_KV, "fp8_e4m3": _NARROW_KV, "fp8_e5m2": _NARROW_KV, "q8_0": _NARROW_KV,
    },
    "attention_backend": {"flash_attn": "use fa3", "triton": "use quire", "sdpa": "use torch"},
    "load_format": dict.fromkeys(("safetensors", "gguf", "pt"), "auto reads safetensors and GGUF files; omit it"),
    "device": {
        "gpu": "use cuda",
        "cuda:0": "use cuda; the variable CUDA_VISIBLE_DEVICES chooses a GPU",
        "mps": "Apple's GPUs are not used; use cpu",
    },
}  # fmt: skip

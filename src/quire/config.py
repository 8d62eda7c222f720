"""The settings of an engine: what the user said, and what follows from it and the facts of model and machine.

A setting the user left out is derived; `Resolved.reasons` says of each where its value came from. Nothing is changed
in place, and no environment variable is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.core.errors import ConfigError, shown
from quire.core.model import ModelSpec
from quire.core.validation import make_plain

MOST_SEATS = 256  # of a server on a GPU, where nobody says how many
_BATCH_SEATS = 512  # on a GPU, where nobody waits for his next token
_CPU_SEATS = 64
GIB = 1 << 30
DTYPES = ("bfloat16", "float16", "float32")
ATTENTION_BACKENDS = ("auto", "quire", "torch", "fa3", "flashinfer")
OVERCOMMITS = ("never", "hedge", "optimistic")
_CPU_STEP, _GPU_STEP, _GPU_BATCH_STEP = 512, 2048, 8192  # tokens, where the user does not say
USUAL_UTILIZATION = 0.9  # of a GPU's memory, where the user does not say
REGIMES = ("static", "dynamic", "continuous", "paged", "chunked", "prefix")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a user may set. None means: derive it."""

    model: str | None = None
    revision: str | None = None
    token: str | None = None  # for hub ids that need one
    load_format: str = "auto"  # or "dummy": invented weights at a named shape
    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"  # who attends on a GPU; "quire": our own kernels alone
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory: int | None = None  # bytes
    gpu_memory_utilization: float | None = None  # share of the GPU's memory that quire may take in all
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    run_ahead: int | None = None  # steps in flight: 0, 1 or 2
    enable_prefix_caching: bool = True
    host_kv_memory: int = 0  # bytes on the host for KV that had to leave the device
    overcommit: str = "hedge"  # how far KV is promised beyond what there is
    itl_target_ms: float | None = None  # the time between two tokens that prefills must leave room for
    max_waiting: int | None = None  # requests; None: no limit
    regime: str | None = None  # for experiments: an earlier step of the arc from static batching to prefix reuse
    seed: int = 0
    threads: int | None = None
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # shares of the engine; 1 if not named

    def __post_init__(self) -> None:
        make_plain(self, self.__slots__)
        if self.model is not None and not (isinstance(self.model, str) and self.model.strip()):
            raise ConfigError(
                f"model must be a path, a short name or a hub id, not {shown(self.model)}.",
                param="model",
            )
        _check_choice("load_format", self.load_format, ("auto", "dummy"))
        _check_choice("device", self.device, ("auto", "cpu", "cuda"))
        _check_choice("dtype", self.dtype, ("auto", *DTYPES))
        _check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _check_count("max_model_len", self.max_model_len, 2, 2**24 - 1)
        _check_whole("block_size", self.block_size, 1, 256)
        _check_count("kv_cache_memory", self.kv_cache_memory, 1, 2**60)
        _check_share("gpu_memory_utilization", self.gpu_memory_utilization)
        _check_count("max_num_seqs", self.max_num_seqs, 1, 65536)
        _check_count("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**20)
        _check_count("run_ahead", self.run_ahead, 0, 2)
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(
                f"enable_prefix_caching must be true or false, not {shown(self.enable_prefix_caching)}.",
                param="enable_prefix_caching",
            )
        _check_whole("host_kv_memory", self.host_kv_memory, 0, 2**60)
        _check_choice("overcommit", self.overcommit, OVERCOMMITS)
        if self.itl_target_ms is not None:
            _check_milliseconds("itl_target_ms", self.itl_target_ms, 10**6)
        _check_count("max_waiting", self.max_waiting, 1, 2**31 - 1)
        if self.regime is not None:
            _check_choice("regime", self.regime, REGIMES)
        _check_whole("seed", self.seed, -(2**63) + 1, 2**63 - 1)
        _check_count("threads", self.threads, 1, 4096)


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """The facts of the device that settings follow from."""

    device: str  # "cpu" or "cuda"
    free_bytes: int  # memory that KV may be taken from, weights already loaded
    fast_bfloat16: bool
    num_cores: int
    total_bytes: int = 0  # of a GPU; 0 where the memory is everybody's


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Every number the engine runs on."""

    max_model_len: int
    block_size: int
    num_blocks: int
    kv_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    run_ahead: int
    regime: str
    num_host_blocks: int
    workspace_bytes: int  # left free on a GPU for activations, logits and recorded steps
    reasons: dict[str, str] = field(default_factory=dict)


def resolve_dtype(config: EngineConfig, machine: MachineInfo) -> str:
    """bf16 where the machine multiplies it fast, float32 elsewhere."""
    if config.dtype != "auto":
        if config.dtype == "float16" and machine.device == "cpu":
            raise ConfigError("float16 is not for CPUs; use --dtype bfloat16 or --dtype float32.", param="dtype")
        return config.dtype
    return "bfloat16" if machine.fast_bfloat16 else "float32"


def resolve(
    config: EngineConfig, spec: ModelSpec, kv_bytes_per_token: int, machine: MachineInfo, *, serving: bool = False
) -> ResolvedConfig:
    """Settle all numbers for one model on one machine. Whoever serves people takes smaller steps than for a batch."""
    reasons: dict[str, str] = {}
    on_gpu = machine.device == "cuda"
    usual_rows = (MOST_SEATS if serving else _BATCH_SEATS) if on_gpu else _CPU_SEATS
    usual_rows = min(usual_rows, config.max_num_batched_tokens or usual_rows)
    rows = _pick(reasons, "max_num_seqs", config.max_num_seqs, usual_rows, machine.device)
    budget = _pick(
        reasons,
        "max_num_batched_tokens",
        config.max_num_batched_tokens,
        max((_GPU_STEP if serving else _GPU_BATCH_STEP) if on_gpu else _CPU_STEP, rows),
        "default",
    )
    if rows > budget:
        raise ConfigError(
            f"max_num_seqs is {rows}, more than max_num_batched_tokens, which is {budget}: every running sequence "
            f"needs a token in each step. Use --max-num-batched-tokens {rows} or more.",
            param="max_num_batched_tokens",
        )
    workspace = _workspace_bytes(spec, rows, budget) if on_gpu else 0
    if on_gpu:
        share = _gpu_share(config, machine, workspace)
    else:
        share = min(machine.free_bytes // 4, 4 * GIB)
    longest = min(spec.max_positions, config.max_model_len or spec.max_positions)
    blocks_each = -(-longest // config.block_size)
    most_useful = rows * blocks_each * config.block_size * kv_bytes_per_token
    kv_bytes = _pick(
        reasons, "kv_cache_memory", config.kv_cache_memory, min(share, most_useful), "share of free memory"
    )
    num_blocks = kv_bytes // (kv_bytes_per_token * config.block_size)
    pool_tokens = num_blocks * config.block_size
    length = _resolve_length(config, spec, pool_tokens, kv_bytes_per_token, reasons)
    return ResolvedConfig(
        max_model_len=length,
        block_size=config.block_size,
        num_blocks=num_blocks,
        kv_bytes=kv_bytes,
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        run_ahead=_pick(reasons, "run_ahead", config.run_ahead, 1 if on_gpu else 0, machine.device),
        regime=_resolve_regime(config, reasons),
        num_host_blocks=_resolve_host_blocks(config, kv_bytes_per_token * config.block_size),
        workspace_bytes=workspace,
        reasons=reasons,
    )


def _workspace_bytes(spec: ModelSpec, rows: int, budget: int) -> int:
    """What the largest step holds at once, counted generously: activations of every token, logits of every row, and
    what libraries and recorded steps take for themselves."""
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    activations = budget * (4 * spec.hidden_size + 3 * spec.ffn_size + 2 * heads) * 4
    logits = 3 * rows * spec.vocab_size * 4
    return GIB + activations + logits


def _gpu_share(config: EngineConfig, machine: MachineInfo, workspace: int) -> int:
    """What is left of quire's share of the card: others' memory, the weights and the workspace taken away."""
    utilization = USUAL_UTILIZATION if config.gpu_memory_utilization is None else config.gpu_memory_utilization
    taken = machine.total_bytes - machine.free_bytes
    left = int(machine.total_bytes * utilization) - taken - workspace
    if left <= 0 and config.kv_cache_memory is None:
        raise ConfigError(
            f"Of {machine.total_bytes} bytes on the GPU {taken} are taken, by the weights or by others, and "
            f"{workspace} are kept for the work of a step: nothing is left for the KV cache within "
            f"{utilization:.0%}. Use a larger --gpu-memory-utilization, a smaller --max-num-batched-tokens, or "
            f"another GPU.",
            param="gpu_memory_utilization",
        )
    return max(left, 0)


def _resolve_regime(config: EngineConfig, reasons: dict[str, str]) -> str:
    if config.regime == "prefix" and not config.enable_prefix_caching:
        raise ConfigError(
            "The regime is prefix, but prefix caching is switched off. Use --regime chunked, or leave one away.",
            param="regime",
        )
    reasons["regime"] = "default" if config.regime is None and config.enable_prefix_caching else "you"
    return config.regime or ("prefix" if config.enable_prefix_caching else "chunked")


def _resolve_host_blocks(config: EngineConfig, block_bytes: int) -> int:
    if config.host_kv_memory == 0:
        return 0
    if not config.enable_prefix_caching or config.regime not in (None, "prefix"):
        raise ConfigError(
            "host_kv_memory keeps prefixes that the KV cache has no room for, and so needs prefix caching. Use "
            "--enable-prefix-caching, or --host-kv-memory 0.",
            param="host_kv_memory",
        )
    if config.host_kv_memory < block_bytes:
        raise ConfigError(
            f"host_kv_memory is {config.host_kv_memory} bytes, less than one KV block, which has {block_bytes}. Use "
            f"--host-kv-memory {block_bytes} or more, or 0 for none.",
            param="host_kv_memory",
        )
    return config.host_kv_memory // block_bytes


def _resolve_length(
    config: EngineConfig, spec: ModelSpec, pool_tokens: int, kv_bytes_per_token: int, reasons: dict[str, str]
) -> int:
    if pool_tokens < 2:
        needed = 2 * kv_bytes_per_token * config.block_size
        raise ConfigError(
            f"The KV cache holds {pool_tokens} tokens, which is too few for any request; "
            f"{needed} bytes hold two blocks. Use a larger --kv-cache-memory.",
            param="kv_cache_memory",
        )
    wanted = config.max_model_len
    if wanted is None:
        reasons["max_model_len"] = "the model" if spec.max_positions <= pool_tokens + 1 else "what the KV cache holds"
        return min(spec.max_positions, pool_tokens + 1)
    if wanted > spec.max_positions:
        raise ConfigError(
            f"max_model_len is {wanted}, but the model was made for {spec.max_positions} positions. "
            f"Use --max-model-len {spec.max_positions} or less.",
            param="max_model_len",
        )
    if wanted > pool_tokens + 1:  # the last token is never computed
        enough = -(-(wanted - 1) // config.block_size) * config.block_size * kv_bytes_per_token
        raise ConfigError(
            f"max_model_len is {wanted}, but the KV cache holds {pool_tokens} tokens. Use --max-model-len "
            f"{pool_tokens + 1} or less, or --kv-cache-memory {enough} or more.",
            param="max_model_len",
        )
    reasons["max_model_len"] = "you"
    return wanted


def _pick(reasons: dict[str, str], name: str, said: int | None, derived: int, why: str) -> int:
    reasons[name] = why if said is None else "you"
    return derived if said is None else said


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}.", param=name)


def _check_milliseconds(name: str, value: object, high: int) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= high:  # type: ignore[operator]  # NaN is nowhere
        raise ConfigError(f"{name} must be a number above 0 and at most {high}, not {shown(value)}.", param=name)


def _check_share(name: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and 0 < value <= 1):  # type: ignore[operator]  # NaN is nowhere
        raise ConfigError(f"{name} must be a number above 0 and at most 1, not {shown(value)}.", param=name)


def _check_count(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None:
        _check_whole(name, value, low, high)


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}, not {shown(value)}.", param=name)

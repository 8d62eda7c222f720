"""From settings to numbers: every size that an engine runs on, for one model on one machine.

A setting that is not given is derived; `ResolvedConfig.reasons` holds the origin of each value. Does not depend on
torch.
"""

from dataclasses import dataclass, field

from quire.config import DEFAULT_SERVER_ROWS, EngineConfig
from quire.core.errors import ConfigError
from quire.core.model import ModelSpec
from quire.core.speculative import MODEL_DRAFTERS, resolve_drafters

GIB = 1 << 30
_DEFAULT_BATCH_ROWS = 512  # on a GPU without streaming clients: throughput counts, not the time between two tokens
_DEFAULT_CPU_ROWS = 64
_BLOCK_SIZE, _CPU_BLOCK_SIZE = 16, 32  # by default
_CPU_LONGEST = 4  # sequences of full length that the KV cache of a CPU holds by default, within 1 and 4 GiB
_CPU_RESIDENT_SHARE = 8  # part of the KV cache of a CPU that unheld prefixes fill before one that was evicted is missed
_CPU_LEAST_RESIDENT = 64 << 20  # bytes, for the same
_STATES_READ = 5  # of each token of a step by a head that drafts, at most: of four layers, and fused
_MAX_VERIFIED, _DRAFT_ROW_BYTES = 512, 80 * 1024  # lines of a step with drafts; tokens to draft from, of each row
_CPU_STEP_TOKENS, _GPU_STEP_TOKENS = 512, 8192  # default max_num_batched_tokens
_DEFAULT_UTILIZATION = 0.9  # of a GPU's memory


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """Properties of the device that settings are derived from."""

    device: str  # "cpu" or "cuda"
    free_bytes: int  # memory available for the KV cache, with the weights loaded
    fast_bfloat16: bool
    num_cores: int
    total_bytes: int = 0  # of a GPU; 0 on a CPU, where the memory is shared with other programs


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
    workspace_bytes: int  # left free on a GPU for activations, logits and CUDA graphs
    reasons: dict[str, str] = field(default_factory=dict)
    drafters: tuple[str, ...] = ()  # of speculative decoding
    resident_limit: int | None = None  # KV blocks that unheld prefixes may fill at first; None: all
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def num_ranks(self) -> int:
        """Each has `kv_bytes`, or less in a pipeline stage with fewer layers."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


def resolve_dtype(config: EngineConfig, machine: MachineInfo) -> str:
    """bfloat16 where the machine computes it fast, else float32."""
    if config.dtype != "auto":
        if config.dtype == "float16" and machine.device == "cpu":
            raise ConfigError("float16 is not for CPUs; use --dtype bfloat16 or --dtype float32.", param="dtype")
        return config.dtype
    return "bfloat16" if machine.fast_bfloat16 else "float32"


def resolve(
    config: EngineConfig, spec: ModelSpec, kv_bytes_per_token: int, machine: MachineInfo, *, serving: bool = False
) -> ResolvedConfig:
    """Derive every number for one model on one machine. A server has fewer rows than a batch, for latency."""
    reasons: dict[str, str] = {}
    on_gpu = machine.device == "cuda"
    default_rows = (DEFAULT_SERVER_ROWS if serving else _DEFAULT_BATCH_ROWS) if on_gpu else _DEFAULT_CPU_ROWS
    default_rows = min(default_rows, config.max_num_batched_tokens or default_rows)
    rows = _pick(reasons, "max_num_seqs", config.max_num_seqs, default_rows, machine.device)
    budget = _pick(
        reasons,
        "max_num_batched_tokens",
        config.max_num_batched_tokens,
        max(_GPU_STEP_TOKENS if on_gpu else _CPU_STEP_TOKENS, rows),
        "default",
    )
    if rows > budget:
        raise ConfigError(
            f"max_num_seqs is {rows}, more than max_num_batched_tokens, which is {budget}: every running sequence "
            f"needs a token in each step. Use --max-num-batched-tokens {rows} or more.",
            param="max_num_batched_tokens",
        )
    drafters = resolve_drafters(config.speculative, caches_prefixes=_resolve_regime(config, {}) == "prefix")
    if drafters:
        reasons["speculative"] = "you"
    run_ahead = 1 if on_gpu else config.pipeline_parallel_size - 1  # a step in every stage
    longest = min(spec.max_positions, config.max_model_len or spec.max_positions)
    workspace = _workspace_bytes(spec, rows, budget, longest, drafters) if on_gpu else 0
    if on_gpu:
        share = _gpu_share(config, machine, workspace)
    else:
        share = min(machine.free_bytes // 4, max(GIB, min(_CPU_LONGEST * longest * kv_bytes_per_token, 4 * GIB)))
    block_size = resolve_block_size(config, machine.device)
    reasons["block_size"] = machine.device if config.block_size is None else "you"
    blocks_each = -(-longest // block_size)
    most_useful = rows * blocks_each * block_size * kv_bytes_per_token
    kv_bytes = _pick(
        reasons, "kv_cache_memory", config.kv_cache_memory, min(share, most_useful), "share of free memory"
    )
    num_blocks = kv_bytes // (kv_bytes_per_token * block_size)
    length = _resolve_length(config, spec, num_blocks, block_size, kv_bytes_per_token, reasons)
    return ResolvedConfig(
        max_model_len=length,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_bytes=kv_bytes,
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        run_ahead=_pick(reasons, "run_ahead", config.run_ahead, run_ahead, machine.device),
        regime=_resolve_regime(config, reasons),
        num_host_blocks=_resolve_host_blocks(config, kv_bytes_per_token * block_size),
        workspace_bytes=workspace,
        reasons=reasons,
        drafters=drafters,
        resident_limit=None if on_gpu or config.host_kv_memory else _resident_limit(kv_bytes, num_blocks),
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
    )


def _resident_limit(kv_bytes: int, num_blocks: int) -> int:
    """A CPU's memory becomes resident block by block; on a GPU, all of it is allocated at the start."""
    most = max(kv_bytes // _CPU_RESIDENT_SHARE, _CPU_LEAST_RESIDENT)
    return min(num_blocks * most // kv_bytes, num_blocks) if kv_bytes else 0


def _workspace_bytes(spec: ModelSpec, rows: int, budget: int, longest: int, drafters: tuple[str, ...]) -> int:
    """Upper bound of the memory of the largest step: activations of every token, logits of every row, and 1 GiB for
    libraries and CUDA graphs. With drafts, their logits, a copy for log-probabilities, and the tokens of each row."""
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    activations = budget * (4 * spec.hidden_size + 3 * spec.ffn_size + 2 * heads) * 4
    logits = 3 * rows * spec.vocab_size * 4
    drafted = 2 * _MAX_VERIFIED * spec.vocab_size * 4 + rows * _DRAFT_ROW_BYTES if drafters else 0
    if set(MODEL_DRAFTERS) & set(drafters):  # logits of its passes, and all tokens of each row
        drafted += 4 * rows * (spec.vocab_size + longest)
    if {"eagle", "mtp"} & set(drafters):
        drafted += 4 * budget * _STATES_READ * spec.hidden_size
    return GIB + activations + logits + drafted


def _gpu_share(config: EngineConfig, machine: MachineInfo, workspace: int) -> int:
    """The rest of quire's share of the GPU, without the weights, the workspace and the memory of other programs."""
    utilization = _DEFAULT_UTILIZATION if config.gpu_memory_utilization is None else config.gpu_memory_utilization
    taken = machine.total_bytes - machine.free_bytes
    left = int(machine.total_bytes * utilization) - taken - workspace
    if left <= 0 and config.kv_cache_memory is None:
        raise ConfigError(
            f"Of {machine.total_bytes} bytes on the GPU {taken} are taken, by the weights or by other programs, and "
            f"{workspace} are kept for the workspace of a step: nothing is left for the KV cache within "
            f"{utilization:.0%}. Use a larger --gpu-memory-utilization, a smaller --max-num-batched-tokens, or "
            f"another GPU.",
            param="gpu_memory_utilization",
        )
    return max(left, 0)


def _resolve_regime(config: EngineConfig, reasons: dict[str, str]) -> str:
    if config.regime == "prefix" and not config.enable_prefix_caching:
        raise ConfigError(
            "The regime is prefix, but prefix caching is switched off. Use --regime chunked, or omit one of them.",
            param="regime",
        )
    reasons["regime"] = "default" if config.regime is None and config.enable_prefix_caching else "you"
    return config.regime or ("prefix" if config.enable_prefix_caching else "chunked")


def _resolve_host_blocks(config: EngineConfig, block_bytes: int) -> int:
    if config.host_kv_memory == 0:
        return 0
    if not config.enable_prefix_caching or config.regime not in (None, "prefix"):
        raise ConfigError(
            "host_kv_memory keeps prefixes that were evicted from the KV cache, and so needs prefix caching. Use "
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


def resolve_block_size(config: EngineConfig, device: str) -> int:
    """On a CPU a block is granted less often, and read with fewer look-ups; GPU kernels were tuned for 16."""
    if config.block_size is not None:
        return config.block_size
    return _CPU_BLOCK_SIZE if device == "cpu" else _BLOCK_SIZE


def check_length(config: EngineConfig, spec: ModelSpec) -> None:
    """Needs no machine: a model that is opened is checked before it is loaded."""
    requested = config.max_model_len
    if requested is not None and requested > spec.max_positions:
        raise ConfigError(
            f"max_model_len is {requested}, but the model supports {spec.max_positions} positions. "
            f"Use --max-model-len {spec.max_positions} or less.",
            param="max_model_len",
        )


def _resolve_length(
    config: EngineConfig,
    spec: ModelSpec,
    num_blocks: int,
    block_size: int,
    kv_bytes_per_token: int,
    reasons: dict[str, str],
) -> int:
    pool_tokens = num_blocks * block_size
    if pool_tokens < 2:
        needed = 2 * kv_bytes_per_token * block_size
        raise ConfigError(
            f"The KV cache holds {pool_tokens} tokens, which is too few for any request; "
            f"{needed} bytes hold two blocks. Use a larger --kv-cache-memory.",
            param="kv_cache_memory",
        )
    requested = config.max_model_len
    if requested is None:
        reasons["max_model_len"] = "the model" if spec.max_positions <= pool_tokens + 1 else "what the KV cache holds"
        return min(spec.max_positions, pool_tokens + 1)
    check_length(config, spec)
    if requested > pool_tokens + 1:  # the last token is never computed
        enough = -(-(requested - 1) // block_size) * block_size * kv_bytes_per_token
        raise ConfigError(
            f"max_model_len is {requested}, but the KV cache holds {pool_tokens} tokens. Use --max-model-len "
            f"{pool_tokens + 1} or less, or --kv-cache-memory {enough} or more.",
            param="max_model_len",
        )
    reasons["max_model_len"] = "you"
    return requested


def _pick(reasons: dict[str, str], name: str, given: int | None, derived: int, reason: str) -> int:
    reasons[name] = reason if given is None else "you"
    return derived if given is None else given

"""The model families, one row each: how their files differ. The decoder depends on `ModelSpec` only."""

from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum

from quire.core.errors import UnsupportedModel


class WindowRule(Enum):
    """Which layers have sliding-window attention."""

    NONE = "none"
    EVERY_LAYER = "every layer"
    UPPER_LAYERS = "upper layers"  # Qwen: from max_window_layers on, and only if use_sliding_window
    PERIODIC = "periodic"  # Gemma: all but every n-th layer


class BiasRule(Enum):
    """Which attention projections have a bias."""

    NEVER = "never"
    QKV = "qkv"  # Qwen2: queries, keys and values always
    FROM_CONFIG = "from config"  # attention_bias of config.json: all four projections


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One family of models, as its files describe it."""

    name: str
    architecture: str  # architectures[0] of config.json
    model_type: str  # model_type of config.json
    gguf: str | None  # general.architecture of a GGUF file; Mistral files have "llama" there
    bias: BiasRule = BiasRule.NEVER
    windows: WindowRule = WindowRule.NONE
    window_period: int = 0
    default_window: int = 0
    default_head_dim: int = 0  # 0: hidden size / heads
    default_theta: float = 10_000.0
    default_norm_eps: float = 1e-6
    tied_by_default: bool = False
    qk_norm: bool = False
    gemma: bool = False  # sandwich norms stored less one, scaled embeddings, gelu, query_pre_attn_scalar
    local_rope: bool = False
    fused_projections: bool = False  # qkv and gate_up are fused in the files
    interleaved_in_gguf: bool = False  # llama.cpp's converter reorders the rows of queries and keys
    mtp_layers: str = ""  # how names of tensors of multi-token-prediction layers begin; the model skips these


FAMILIES: tuple[ModelFamily, ...] = (
    ModelFamily("llama", "LlamaForCausalLM", "llama", "llama", bias=BiasRule.FROM_CONFIG, interleaved_in_gguf=True),
    ModelFamily(
        "mistral",
        "MistralForCausalLM",
        "mistral",
        gguf=None,
        windows=WindowRule.EVERY_LAYER,
        default_window=4096,
    ),
    ModelFamily("qwen2", "Qwen2ForCausalLM", "qwen2", "qwen2", bias=BiasRule.QKV, windows=WindowRule.UPPER_LAYERS),
    ModelFamily(
        "mimo",
        "MiMoForCausalLM",
        "mimo",
        gguf=None,
        bias=BiasRule.QKV,
        windows=WindowRule.UPPER_LAYERS,
        mtp_layers="model.mtp_layers.",
    ),
    ModelFamily(
        "qwen3",
        "Qwen3ForCausalLM",
        "qwen3",
        "qwen3",
        bias=BiasRule.FROM_CONFIG,
        windows=WindowRule.UPPER_LAYERS,
        default_head_dim=128,
        qk_norm=True,
    ),
    ModelFamily(
        "gemma2",
        "Gemma2ForCausalLM",
        "gemma2",
        "gemma2",
        bias=BiasRule.FROM_CONFIG,
        windows=WindowRule.PERIODIC,
        window_period=2,
        default_window=4096,
        default_head_dim=256,
        tied_by_default=True,
        gemma=True,
    ),
    ModelFamily(
        "gemma3",
        "Gemma3ForCausalLM",
        "gemma3_text",
        "gemma3",
        bias=BiasRule.FROM_CONFIG,
        windows=WindowRule.PERIODIC,
        window_period=6,
        default_window=4096,
        default_head_dim=256,
        default_theta=1_000_000.0,
        tied_by_default=True,
        qk_norm=True,
        gemma=True,
        local_rope=True,
    ),
    ModelFamily(
        "phi3",
        "Phi3ForCausalLM",
        "phi3",
        "phi3",
        windows=WindowRule.EVERY_LAYER,
        default_norm_eps=1e-5,
        fused_projections=True,
    ),
)

BY_NAME = {family.name: family for family in FAMILIES}
BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}
BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES}
BY_GGUF = {family.gguf: family for family in FAMILIES if family.gguf is not None}


def unsupported(source: str, name: str, known: dict[str, ModelFamily], remark: str = "") -> UnsupportedModel:
    """The refusal of an architecture, with the nearest that is read."""
    nearest = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" The nearest is {nearest[0]}." if nearest else ""
    return UnsupportedModel(
        f"{source} is a {name or 'model of no named architecture'}, which quire does not read{remark}. "
        f"It reads {', '.join(known)}.{hint}"
    )

"""Model specification: the numbers that describe a decoder, shared by all packages. Does not depend on files."""

from dataclasses import dataclass
from enum import Enum


class RopeKind(Enum):
    """How rotary frequencies are scaled beyond the trained context length."""

    PLAIN = "plain"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    FACTORS = "factors"  # a stored divisor per frequency: GGUF's form of Llama 3's scaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base, rotated dimensions of a head, and the scaling with its constants."""

    theta: float
    rotary_dim: int
    kind: RopeKind = RopeKind.PLAIN
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    attention_factor: float | None = None  # yarn, longrope: scales cos and sin; None means derive it
    mscale: float = 0.0  # yarn, DeepSeek style; 0 means unused
    mscale_all_dim: float = 0.0
    short_factors: tuple[float, ...] = ()  # longrope, one per frequency; FACTORS keeps its divisors here
    long_factors: tuple[float, ...] = ()  # longrope


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. One implementation runs all model families; they differ only in these values."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int  # the width of the logits
    max_positions: int
    norm_eps: float
    rope: RopeSpec
    tied_embeddings: bool
    activation: str = "silu"  # or "gelu_tanh"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head's query and key (Qwen3, Gemma 3)
    sandwich_norms: bool = False  # a norm after attention and after the MLP too (Gemma 2, 3)
    embedding_scale: float = 1.0  # Gemma multiplies embeddings by sqrt(hidden)
    attention_scale: float | None = None  # None means head_dim ** -0.5
    attention_softcap: float = 0.0  # 0 means none
    final_softcap: float = 0.0
    windows: tuple[int, ...] = ()  # per layer: keys a query may see, itself included; 0 means all; () means all 0
    local_rope: RopeSpec | None = None  # rope of the windowed layers where it differs (Gemma 3)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def layer_rope(self, layer: int) -> RopeSpec:
        return self.local_rope if self.local_rope is not None and self.window(layer) else self.rope

    def kv_bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class DraftHeadSpec:
    """A head that drafts: one layer that reads a token and the hidden states of the model before it."""

    layer: ModelSpec  # its vocabulary is that of the drafts
    target_hidden_size: int
    target_vocab_size: int
    captured_layers: tuple[int, ...]  # of the model: what enters them is read; their number: what leaves the last
    norm_before_residual: bool = False  # the residual of its layer begins with the normed hidden state
    own_embedding: bool = False  # False: that of the model
    maps_tokens: bool = False  # a stored map has the model's token of each draft token
    own_head: bool = True  # False: the model's, behind a norm of its own
    source: str = "eagle"  # what it is, by its name among drafters: "eagle", or "mtp", a layer of the model's own files

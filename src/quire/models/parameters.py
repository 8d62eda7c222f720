"""The tensors of a decoder by name and shape: filled by the loader, read by the decoder."""

from dataclasses import dataclass

from torch import Tensor

from quire.core.model import ModelSpec
from quire.kernels.interface import Weight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in], in the model's dtype or as stored; norms are float32 factors."""

    attention_norm: Tensor  # [hidden]
    qkv: Weight  # [(heads + 2 * kv_heads) * dim, hidden]: queries, keys, values
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # [dim]
    key_norm: Tensor | None  # [dim]
    output: Weight  # [hidden, heads * dim]
    output_bias: Tensor | None
    attention_post_norm: Tensor | None  # [hidden]
    mlp_norm: Tensor  # [hidden]
    gate_up: Weight  # [2 * ffn, hidden]: gate, then up
    gate_up_bias: Tensor | None
    down: Weight  # [hidden, ffn]
    down_bias: Tensor | None
    mlp_post_norm: Tensor | None  # [hidden]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights of a decoder. `head` is the embedding itself where the two are tied."""

    embedding: Weight  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden] float32
    head: Weight  # [vocab, hidden]


def as_tensor(weight: Weight) -> Tensor:
    """A weight that was allocated as a tensor."""
    assert isinstance(weight, Tensor), "the weight stays as its file stores it"
    return weight


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every field of `LayerWeights` that this model has."""
    queries = spec.num_heads * spec.head_dim
    keys = spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (spec.hidden_size,),
        "qkv": (queries + 2 * keys, spec.hidden_size),
        "output": (spec.hidden_size, queries),
        "mlp_norm": (spec.hidden_size,),
        "gate_up": (2 * spec.ffn_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.ffn_size),
    }
    if spec.qkv_bias:
        shapes["qkv_bias"] = (queries + 2 * keys,)
    if spec.output_bias:
        shapes["output_bias"] = (spec.hidden_size,)
    if spec.mlp_bias:
        shapes["gate_up_bias"] = (2 * spec.ffn_size,)
        shapes["down_bias"] = (spec.hidden_size,)
    if spec.qk_norm:
        shapes["query_norm"] = shapes["key_norm"] = (spec.head_dim,)
    if spec.sandwich_norms:
        shapes["attention_post_norm"] = shapes["mlp_post_norm"] = (spec.hidden_size,)
    return shapes

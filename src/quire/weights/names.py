"""Which stored tensor fills which part of which weight: the names of both formats, as tables.

Does not depend on bytes. `expected_tensors` is exact: every name it gives must be there, and no other may be.
"""

from enum import Enum
from typing import NamedTuple

from quire.core.model import ModelSpec
from quire.formats.checkpoint import CheckpointSource
from quire.formats.families import BY_NAME, ModelFamily
from quire.models.parameters import layer_shapes


class FusedPart(Enum):
    """Which rows of a fused weight a stored tensor fills."""

    WHOLE = "whole"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    GATE = "gate"
    UP = "up"


class RowRange(NamedTuple):
    start: int
    stop: int


class WeightTarget(NamedTuple):
    """Where a stored tensor goes. Without a layer it is the embedding, the final norm or the head."""

    layer: int | None
    field: str
    part: FusedPart
    rows: RowRange
    shape: tuple[int, ...]  # what the stored tensor must have


Names = dict[str, tuple[str, FusedPart]]

QKV_PARTS = {"q": FusedPart.QUERY, "k": FusedPart.KEY, "v": FusedPart.VALUE}
GATE_UP_PARTS = {"gate": FusedPart.GATE, "up": FusedPart.UP}


def _with_bias(stored: str, field: str, part: FusedPart) -> Names:
    return {f"{stored}.weight": (field, part), f"{stored}.bias": (f"{field}_bias", part)}


def _fused_names(qkv: str, gate_up: str) -> Names:
    return _with_bias(qkv, "qkv", FusedPart.WHOLE) | _with_bias(gate_up, "gate_up", FusedPart.WHOLE)


def _split_names(qkv: str, gate_up: str) -> Names:
    names: Names = {}
    for letter, part in QKV_PARTS.items():
        names |= _with_bias(qkv.format(letter), "qkv", part)
    for word, part in GATE_UP_PARTS.items():
        names |= _with_bias(gate_up.format(word), "gate_up", part)
    return names


def _folder_names(family: ModelFamily) -> Names:
    names: Names = {
        "input_layernorm.weight": ("attention_norm", FusedPart.WHOLE),
        "self_attn.q_norm.weight": ("query_norm", FusedPart.WHOLE),
        "self_attn.k_norm.weight": ("key_norm", FusedPart.WHOLE),
        **_with_bias("self_attn.o_proj", "output", FusedPart.WHOLE),
        **_with_bias("mlp.down_proj", "down", FusedPart.WHOLE),
    }
    if family.gemma:
        names["post_attention_layernorm.weight"] = ("attention_post_norm", FusedPart.WHOLE)
        names["pre_feedforward_layernorm.weight"] = ("mlp_norm", FusedPart.WHOLE)
        names["post_feedforward_layernorm.weight"] = ("mlp_post_norm", FusedPart.WHOLE)
    else:
        names["post_attention_layernorm.weight"] = ("mlp_norm", FusedPart.WHOLE)
    if family.fused_projections:
        return names | _fused_names("self_attn.qkv_proj", "mlp.gate_up_proj")
    return names | _split_names("self_attn.{}_proj", "mlp.{}_proj")


def _gguf_names(family: ModelFamily) -> Names:
    names: Names = {
        "attn_norm.weight": ("attention_norm", FusedPart.WHOLE),
        "attn_q_norm.weight": ("query_norm", FusedPart.WHOLE),
        "attn_k_norm.weight": ("key_norm", FusedPart.WHOLE),
        "post_attention_norm.weight": ("attention_post_norm", FusedPart.WHOLE),
        "ffn_norm.weight": ("mlp_norm", FusedPart.WHOLE),
        "post_ffw_norm.weight": ("mlp_post_norm", FusedPart.WHOLE),
        **_with_bias("attn_output", "output", FusedPart.WHOLE),
        **_with_bias("ffn_down", "down", FusedPart.WHOLE),
    }
    if family.fused_projections:
        return names | _fused_names("attn_qkv", "ffn_up")
    return names | _split_names("attn_{}", "ffn_{}")


class _Scheme(NamedTuple):
    """Names of the tensors outside the layers, and the prefix of layer tensors, per format."""

    embedding: str
    final_norm: str
    head: str
    layer: str


SCHEMES = {
    CheckpointSource.FOLDER: _Scheme(
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers.{}."
    ),
    CheckpointSource.GGUF: _Scheme("token_embd.weight", "output_norm.weight", "output.weight", "blk.{}."),
}


def expected_tensors(spec: ModelSpec, source: CheckpointSource) -> dict[str, WeightTarget]:
    """Every tensor that a checkpoint of this model must have."""
    family = BY_NAME[spec.family]
    scheme = SCHEMES[source]
    names = _folder_names(family) if source is CheckpointSource.FOLDER else _gguf_names(family)
    table = RowRange(0, spec.vocab_size)
    matrix = (spec.vocab_size, spec.hidden_size)
    targets = {
        scheme.embedding: WeightTarget(None, "embedding", FusedPart.WHOLE, table, matrix),
        scheme.final_norm: WeightTarget(
            None, "final_norm", FusedPart.WHOLE, RowRange(0, spec.hidden_size), (spec.hidden_size,)
        ),
    }
    if not spec.tied_embeddings:
        targets[scheme.head] = WeightTarget(None, "head", FusedPart.WHOLE, table, matrix)
    shapes = layer_shapes(spec)
    for layer in range(spec.num_layers):
        prefix = scheme.layer.format(layer)
        for name, (field, part) in names.items():
            if field in shapes:
                rows = _rows(spec, part, shapes[field][0])
                shape = (rows.stop - rows.start, *shapes[field][1:])
                targets[prefix + name] = WeightTarget(layer, field, part, rows, shape)
    return targets


def is_ignorable(name: str, spec: ModelSpec, source: CheckpointSource) -> bool:
    """Tensors that may be present and that the model does not need: rope buffers, rope factors, the copy of a tied
    head, layers that only draft."""
    if spec.tied_embeddings and name == SCHEMES[source].head:
        return True
    if source is CheckpointSource.GGUF:
        return name in ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
    drafting = BY_NAME[spec.family].mtp_layers
    return name.endswith("rotary_emb.inv_freq") or bool(drafting and name.startswith(drafting))


def _rows(spec: ModelSpec, part: FusedPart, num_rows: int) -> RowRange:
    queries = spec.num_heads * spec.head_dim
    keys = spec.num_kv_heads * spec.head_dim
    ends = {
        FusedPart.WHOLE: RowRange(0, num_rows),
        FusedPart.QUERY: RowRange(0, queries),
        FusedPart.KEY: RowRange(queries, queries + keys),
        FusedPart.VALUE: RowRange(queries + keys, queries + 2 * keys),
        FusedPart.GATE: RowRange(0, spec.ffn_size),
        FusedPart.UP: RowRange(spec.ffn_size, 2 * spec.ffn_size),
    }
    return ends[part]

"""Opens a GGUF file as a model: its description from metadata and names, as llama.cpp understands them."""

import math
from pathlib import Path

import numpy as np

from quire.core.errors import BrokenModelFile, UnsupportedModel
from quire.core.model import ModelSpec, RopeKind, RopeSpec
from quire.formats.checkpoint import (
    MAX_LAYERS,
    Checkpoint,
    CheckpointSource,
    StoredTensor,
    check_geometry,
    possible_tokens,
)
from quire.formats.families import BY_GGUF, ModelFamily, WindowRule, unsupported
from quire.formats.gguf_file import GgufFile, read_gguf
from quire.formats.json_fields import JsonFields

ROPE_FACTORS = "rope_freqs.weight"
ROPE_FACTORS_SHORT = "rope_factors_short.weight"
ROPE_FACTORS_LONG = "rope_factors_long.weight"
LOCAL_THETA = 10_000.0  # Gemma 3's windowed layers, where the file sets none
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Their queries are scaled by hidden size / heads; llama.cpp too recognizes these two by their number of layers.
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def open_gguf(path: Path) -> Checkpoint:
    """Everything about the model in a GGUF file except its weights."""
    file = read_gguf(path)
    general = JsonFields(file.metadata, str(path))
    _refuse_parts(general)
    architecture = general.text("general.architecture")
    family = BY_GGUF.get(architecture)
    if family is None:
        raise unsupported(str(path), architecture, BY_GGUF)
    spec = _read_spec(file, family, JsonFields(file.metadata, str(path), prefix=f"{architecture}."))
    tokenizer = JsonFields(file.metadata, str(path), prefix="tokenizer.ggml.")
    ends = (token for key in END_KEYS for token in tokenizer.token_ids(key))
    return Checkpoint(
        source=CheckpointSource.GGUF,
        path=path,
        spec=spec,
        end_ids=possible_tokens(ends, spec.vocab_size),
        tensors=file.tensors,
        metadata=file.metadata,
    )


def _refuse_parts(general: JsonFields) -> None:
    """Files that hold something other than one whole model."""
    kind = general.text("general.type", "model")
    if kind != "model":
        raise UnsupportedModel(f"{general.source} holds no model but a GGUF {kind!r}, which quire does not read yet.")
    parts = general.integer("split.count", 1, low=0)
    if parts > 1:
        raise UnsupportedModel(
            f"{general.source} is one of {parts} parts of a split GGUF file. Join them with llama-gguf-split --merge."
        )


def _read_spec(file: GgufFile, family: ModelFamily, keys: JsonFields) -> ModelSpec:
    if keys.integer("expert_count", 0, low=0):
        raise UnsupportedModel(f"{keys.source} is a mixture of experts, which quire does not read yet.")
    num_layers = keys.integer("block_count", high=MAX_LAYERS)
    hidden_size = keys.integer("embedding_length")
    num_heads = _per_layer(keys, "attention.head_count", None)
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{keys.source} has keys and values of different widths, which quire does not read.")
    embedding = _tensor(file, "token_embd.weight")
    gemma2 = family.name == "gemma2"
    attention_scale = None
    if family.gemma:
        wide = GEMMA_27B_LAYERS[family.name] == num_layers
        attention_scale = 1.0 / math.sqrt(hidden_size / num_heads if wide else head_dim)
    spec = ModelSpec(
        family=family.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_per_layer(keys, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        ffn_size=_per_layer(keys, "feed_forward_length", None),
        vocab_size=embedding.shape[0],
        max_positions=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon", positive=True),
        rope=_rope(file, family, keys, head_dim),
        tied_embeddings="output.weight" not in file.tensors,
        activation="gelu_tanh" if family.gemma else "silu",
        qkv_bias=_layer_has(file, "attn_q.bias", "attn_qkv.bias"),
        output_bias=_layer_has(file, "attn_output.bias"),
        mlp_bias=_layer_has(file, "ffn_gate.bias", "ffn_up.bias"),
        qk_norm=family.qk_norm,
        sandwich_norms=family.gemma,
        embedding_scale=hidden_size**0.5 if family.gemma else 1.0,
        attention_scale=attention_scale,
        attention_softcap=keys.number("attn_logit_softcapping", 50.0) if gemma2 else 0.0,
        final_softcap=keys.number("final_logit_softcapping", 30.0 if gemma2 else 0.0) if family.gemma else 0.0,
        windows=_windows(keys, family, num_layers),
        local_rope=_local_rope(keys, head_dim) if family.local_rope else None,
    )
    return check_geometry(spec, keys.source)


def _tensor(file: GgufFile, name: str) -> StoredTensor:
    stored = file.tensors.get(name)
    if stored is None or len(stored.shape) > 2:
        raise BrokenModelFile(f"{file.path} has no usable tensor {name} among its {len(file.tensors)}.")
    return stored


def _layer_has(file: GgufFile, *names: str) -> bool:
    return any(f"blk.0.{name}" in file.tensors for name in names)


def _per_layer(keys: JsonFields, key: str, default: int | None) -> int:
    """A count that the format lets differ by layer; quire needs it the same in all."""
    value = keys.get(key)
    if not isinstance(value, list):
        return keys.integer(key, default)
    if len(set(value)) != 1:
        raise UnsupportedModel(f"{keys.source} has a {key} that differs by layer, which quire does not read.")
    return JsonFields({key: value[0]}, keys.source).integer(key)


def _windows(keys: JsonFields, family: ModelFamily, num_layers: int) -> tuple[int, ...]:
    periodic = family.windows is WindowRule.PERIODIC
    if not periodic and family.name not in ("llama", "phi3"):
        return ()
    window = keys.integer("attention.sliding_window", 4096 if family.name == "gemma2" else 0, low=0)
    if window == 0:
        return ()
    if not periodic:
        return (window,) * num_layers
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise BrokenModelFile(
                f"{keys.source} gives a window pattern of {len(pattern)} layers to a model of {num_layers}."
            )
        return tuple(window if slides else 0 for slides in pattern)
    period = keys.integer("attention.sliding_window_pattern", family.window_period)
    return tuple(window if (layer + 1) % period else 0 for layer in range(num_layers))


def _local_rope(keys: JsonFields, head_dim: int) -> RopeSpec:
    theta = keys.number("rope.freq_base_swa", LOCAL_THETA, positive=True)
    return RopeSpec(theta, keys.integer("rope.dimension_count_swa", head_dim))


def _rope(file: GgufFile, family: ModelFamily, keys: JsonFields, head_dim: int) -> RopeSpec:
    theta = keys.number("rope.freq_base", family.default_theta, positive=True)
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    kind = keys.text("rope.scaling.type", "linear")  # llama.cpp's default; with a factor of 1 it is none
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0, positive=True), positive=True)
    if ROPE_FACTORS in file.tensors:
        if kind != "none" and factor != 1.0:
            raise UnsupportedModel(f"{keys.source} has both rope factors and {kind} scaling; quire reads one of them.")
        factors = _read_floats(_tensor(file, ROPE_FACTORS))
        return RopeSpec(theta, rotary_dim, RopeKind.FACTORS, short_factors=factors)
    max_positions = keys.integer("context_length")
    original = keys.integer("rope.scaling.original_context_length", max_positions)
    if ROPE_FACTORS_SHORT in file.tensors or ROPE_FACTORS_LONG in file.tensors:
        return RopeSpec(
            theta,
            rotary_dim,
            RopeKind.LONGROPE,
            factor=max_positions / original,
            original_max_positions=original,
            attention_factor=keys.optional_number("rope.scaling.attn_factor"),
            short_factors=_read_floats(_tensor(file, ROPE_FACTORS_SHORT)),
            long_factors=_read_floats(_tensor(file, ROPE_FACTORS_LONG)),
        )
    if kind == "yarn":
        return _yarn(keys, theta, rotary_dim, factor, original)
    if kind == "none" or factor == 1.0:
        return RopeSpec(theta, rotary_dim)
    if kind == "linear":
        return RopeSpec(theta, rotary_dim, RopeKind.LINEAR, factor=factor)
    raise UnsupportedModel(
        f"{keys.source} asks for {kind!r} rope scaling without factors, which quire does not read. "
        f"It reads linear, yarn, longrope and llama3's."
    )


def _yarn(keys: JsonFields, theta: float, rotary_dim: int, factor: float, original: int) -> RopeSpec:
    extra = keys.number("rope.scaling.yarn_attn_factor", keys.number("rope.scaling.attn_factor", 1.0))
    return RopeSpec(
        theta,
        rotary_dim,
        RopeKind.YARN,
        factor=factor,
        original_max_positions=original,
        attention_factor=None if extra == 1.0 else extra * (1.0 + 0.1 * math.log(factor)),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0, positive=True),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0, positive=True),
    )


def _read_floats(stored: StoredTensor) -> tuple[float, ...]:
    if stored.encoding != "F32" or len(stored.shape) != 1:
        raise UnsupportedModel(
            f"Tensor {stored.name} in {stored.path} is {stored.encoding} of shape {stored.shape}; "
            f"rope factors must be one row of F32."
        )
    values = np.fromfile(stored.path, dtype="<f4", count=stored.shape[0], offset=stored.offset)
    if not np.isfinite(values).all():
        raise BrokenModelFile(f"Tensor {stored.name} in {stored.path} has values that are not finite.")
    return tuple(values.tolist())

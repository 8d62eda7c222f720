"""Turns a config.json into a `ModelSpec`. A missing required field is named in the error.

Reads rotary embeddings from config.json, in the old spelling (rope_theta, rope_scaling) and the new
(rope_parameters, for some families one per layer type). Meanings and precedence are those of transformers.
"""

from dataclasses import replace
from typing import NamedTuple

from quire.core.errors import BrokenModelFile, UnsupportedModel
from quire.core.model import ModelSpec, RopeKind, RopeSpec
from quire.formats.checkpoint import MAX_LAYERS, check_geometry
from quire.formats.families import BY_ARCHITECTURE, BY_MODEL_TYPE, BiasRule, ModelFamily, WindowRule, unsupported
from quire.formats.json_fields import JsonFields

PHI3_ORIGINAL_POSITIONS = 4096  # transformers' default where a Phi-3 config does not say
LOCAL_THETA = 10_000.0  # Gemma 3's windowed layers

KINDS = {
    "default": RopeKind.PLAIN,
    "linear": RopeKind.LINEAR,
    "llama3": RopeKind.LLAMA3,
    "yarn": RopeKind.YARN,
    "longrope": RopeKind.LONGROPE,
    "su": RopeKind.LONGROPE,  # its name in the first Phi-3 configs
}


class Ropes(NamedTuple):
    rope: RopeSpec
    local: RopeSpec | None


def read_ropes(config: JsonFields, family: ModelFamily, head_dim: int) -> Ropes:
    """The rope of a model, and that of its windowed layers where the family has another one."""
    scaling = config.mapping("rope_scaling") or config.mapping("rope_parameters")
    nested = scaling.has("full_attention") or scaling.has("sliding_attention")
    rope = _read_rope(scaling.mapping("full_attention") if nested else scaling, config, family, head_dim)
    if not family.local_rope:
        return Ropes(rope, None)
    local = scaling.mapping("sliding_attention") if nested else JsonFields({}, config.source)
    theta = local.number("rope_theta", config.number("rope_local_base_freq", LOCAL_THETA, positive=True), positive=True)
    return Ropes(rope, _scaled(local, config, family, theta, head_dim))


def _read_rope(scaling: JsonFields, config: JsonFields, family: ModelFamily, head_dim: int) -> RopeSpec:
    theta = scaling.number(
        "rope_theta", config.number("rope_theta", family.default_theta, positive=True), positive=True
    )
    return _scaled(scaling, config, family, theta, head_dim)


def _scaled(scaling: JsonFields, config: JsonFields, family: ModelFamily, theta: float, head_dim: int) -> RopeSpec:
    share = scaling.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if not 0.0 < share <= 1.0:
        raise BrokenModelFile(f"partial_rotary_factor in {config.source} must be above 0 and at most 1, not {share:g}.")
    rotary_dim = int(head_dim * share)
    kind = _kind(scaling, family)
    if kind is RopeKind.PLAIN:
        return RopeSpec(theta, rotary_dim)
    if kind is RopeKind.LINEAR:
        return RopeSpec(theta, rotary_dim, kind, factor=scaling.number("factor", positive=True))

    max_positions = config.integer("max_position_embeddings")
    original = PHI3_ORIGINAL_POSITIONS if family.name == "phi3" else max_positions
    for fields in (scaling, config):  # Phi-3 writes it outside, and that wins
        original = fields.integer("original_max_position_embeddings", original)
    scaled = RopeSpec(theta, rotary_dim, kind, original_max_positions=original)
    if kind is RopeKind.LLAMA3:
        return replace(
            scaled,
            factor=scaling.number("factor", positive=True),
            low_freq_factor=scaling.number("low_freq_factor", positive=True),
            high_freq_factor=scaling.number("high_freq_factor", positive=True),
        )
    factor = scaling.number("factor", max_positions / original, positive=True)
    scaled = replace(scaled, factor=factor, attention_factor=scaling.optional_number("attention_factor"))
    if kind is RopeKind.LONGROPE:
        factors = scaling.numbers("short_factor"), scaling.numbers("long_factor")
        return replace(scaled, short_factors=factors[0], long_factors=factors[1])
    return replace(
        scaled,
        beta_fast=scaling.number("beta_fast", 0.0) or 32.0,
        beta_slow=scaling.number("beta_slow", 0.0) or 1.0,
        truncate=scaling.flag("truncate", True),
        mscale=scaling.number("mscale", 0.0),
        mscale_all_dim=scaling.number("mscale_all_dim", 0.0),
    )


def _kind(scaling: JsonFields, family: ModelFamily) -> RopeKind:
    name = scaling.text("rope_type", scaling.text("type", "default"))
    if family.name == "phi3" and name == "yarn":
        name = "longrope"  # early Phi-3 configs say yarn and mean longrope
    kind = KINDS.get(name)
    if kind is None:
        raise UnsupportedModel(
            f"{scaling.source} asks for {name!r} rope scaling, which quire does not read. "
            f"It reads {', '.join(sorted(KINDS))}."
        )
    return kind


ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
QWEN_MAX_WINDOW_LAYERS = 28


def read_spec(config: JsonFields, family: ModelFamily | None = None) -> ModelSpec:
    """The description of the model, or a refusal that names the unsupported field. `family`: whatever it is named."""
    family = family or read_family(config)
    if config.flag("use_bidirectional_attention", False):
        raise UnsupportedModel(
            f"{config.source} asks for bidirectional attention; quire supports causal attention only."
        )
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", family.default_head_dim or hidden_size // num_heads)
    config_bias = family.bias is BiasRule.FROM_CONFIG and config.flag("attention_bias", False)
    ropes = read_ropes(config, family, head_dim)
    gemma2 = family.name == "gemma2"
    spec = ModelSpec(
        family=family.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        ffn_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps", family.default_norm_eps, positive=True),
        rope=ropes.rope,
        tied_embeddings=config.flag("tie_word_embeddings", family.tied_by_default),
        activation=_activation(config, family),
        qkv_bias=config_bias or family.bias is BiasRule.QKV,
        output_bias=config_bias,
        mlp_bias=family.name == "llama" and config.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        sandwich_norms=family.gemma,
        embedding_scale=hidden_size**0.5 if family.gemma else 1.0,
        attention_scale=config.number("query_pre_attn_scalar", 256.0, positive=True) ** -0.5 if family.gemma else None,
        attention_softcap=_softcap(config, "attn_logit_softcapping", 50.0) if gemma2 else 0.0,
        final_softcap=_softcap(config, "final_logit_softcapping", 30.0 if gemma2 else 0.0) if family.gemma else 0.0,
        windows=_windows(config, family, num_layers),
        local_rope=ropes.local,
    )
    return check_geometry(spec, config.source)


def read_family(config: JsonFields) -> ModelFamily:
    """The architecture decides; the model type only where no architecture is named."""
    architectures = config.texts("architectures") if config.has("architectures") else ()
    if architectures:
        name, known = architectures[0], BY_ARCHITECTURE
    else:
        name, known = config.text("model_type", ""), BY_MODEL_TYPE
    family = known.get(name)
    if family is None:
        remark = " (it requires remote code, which quire never runs)" if config.has("auto_map") else ""
        raise unsupported(config.source, name, known, remark)
    return family


def _activation(config: JsonFields, family: ModelFamily) -> str:
    if family.gemma:
        name = config.text("hidden_activation", "gelu_pytorch_tanh")
    else:
        name = config.text("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise UnsupportedModel(
            f"{config.source} asks for the activation {name!r}; quire has {', '.join(sorted(ACTIVATIONS))}."
        )
    return ACTIVATIONS[name]


def _softcap(config: JsonFields, key: str, default: float) -> float:
    """An explicit null switches a softcap off; only an absent key means the default."""
    return config.number(key, default if not config.mentions(key) else 0.0)


def _windows(config: JsonFields, family: ModelFamily, num_layers: int) -> tuple[int, ...]:
    if family.windows is WindowRule.NONE:
        return ()
    default = 0 if config.mentions("sliding_window") else family.default_window
    window = config.integer("sliding_window", default, low=0)
    if family.windows is WindowRule.UPPER_LAYERS and not config.flag("use_sliding_window", False):
        window = 0
    if window == 0:
        return ()
    windows = tuple(window if slides else 0 for slides in _sliding_layers(config, family, num_layers))
    return windows if any(windows) else ()


def _sliding_layers(config: JsonFields, family: ModelFamily, num_layers: int) -> list[bool]:
    if family.windows is WindowRule.EVERY_LAYER:
        return [True] * num_layers
    if config.has("layer_types"):
        return _layer_types(config, num_layers)
    if family.windows is WindowRule.UPPER_LAYERS:
        first = config.integer("max_window_layers", QWEN_MAX_WINDOW_LAYERS, low=0)
        return [layer >= first for layer in range(num_layers)]
    period = family.window_period
    if family.local_rope:  # only Gemma 3 lets its config choose the period
        period = config.integer("sliding_window_pattern", period)
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _layer_types(config: JsonFields, num_layers: int) -> list[bool]:
    types = config.texts("layer_types")
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    among = f", among them {', '.join(unknown)}" if unknown else ""
    if unknown or len(types) != num_layers:
        raise UnsupportedModel(
            f"layer_types in {config.source} must name {num_layers} layers, each full_attention or "
            f"sliding_attention; it names {len(types)}{among}."
        )
    return [kind == "sliding_attention" for kind in types]

"""Reads rotary embeddings from config.json, in the old spelling (rope_theta, rope_scaling) and the new
(rope_parameters, for some families one per layer type). Meanings and precedence are those of transformers.
"""

from typing import NamedTuple

from quire.core.errors import BrokenModelFile, UnsupportedModel
from quire.core.model import RopeKind, RopeSpec
from quire.formats.families import Family
from quire.formats.fields import Fields

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


def read_ropes(config: Fields, family: Family, head_dim: int) -> Ropes:
    """The rope of a model, and that of its windowed layers where the family has another one."""
    scaling = config.mapping("rope_scaling") or config.mapping("rope_parameters")
    nested = scaling.has("full_attention") or scaling.has("sliding_attention")
    rope = _read_rope(scaling.mapping("full_attention") if nested else scaling, config, family, head_dim)
    if not family.local_rope:
        return Ropes(rope, None)
    local = scaling.mapping("sliding_attention") if nested else Fields({}, config.source)
    theta = local.number("rope_theta", config.number("rope_local_base_freq", LOCAL_THETA, positive=True), positive=True)
    return Ropes(rope, _scaled(local, config, family, theta, head_dim))


def _read_rope(scaling: Fields, config: Fields, family: Family, head_dim: int) -> RopeSpec:
    theta = scaling.number(
        "rope_theta", config.number("rope_theta", family.default_theta, positive=True), positive=True
    )
    return _scaled(scaling, config, family, theta, head_dim)


def _scaled(scaling: Fields, config: Fields, family: Family, theta: float, head_dim: int) -> RopeSpec:
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
    original = _original_positions(scaling, config, family, max_positions)
    if kind is RopeKind.LLAMA3:
        return RopeSpec(
            theta,
            rotary_dim,
            kind,
            factor=scaling.number("factor", positive=True),
            original_max_positions=original,
            low_freq_factor=scaling.number("low_freq_factor", positive=True),
            high_freq_factor=scaling.number("high_freq_factor", positive=True),
        )
    factor = scaling.number("factor", max_positions / original, positive=True)
    attention_factor = scaling.optional_number("attention_factor")
    if kind is RopeKind.LONGROPE:
        return RopeSpec(
            theta,
            rotary_dim,
            kind,
            factor=factor,
            original_max_positions=original,
            attention_factor=attention_factor,
            short_factors=scaling.numbers("short_factor"),
            long_factors=scaling.numbers("long_factor"),
        )
    return RopeSpec(
        theta,
        rotary_dim,
        kind,
        factor=factor,
        original_max_positions=original,
        beta_fast=scaling.number("beta_fast", 0.0) or 32.0,
        beta_slow=scaling.number("beta_slow", 0.0) or 1.0,
        truncate=scaling.flag("truncate", True),
        attention_factor=attention_factor,
        mscale=scaling.number("mscale", 0.0),
        mscale_all_dim=scaling.number("mscale_all_dim", 0.0),
    )


def _kind(scaling: Fields, family: Family) -> RopeKind:
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


def _original_positions(scaling: Fields, config: Fields, family: Family, max_positions: int) -> int:
    default = PHI3_ORIGINAL_POSITIONS if family.name == "phi3" else max_positions
    inner = scaling.integer("original_max_position_embeddings", default)
    return config.integer("original_max_position_embeddings", inner)  # Phi-3 writes it outside, and that wins

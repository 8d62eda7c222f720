"""Refuses an impossible model spec before memory is allocated for it."""

from quire.core.errors import BrokenModelFile
from quire.core.model import ModelSpec, RopeKind, RopeSpec

MAX_LAYERS = 4096  # far above any model; keeps a damaged count from filling memory


def check_geometry(spec: ModelSpec, source: str) -> ModelSpec:
    """The spec, if its numbers are consistent."""
    if spec.vocab_size < 1:
        raise BrokenModelFile(f"{source} describes a model with an empty vocabulary.")
    if spec.max_positions < 2:
        raise BrokenModelFile(
            f"{source} describes a model for {spec.max_positions} positions; a prompt and its answer take 2 at least."
        )
    if spec.head_dim % 2:
        raise BrokenModelFile(f"{source} describes heads of {spec.head_dim} dimensions; the number must be even.")
    if spec.num_heads % spec.num_kv_heads:
        raise BrokenModelFile(
            f"{source} describes {spec.num_heads} attention heads over {spec.num_kv_heads} key/value heads, "
            f"which do not divide evenly."
        )
    for rope in (spec.rope, spec.local_rope):
        if rope is not None:
            _check_rope(rope, spec.head_dim, source)
    return spec


def _check_rope(rope: RopeSpec, head_dim: int, source: str) -> None:
    if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= head_dim:
        raise BrokenModelFile(
            f"{source} has rotary_dim {rope.rotary_dim} with head_dim {head_dim}; "
            f"it must be an even number from 2 to {head_dim}."
        )
    for factors in (rope.short_factors, rope.long_factors):
        if factors and (len(factors) != rope.rotary_dim // 2 or min(factors) <= 0):
            raise BrokenModelFile(
                f"{source} has {len(factors)} rope factors, the smallest {min(factors):g}; "
                f"{rope.rotary_dim // 2} above 0 are needed."
            )
    _check_scaling(rope, source)


def _check_scaling(rope: RopeSpec, source: str) -> None:
    """The divisors and logarithms of rope scalings."""
    if rope.kind is RopeKind.LLAMA3 and rope.high_freq_factor <= rope.low_freq_factor:
        raise BrokenModelFile(
            f"{source} has rope scaling from low_freq_factor {rope.low_freq_factor:g} to high_freq_factor "
            f"{rope.high_freq_factor:g}; the second must be the larger one."
        )
    if rope.kind is RopeKind.YARN and (min(rope.beta_fast, rope.beta_slow) <= 0 or rope.theta <= 1):
        raise BrokenModelFile(
            f"{source} has YaRN rope scaling with beta_fast {rope.beta_fast:g}, beta_slow {rope.beta_slow:g} and base "
            f"{rope.theta:g}; the first two must be above 0, the base above 1."
        )
    if rope.kind is RopeKind.LONGROPE and rope.original_max_positions < 2:
        raise BrokenModelFile(
            f"{source} has longrope scaling from {rope.original_max_positions} original positions; 2 are the least."
        )

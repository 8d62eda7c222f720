"""Refuses a description that no decoder can have, before anybody allocates for it."""

from quire.core.errors import BrokenModelFile
from quire.core.model import ModelSpec, RopeSpec

MAX_LAYERS = 4096  # far above any model; keeps a damaged count from filling memory


def check_geometry(spec: ModelSpec, source: str) -> ModelSpec:
    """Hands the description back if its numbers fit together."""
    if spec.vocab_size < 1:
        raise BrokenModelFile(f"{source} describes a model with an empty vocabulary.")
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
            f"{source} turns {rope.rotary_dim} dimensions of heads that have {head_dim}; "
            f"it must be an even number from 2 to {head_dim}."
        )
    for factors in (rope.short_factors, rope.long_factors):
        if factors and (len(factors) != rope.rotary_dim // 2 or min(factors) <= 0):
            raise BrokenModelFile(
                f"{source} has {len(factors)} rope factors, the least of them {min(factors):g}; "
                f"{rope.rotary_dim // 2} above 0 are needed."
            )

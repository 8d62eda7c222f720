"""Rotary embedding (RoPE): frequencies of every scaling, and the cos/sin table. Does not depend on a model.

Each scaling follows transformers' `modeling_rope_utils.py`, constant by constant and in float32.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.model import RopeKind, RopeSpec
from quire.kernels.interface import RopeColumns, Rotation


class Frequencies(NamedTuple):
    """Radians per position, [rotary_dim / 2] float32, and the factor on every cos and sin."""

    inverse: Tensor
    attention_factor: float


class RopeTable:
    """cos and sin of every position up to a length.

    LongRoPE has other factors for long sequences: a second table follows the first. The maximum length of a sequence
    selects its table once per sequence.
    """

    __slots__ = ("_cos", "_long_from", "_max_length", "_sin")

    def __init__(self, spec: RopeSpec, max_length: int, dtype: torch.dtype, device: torch.device) -> None:
        self._max_length = max_length
        self._long_from: int | None = None
        lengths = [max_length]
        if spec.kind is RopeKind.LONGROPE and max_length > spec.original_max_positions:
            self._long_from = spec.original_max_positions
            lengths = [spec.original_max_positions, max_length]
        tables = [_rotations(rope_frequencies(spec, length), max_length) for length in lengths]
        self._cos = torch.cat([cos for cos, _ in tables]).to(device, dtype)  # [tables * positions, 1, rotary_dim]
        self._sin = torch.cat([sin for _, sin in tables]).to(device, dtype)

    def at(self, positions: Tensor, max_lengths: Tensor) -> Rotation:
        """positions: [tokens] int64; max_lengths: [tokens] int64, the most tokens each one's sequence may hold."""
        if self._long_from is not None:
            positions = positions + self._max_length * (max_lengths > self._long_from)
        return Rotation(self._cos.index_select(0, positions), self._sin.index_select(0, positions))

    @property
    def columns(self) -> RopeColumns:
        return RopeColumns(self._cos, self._sin, self._max_length, self._long_from or 0)


def _rotations(frequencies: Frequencies, max_length: int) -> Rotation:
    """cos and sin of every position: [positions, 1, rotary_dim] float32."""
    angles = torch.outer(torch.arange(max_length, dtype=torch.float32), frequencies.inverse)
    cos, sin = angles.cos() * frequencies.attention_factor, angles.sin() * frequencies.attention_factor
    return Rotation(torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None])


def rope_frequencies(spec: RopeSpec, max_length: int) -> Frequencies:
    """The frequencies for sequences of up to `max_length` tokens."""
    plain = 1.0 / _wavelengths(spec)
    match spec.kind:
        case RopeKind.PLAIN:
            return Frequencies(plain, 1.0)
        case RopeKind.LINEAR:
            return Frequencies(plain / spec.factor, 1.0)
        case RopeKind.FACTORS:
            return Frequencies(plain / torch.tensor(spec.short_factors, dtype=torch.float32), 1.0)
        case RopeKind.LLAMA3:
            return Frequencies(_llama3(spec, plain), 1.0)
        case RopeKind.YARN:
            return Frequencies(_yarn(spec, plain), _yarn_attention_factor(spec))
        case RopeKind.LONGROPE:
            long = max_length > spec.original_max_positions
            factors = torch.tensor(spec.long_factors if long else spec.short_factors, dtype=torch.float32)
            return Frequencies(1.0 / (factors * _wavelengths(spec)), _longrope_attention_factor(spec))


def _wavelengths(spec: RopeSpec) -> Tensor:
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float() / spec.rotary_dim
    return spec.theta**exponents


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Low frequencies are scaled, high ones kept, those in between blended."""
    num_rotations = spec.original_max_positions / (2 * math.pi / plain)  # full rotations within the original length
    share = (num_rotations - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    share = share.clamp(0, 1)
    return (1 - share) * plain / spec.factor + share * plain


def _yarn(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Like llama3's, but blended linearly over dimensions and not over rotations."""
    low, high = _yarn_dimension(spec, spec.beta_fast), _yarn_dimension(spec, spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001  # as transformers does, against a division by zero
    ramp = ((torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / spec.factor * ramp + plain * (1 - ramp)


def _yarn_dimension(spec: RopeSpec, num_rotations: float) -> float:
    """The dimension that makes `num_rotations` full rotations within the original length."""
    wavelength = spec.original_max_positions / (num_rotations * 2 * math.pi)
    return spec.rotary_dim * math.log(wavelength) / (2 * math.log(spec.theta))


def _yarn_attention_factor(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return _mscale(spec.factor, spec.mscale) / _mscale(spec.factor, spec.mscale_all_dim)
    return _mscale(spec.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope_attention_factor(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_positions))

"""One uniform number per row, a pure function of (seed, sequence index, position). Keeps no state.

splitmix64 in int64 tensor arithmetic, which wraps the same way on every device: the same three integers give
the same number on any machine, in any batch, before and after a preemption.
"""

from torch import Tensor


def _signed(bits: int) -> int:
    """The int64 that has these 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits


# Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (2014); constants of the reference code.
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
_MANTISSA = 53  # bits that a float64 holds exactly


def uniform(
    seed: Tensor,  # [n] int64
    index: Tensor,  # [n] int64, which of its request's sequences
    position: Tensor,  # [n] int64, of the token to be drawn
) -> Tensor:  # [n] float64 in [0, 1)
    """For each (seed, index) the positions read off one splitmix64 stream."""
    stream = _mix(_mix(seed + _GOLDEN) + (index + 1) * _GOLDEN)
    bits = _mix(stream + (position + 1) * _GOLDEN)
    return _shift_right(bits, 64 - _MANTISSA).double() * 2.0**-_MANTISSA


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift_right(state, 30)) * _FIRST
    state = (state ^ _shift_right(state, 27)) * _SECOND
    return state ^ _shift_right(state, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """A logical shift: int64's own `>>` would drag the sign along."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)

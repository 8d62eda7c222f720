"""Per-token functions of the sampling kernels: sort key, weight, random number; and the columns of a `SamplingTable`.

The same formulas as `sampling.filters`, bit for bit: weights are integers, so their sums do not depend on tiles. On a
GPU the exponential is torch's own; the interpreter's may differ in the last bit, which moves a border between two
tokens by about 1e-7 of the row.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # without libdevice

ONE = tl.constexpr(2.0**40)  # the weight of the most likely token

# A key is the order of a logit, then of its id: order * 2**24 - id. Differences of two keys fit an int64.
ID_BITS = tl.constexpr(24)
LOWEST_KEY = tl.constexpr(-(2**63))
_ID_MASK = tl.constexpr(2**24 - 1)
_NAN_ORDER = tl.constexpr(0x7FFFFFFF)  # above all others: any NaN becomes the maximum
_INFINITE_ORDER = tl.constexpr(0x7F800000)
_MINUS_INFINITE_ORDER = tl.constexpr(-0x7F800001)

# splitmix64, as signed numbers: 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_SECOND = tl.constexpr(0x94D049BB133111EB - 2**64)
_UNIT = tl.constexpr(2.0**-53)


@triton.jit
def order_of(logits):
    """int32 in the order of the logits; -0.0 equals 0.0."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(logits != logits, _NAN_ORDER, order)


@triton.jit
def key_of(order, ids):
    """int64 in the order of the logits, all distinct: of equal logits the lowest id has the largest key."""
    return (order.to(tl.int64) << ID_BITS) - ids


@triton.jit
def id_of(key):
    return -key & _ID_MASK


@triton.jit
def logit_of(key):
    order = ((key + id_of(key)) >> ID_BITS).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_finite(key):
    """Of a row's largest key: whether the row has no NaN, no +inf, and at least one token."""
    order = (key + id_of(key)) >> ID_BITS
    return (order < _INFINITE_ORDER) & (order > _MINUS_INFINITE_ORDER)


@triton.jit
def exponents_of(logits, highest, temperature):
    """At most 0."""
    return tl.div_rn(logits - highest, temperature)


@triton.jit
def weights_of(exponents, least):
    """int64; those below `least` become 0."""
    if _INTERPRETED:
        shares = tl.exp(exponents)
    else:
        shares = libdevice.exp(exponents)
    weights = (shares * ONE).to(tl.int64)
    return tl.where(weights < least, 0, weights)


@triton.jit
def least_weight(min_p):
    """Minimum weight of the tokens that min-p keeps."""
    return tl.ceil(min_p * ONE).to(tl.int64)


@triton.jit
def uniform(seed, index, position):
    """float64 in [0, 1), a pure function of the three."""
    stream = _mix(_mix(seed + _GOLDEN) + (index + 1) * _GOLDEN)
    bits = _mix(stream + (position + 1) * _GOLDEN)
    return _shift_right(bits, 11).to(tl.float64) * _UNIT


@triton.jit
def _mix(state):
    state = (state ^ _shift_right(state, 30)) * _FIRST
    state = (state ^ _shift_right(state, 27)) * _SECOND
    return state ^ _shift_right(state, 31)


@triton.jit
def _shift_right(value, BITS: tl.constexpr):
    """A logical shift: int64's own is arithmetic."""
    return (value >> BITS) & ((1 << (64 - BITS)) - 1)


# Columns of SamplingTable.integers.
SEED, INDEX, TOP_K, IS_RANDOM, MIN_TOKENS, NUM_PROMPT = (tl.constexpr(column) for column in range(6))
# Columns of SamplingTable.floats.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(column) for column in range(6))

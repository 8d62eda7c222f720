"""Conversions of bfloat16 and float16 bits for numba, which supports neither type.

All in 32-bit registers: numba's own integers would be widened to 64 bits, which halves the numbers per vector.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic
from numpy.typing import NDArray

Words = NDArray[np.uint16] | NDArray[np.int16] | NDArray[np.float32]  # the bits of bfloat16, of float16; float32

# No "nnan" or "ninf": weights that are not finite must show in the logits.
OPTIONS = {
    "nogil": True,
    "cache": True,
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "nsz", "arcp", "afn"},
}

_WORD, _HALF, _FLOAT = ir.IntType(32), ir.IntType(16), ir.FloatType()  # type: ignore[no-untyped-call]
_FLOAT16 = ir.HalfType()  # type: ignore[no-untyped-call]

Generated = tuple[object, Callable[..., object]]


@intrinsic  # type: ignore[untyped-decorator]
def widen(typing_context: object, word: Any) -> Generated:
    """The float32 of a stored number: bfloat16 (unsigned) is float32 without its lower 16 bits."""

    def generate(context: object, builder: Any, signature: object, arguments: Any) -> object:
        if word == numba.types.float32:
            return arguments[0]
        if word == numba.types.int16:
            return builder.fpext(builder.bitcast(arguments[0], _FLOAT16), _FLOAT)
        return builder.bitcast(builder.shl(builder.zext(arguments[0], _WORD), _WORD(16)), _FLOAT)

    return numba.types.float32(word), generate


@intrinsic  # type: ignore[untyped-decorator]
def narrow(typing_context: object, number: object, like: Any) -> Generated:
    """A float32 as the type of `like`, rounded to nearest even."""

    def generate(context: object, builder: Any, signature: object, arguments: Any) -> object:
        if like == numba.types.float32:
            return arguments[0]
        if like == numba.types.int16:
            return builder.bitcast(builder.fptrunc(arguments[0], _FLOAT16), _HALF)
        bits = builder.bitcast(arguments[0], _WORD)
        odd = builder.and_(builder.lshr(bits, _WORD(16)), _WORD(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, _WORD(0x7FFF))), _WORD(16))
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        return builder.trunc(builder.select(is_nan, _WORD(0x7FC0), rounded), _HALF)

    return like(numba.types.float32, like), generate


@intrinsic  # type: ignore[untyped-decorator]
def power_of_two(typing_context: object, exponent: object) -> Generated:
    """2 to a whole float32 from -126 to 127: 1.5 * 2**23 + n has n in its lower bits, where exponents come from."""

    def generate(context: object, builder: Any, signature: object, arguments: Any) -> object:
        biased = builder.fadd(arguments[0], _FLOAT(1.5 * 2**23 + 127))
        return builder.bitcast(builder.shl(builder.bitcast(biased, _WORD), _WORD(23)), _FLOAT)

    return numba.types.float32(numba.types.float32), generate

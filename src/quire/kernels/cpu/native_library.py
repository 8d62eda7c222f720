"""The native CPU kernels as Python sees them: structures and functions of `native/api.cpp`, through ctypes.

A call releases the interpreter's lock. Memory belongs to the caller, who keeps it alive.
"""

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path

from quire.core.errors import ConfigError
from quire.kernels.cpu.native_build import (
    CompilationFailed,
    UnknownVariant,
    Variant,
    cache_folder,
    compile_variant,
    cpu_flags,
    find_library,
    known_variants,
    usable_variants,
    why_none_usable,
)


class PackedFormat(IntEnum):
    """How a packed weight lies in memory (`native/packed_formats.h`)."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    INT8 = 3
    INT4 = 4
    INT4_MINIMUM = 5
    INT4_NON_LINEAR = 6
    INT5 = 7
    INT5_MINIMUM = 8
    INT6 = 9
    INT4_HALVES = 10

    @property
    def quantized(self) -> bool:
        return self >= PackedFormat.INT8


class StoredEncoding(IntEnum):
    """What `pack` reads (`native/pack.h`); the last two quantize rows of float32."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q4_0 = 3
    Q4_1 = 4
    Q5_0 = 5
    Q5_1 = 6
    Q8_0 = 7
    Q4_K = 8
    Q5_K = 9
    Q6_K = 10
    IQ4_NL = 11
    IQ4_XS = 12
    Q3_K = 13
    TO_INT8 = 14
    TO_INT4 = 15


FORMAT_OF = {
    StoredEncoding.F32: PackedFormat.FLOAT32,
    StoredEncoding.F16: PackedFormat.FLOAT16,
    StoredEncoding.BF16: PackedFormat.BFLOAT16,
    StoredEncoding.Q4_0: PackedFormat.INT4,
    StoredEncoding.Q4_1: PackedFormat.INT4_MINIMUM,
    StoredEncoding.Q5_0: PackedFormat.INT5,
    StoredEncoding.Q5_1: PackedFormat.INT5_MINIMUM,
    StoredEncoding.Q8_0: PackedFormat.INT8,
    StoredEncoding.Q4_K: PackedFormat.INT4_MINIMUM,
    StoredEncoding.Q5_K: PackedFormat.INT5_MINIMUM,
    StoredEncoding.Q6_K: PackedFormat.INT6,
    StoredEncoding.IQ4_NL: PackedFormat.INT4_NON_LINEAR,
    StoredEncoding.IQ4_XS: PackedFormat.INT4_NON_LINEAR,
    StoredEncoding.Q3_K: PackedFormat.INT4_HALVES,
    StoredEncoding.TO_INT8: PackedFormat.INT8,
    StoredEncoding.TO_INT4: PackedFormat.INT4_MINIMUM,
}


STORED_ENCODINGS = frozenset(each.name for each in StoredEncoding if not each.name.startswith("TO_"))


class NativeSegment(Structure):
    """Some output rows of a matrix, in one format."""

    _fields_ = (
        ("format", c_int32),
        ("first_row", c_int32),
        ("num_rows", c_int32),
        ("reserved", c_int32),
        ("data", c_void_p),
    )


class NativeLinear(Structure):
    """A packed matrix and its bias."""

    _fields_ = (
        ("width_in", c_int32),
        ("width_out", c_int32),
        ("num_segments", c_int32),
        ("quantized", c_int32),
        ("segments", POINTER(NativeSegment)),
        ("bias", c_void_p),
    )


class NativeHeads(Structure):
    """Attention heads and the scale of scores."""

    _fields_ = (
        ("queries", c_int32),
        ("keys", c_int32),
        ("dim", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
    )


class NativeLayer(Structure):
    """One layer of a decoder. A null pointer: the layer has none."""

    _fields_ = (
        ("qkv", NativeLinear),
        ("output", NativeLinear),
        ("gate_up", NativeLinear),
        ("down", NativeLinear),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("attention_post_norm", c_void_p),
        ("mlp_post_norm", c_void_p),
        ("head_norm", c_void_p),
        ("window", c_int32),
        ("rope", c_int32),
    )


class NativeModel(Structure):
    """All layers of a decoder."""

    _fields_ = (
        ("heads", NativeHeads),
        ("hidden", c_int32),
        ("ffn", c_int32),
        ("num_layers", c_int32),
        ("activation", c_int32),
        ("epsilon", c_float),
        ("head_epsilon", c_float),
        ("layers", POINTER(NativeLayer)),
        ("final_norm", c_void_p),
    )


class NativeStep(Structure):
    """One step: see `StepLayout`. Strides are in numbers."""

    _fields_ = (
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("slots", c_void_p),
        ("tables", c_void_p),
        ("table_width", c_int64),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("cos", c_void_p * 2),
        ("sin", c_void_p * 2),
        ("rotary", c_int32 * 2),
        ("kv", c_void_p),
        ("layer_stride", c_int64),
        ("block_stride", c_int64),
        ("value_stride", c_int64),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("kv_format", c_int32),
        ("block_size", c_int32),
        ("selected", c_void_p),
        ("num_selected", c_int32),
        ("num_captured", c_int32),
        ("captured_layers", c_int32 * 4),
        ("captured", c_void_p),
    )


class NativeRopeTable(Structure):
    """cos and sin of every position."""

    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("num_positions", c_int64),
        ("long_from", c_int64),
        ("rotary", c_int32),
        ("reserved", c_int32),
    )


class NativeRowColumns(Structure):
    """The columns of `RowColumns`, `EndColumns` and `RowState`."""

    _fields_ = (
        ("tables", c_void_p),
        ("table_width", c_int64),
        ("max_lengths", c_void_p),
        ("end_ids", c_void_p),
        ("end_lengths", c_void_p),
        ("num_end_ids", c_int64),
        ("end_length_stride", c_int64),
        ("last_tokens", c_void_p),
        ("lengths", c_void_p),
        ("alive", c_void_p),
    )


class NativeTables(Structure):
    """What a decoder has beside its layers."""

    _fields_ = (
        ("embedding", POINTER(NativeLinear)),
        ("head", POINTER(NativeLinear)),
        ("ropes", NativeRopeTable * 2),
        ("num_ropes", c_int32),
        ("vocab", c_int32),
        ("embedding_scale", c_float),
        ("softcap", c_float),
    )


class NativeDecodeCall(Structure):
    """A step of rows that decode. outcome, tokens: only of steps that are greedy and without drafts."""

    _fields_ = (
        ("workspace", c_void_p),
        ("model", POINTER(NativeModel)),
        ("tables", POINTER(NativeTables)),
        ("columns", POINTER(NativeRowColumns)),
        ("step", POINTER(NativeStep)),
        ("rows", c_void_p),
        ("count", c_int64),
        ("outcome", c_void_p),
        ("tokens", c_void_p),
    )


class NativeSamplingColumns(Structure):
    """The columns of `SamplingTable`."""

    _fields_ = (
        ("integers", c_void_p),
        ("floats", c_void_p),
        ("integers_stride", c_int64),
        ("floats_stride", c_int64),
    )


class NativeProfile(Structure):
    """Nanoseconds by kind of work."""

    _fields_ = (("linear", c_int64), ("attention", c_int64), ("other", c_int64))


_FUNCTIONS = {
    "quire_open": (c_void_p, (c_int32, c_int32)),
    "quire_uses_matrix_unit": (c_int32, (c_void_p,)),
    "quire_close": (None, (c_void_p,)),
    "quire_set_threads": (None, (c_void_p, c_int32)),
    "quire_active_threads": (c_int32, (c_void_p,)),
    "quire_panel_bytes": (c_int64, (c_int32, c_int32)),
    "quire_pack": (
        None,
        (c_void_p, c_int32, c_int32, c_void_p, c_int64, c_void_p, c_int32, c_int32, c_void_p),
    ),
    "quire_embed": (None, (POINTER(NativeLinear), c_void_p, c_int32, c_float, c_void_p)),
    "quire_linear": (None, (c_void_p, POINTER(NativeLinear), c_void_p, c_int64, c_void_p)),
    "quire_attend": (
        None,
        (c_void_p, POINTER(NativeHeads), POINTER(NativeStep), c_int32, c_void_p, c_int64, c_void_p),
    ),
    "quire_rotate_and_write": (
        None,
        (c_void_p, POINTER(NativeHeads), POINTER(NativeStep), c_void_p, c_float, c_void_p),
    ),
    "quire_norm": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_int32, c_float, c_void_p, c_void_p)),
    "quire_gate": (None, (c_void_p, c_void_p, c_int64, c_int32, c_int32, c_void_p)),
    "quire_forward": (None, (c_void_p, POINTER(NativeModel), POINTER(NativeStep), c_void_p, c_void_p)),
    "quire_decode_greedy": (c_int32, (c_void_p,)),  # the address of a NativeDecodeCall, for speed
    "quire_decode_logits": (None, (POINTER(NativeDecodeCall), c_void_p)),
    "quire_verify": (None, (POINTER(NativeDecodeCall), c_void_p, c_void_p, c_void_p, c_void_p)),
    "quire_draw": (
        None,
        (
            *(c_void_p, c_void_p, c_void_p, c_void_p, c_int32, c_int32),
            *(c_void_p, c_void_p, POINTER(NativeSamplingColumns), c_void_p),
        ),
    ),
    "quire_profile": (None, (c_void_p, POINTER(NativeProfile))),
}


class NativeLibrary:
    """A loaded library, and the name of its variant."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.functions = ctypes.CDLL(str(path))
        for function, (result, arguments) in _FUNCTIONS.items():
            each = getattr(self.functions, function)
            each.restype, each.argtypes = result, arguments


@cache
def load_native() -> NativeLibrary | None:
    """The best library for this CPU, compiled now if it must be. None: `why_not_native` says why."""
    for variant in _usable():
        try:
            return NativeLibrary(variant.name, find_library(variant) or compile_variant(variant, cache_folder()))
        except (CompilationFailed, OSError) as error:  # an older compiler may know the next variant
            _failures[variant.name] = str(error)
    return None


def must_compile() -> bool:
    """Whether `load_native` would start the compiler, which takes some seconds."""
    variants = _usable()
    return bool(variants) and find_library(variants[0]) is None


def why_not_native() -> str:
    """Why there is no library; after `load_native` returned None."""
    return next((f"{name}: {error}" for name, error in _failures.items()), "") or why_none_usable()


def faster_variants(name: str) -> tuple[str, ...]:
    """Variants that are faster than the loaded one, each with the reason why it is not used."""
    reasons, flags = [], cpu_flags()
    for variant in known_variants():
        if variant.name == name:
            break
        missing = ", ".join(sorted(variant.features - flags))
        failed = _failures.get(variant.name, "the environment chose another")
        reasons.append(f"{variant.name}: {f'this CPU lacks {missing}' if missing else failed}")
    return tuple(reasons)


def _usable() -> tuple[Variant, ...]:
    try:
        return usable_variants()
    except UnknownVariant as error:
        raise ConfigError(str(error)) from error


_failures: dict[str, str] = {}  # by variant: why it could not be compiled or loaded

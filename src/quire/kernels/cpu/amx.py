"""AMX intrinsics (the matrix unit of newer x86 CPUs) for numba: eight tiles of 16 rows of 64 bytes.

The tile number is part of an instruction, so tiles are named by literals. Does not depend on matrices.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic
from numpy.typing import NDArray

TILE_ROWS = 16
TILE_BYTES = 64  # in each row

_BYTE, _LONG = ir.IntType(8), ir.IntType(64)  # type: ignore[no-untyped-call]
_POINTER = _BYTE.as_pointer()  # type: ignore[no-untyped-call]

Generated = tuple[object, Callable[..., object]]


def has_amx() -> bool:
    """Whether this CPU has AMX for bfloat16. The process must also have requested it from the kernel."""
    return bool(llvmlite.binding.get_host_cpu_features().get("amx-bf16", False))  # type: ignore[no-untyped-call]


def shapes(rows: int) -> NDArray[np.uint8]:
    """The configuration of `configure`: tiles 0 to 3 have `rows` rows, the others 16."""
    configuration = np.zeros(64, np.uint8)
    configuration[0] = 1
    configuration[16:32].view(np.uint16)[:] = TILE_BYTES
    configuration[48:56] = [rows] * 4 + [TILE_ROWS] * 4
    return configuration


def _emit(builder: Any, name: str, arguments: list[Any]) -> None:
    instruction = builder.module.globals.get(name)
    if instruction is None:
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])  # type: ignore[no-untyped-call]
        instruction = ir.Function(builder.module, kind, name)  # type: ignore[no-untyped-call]
    builder.call(instruction, arguments)


def _address(context: Any, builder: Any, kind: object, array: object, offset: object) -> object:
    """Address of a byte offset into the array."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.inttoptr(builder.add(builder.ptrtoint(data, _LONG), offset), _POINTER)


def _number(tile: Any) -> Any:
    if not isinstance(tile, numba.types.IntegerLiteral):
        raise RequireLiteralValue("a tile number must be a literal")
    return _BYTE(tile.literal_value)


@intrinsic  # type: ignore[untyped-decorator]
def configure(typing_context: object, configuration: object) -> Generated:
    """Set the tile shapes of this thread; their contents are lost."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> object:
        address = _address(context, builder, signature.args[0], arguments[0], _LONG(0))
        _emit(builder, "llvm.x86.ldtilecfg", [address])
        return context.get_dummy_value()

    return numba.types.void(configuration), generate


@intrinsic  # type: ignore[untyped-decorator]
def release(typing_context: object) -> Generated:
    """Release the tiles of this thread, so that context switches need not save them."""

    def generate(context: Any, builder: Any, signature: object, arguments: object) -> object:
        _emit(builder, "llvm.x86.tilerelease", [])
        return context.get_dummy_value()

    return numba.types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def clear(typing_context: object, tile: object) -> Generated:
    """Zeros."""
    number = _number(tile)

    def generate(context: Any, builder: Any, signature: object, arguments: object) -> object:
        _emit(builder, "llvm.x86.tilezero", [number])
        return context.get_dummy_value()

    return numba.types.void(tile), generate


def _between_memory(instruction: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def move(typing_context: object, tile: object, array: object, offset: object, stride: object) -> Generated:
        number = _number(tile)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> object:
            address = _address(context, builder, signature.args[1], arguments[1], arguments[2])
            _emit(builder, instruction, [number, address, arguments[3]])
            return context.get_dummy_value()

        return numba.types.void(tile, array, numba.types.int64, numba.types.int64), generate

    return move


# (tile, array, offset, stride): rows are `stride` bytes apart, the first at byte `offset` of the array.
load = _between_memory("llvm.x86.tileloadd64")
store = _between_memory("llvm.x86.tilestored64")


@intrinsic  # type: ignore[untyped-decorator]
def multiply_add(typing_context: object, total: object, left: object, right: object) -> Generated:
    """total += left @ right: 16 x 16 float32, 16 x 32 bfloat16, and 32 x 16 with its rows in pairs."""
    numbers = [_number(tile) for tile in (total, left, right)]

    def generate(context: Any, builder: Any, signature: object, arguments: object) -> object:
        _emit(builder, "llvm.x86.tdpbf16ps", numbers)
        return context.get_dummy_value()

    return numba.types.void(total, left, right), generate

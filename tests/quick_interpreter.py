"""Triton's interpreter without what it computes anew for each operation: half of the time of an interpreted kernel.

What it replaces is as this version of Triton has it; of another one it replaces nothing.
"""

import functools
import importlib
import sys
from dataclasses import replace
from typing import Any

import pytest

INTERPRETER = "triton.runtime.interpreter"


def quicken(patch: pytest.MonkeyPatch) -> None:
    """It computes for each sum and product of integers whether it overflows, in a dozen operations, and drops the
    result, as its option `debug` is off; and for each tensor its shape and its type of numpy: there are few."""
    if INTERPRETER not in sys.modules:
        return
    interpreter = importlib.import_module(INTERPRETER)
    options = interpreter.interpreter_builder.options
    assert not options.debug, "overflows are asserted"
    patch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
    core = importlib.import_module("triton.language.core")
    if all(hasattr(core, name) for name in ("block_type", "_unwrap_shape", "tuple", "constexpr")):
        patch.setattr(core.block_type, "__init__", _init_of_block_type(core))
        patch.setattr(core.tensor, "__init__", _init_of_tensor(core))
    if hasattr(interpreter, "_get_np_dtype"):
        patch.setattr(interpreter, "_get_np_dtype", _by_name(interpreter._get_np_dtype))


def _by_name(find: Any) -> Any:
    """A function of a type, found by the name of the type, which says all of it."""
    found: dict[str, object] = {}

    def quick(dtype: Any) -> object:
        name = dtype.name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    return quick


def _init_of_block_type(core: Any) -> Any:
    made: dict[tuple[object, ...], dict[str, object]] = {}
    init = core.block_type.__init__

    def quick(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if isinstance(shape, core.tuple) else shape
        key = (element_ty.name, *(size.value if isinstance(size, core.constexpr) else size for size in sizes))
        attributes = made.get(key)
        if attributes is None:
            init(self, element_ty, shape)
            made[key] = dict(vars(self))
        else:
            vars(self).update(attributes)

    return quick


def _init_of_tensor(core: Any) -> Any:
    init = core.tensor.__init__

    @functools.cache
    def shape_of(*sizes: int) -> tuple[Any, Any]:
        constants = [core.constexpr(size) for size in sizes]
        numel = functools.reduce(lambda product, size: product * size, sizes, 1)
        return core.tuple(constants), core.constexpr(numel)

    def quick(self: Any, handle: object, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(*(type.shape.values if type.is_block() else ()))

    return quick if init.__code__.co_varnames[:3] == ("self", "handle", "type") else init

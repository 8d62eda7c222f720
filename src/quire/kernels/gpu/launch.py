"""The one door to the card: every launch of a Triton kernel goes through it. Knows nothing of what kernels do.

In a rehearsal what would be launched is compiled and not launched. Whoever goes through a step there has all of its
kernels compiled, and keeps no list of them.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import KernelInterface
from triton.tools.tensor_descriptor import TensorDescriptor

_FIRST_TO_OVERLAP = (9, 0)  # compute capability of Hopper
_ALIGNMENT = 16  # bytes: Triton compiles for tensors that begin at a multiple of it, and for others


class _Rehearsal(NamedTuple):
    """What was launched in it."""

    variants: set[Hashable]  # as Triton tells launches apart, or finer
    kernels: set[KernelInterface[object]]


# The one that this thread is in.
_rehearsal: ContextVar[_Rehearsal | None] = ContextVar("quire_rehearsal", default=None)


@contextmanager
def rehearsal(kernels: set[KernelInterface[object]] | None = None) -> Iterator[None]:
    """In this thread nothing is launched meanwhile: tensors that kernels would fill hold anything. The kernels that
    would have been launched are put into the set."""
    token = _rehearsal.set(_Rehearsal(set(), set() if kernels is None else kernels))
    try:
        yield
    finally:
        _rehearsal.reset(token)


def launch(kernel: KernelInterface[object], grid: tuple[int, ...], *args: object, **constants: object) -> None:
    rehearsed = _rehearsal.get()
    if rehearsed is None:
        kernel[grid](*args, **constants)
        return
    variant = (id(kernel), *map(_kind, args), *constants.items())
    if variant not in rehearsed.variants:  # most are of layers before: asking Triton takes a millisecond
        rehearsed.variants.add(variant)
        rehearsed.kernels.add(kernel)
        kernel.warmup(*args, grid=grid, **constants)


def launch_early(kernel: KernelInterface[object], grid: tuple[int, ...], *args: object, **constants: object) -> None:
    """A kernel that may begin while the one before it ends: see `overlap`."""
    if _can_begin_early():
        launch(kernel, grid, *args, **constants, EARLY=True, launch_pdl=True)
    else:
        launch(kernel, grid, *args, **constants, EARLY=False)


@cache
def _can_begin_early() -> bool:
    on_card = torch.cuda.is_available() and not knobs.runtime.interpret
    return on_card and torch.cuda.get_device_capability() >= _FIRST_TO_OVERLAP


def to_be_filled(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a kernel will fill that others find their way by: in a rehearsal, zeros."""
    make = torch.empty if _rehearsal.get() is None else torch.zeros
    return make(size, dtype=dtype, device=device)


def _kind(arg: object) -> Hashable:
    """All that a compilation can depend on."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % _ALIGNMENT == 0
    if isinstance(arg, TensorDescriptor):
        return arg.base.dtype, tuple(arg.block_shape)
    assert arg is None or isinstance(arg, int | float), arg
    return type(arg), arg  # 1, 1.0 and True are equal

"""The one door to the card: every launch of a Triton kernel goes through it. Knows nothing of what kernels do.

Triton looks at every argument of every launch to find the kernel that was compiled for such: some 40 µs. A launch like
an earlier one, which is most of them (another layer of the same step), goes straight to the kernel of that one.

In a rehearsal what would be launched is compiled and not launched. Whoever goes through a step there has all of its
kernels compiled, and keeps no list of them.

Kernels that begin while the one before them ends, which hides most of a launch. Compiled into those of every layer.

A card from Hopper on begins such a kernel (`launch_early`) as soon as all programs of the one before have ended or come
past `wait_for_others`. Before it a kernel may read what nobody writes, such as weights, or what the one before it has
waited for, and must write nothing. Every program that writes comes past it, and of every launch one does: so whoever
waited for one kernel has waited for all before it. Knows nothing of what kernels do.

A kernel may let the next begin before its own wait (`let_next_begin`). All of its programs still wait, so it is done
after those before it, and the next, which waits until it is done, sees what all of them wrote.

Sizes of grids and tiles, reckoned on the host. Triton's own are made for kernels: they take it ten times as long.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple, Protocol, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.language.extra import cuda
from triton.runtime import KernelInterface, driver

_FIRST_TO_OVERLAP = 90  # compute capability of Hopper
_MOST_FOUND = 10_000  # kinds of launches that are remembered
_NO_ROOM = "out of memory"  # in what Triton says
# A product and a sum are one instruction, unless a kernel says otherwise. Said here: Triton's default ends with 3.10.
_FUSED = {"enable_fp_fusion": True}
_ALIGNMENT = 16  # bytes: Triton compiles for tensors that begin at a multiple of it, and for others


class _Descriptor(Protocol):
    """A tensor for the copy engine, as Triton describes it or as Gluon does, which wants to be told how a block lies in
    shared memory: that follows from dtype and shape."""

    base: Tensor
    block_shape: list[int]


class _DryRun(NamedTuple):
    """What was launched in it."""

    variants: set[Hashable]  # as Triton tells launches apart, or finer
    kernels: set[KernelInterface[object]]


# The one that this thread is in.
_rehearsal: ContextVar[_DryRun | None] = ContextVar("quire_rehearsal", default=None)


@contextmanager
def dry_run_launches(kernels: set[KernelInterface[object]] | None = None) -> Iterator[None]:
    """In this thread nothing is launched meanwhile: tensors that kernels would fill hold anything. The kernels that
    would have been launched are put into the set."""
    token = _rehearsal.set(_DryRun(set(), set() if kernels is None else kernels))
    try:
        yield
    finally:
        _rehearsal.reset(token)


class _FoundKernel(NamedTuple):
    """A compiled kernel, and its constants in the order of its parameters."""

    compiled: CompiledKernel
    constants: tuple[object, ...]


_found: dict[Hashable, _FoundKernel] = {}


def launch(kernel: KernelInterface[object], grid: tuple[int, ...], *args: object, **constants: object) -> None:
    rehearsed = _rehearsal.get()
    if rehearsed is not None:
        _dry_run(rehearsed, kernel, grid, args, constants)
        return
    # A kernel is launched from one place: an argument is always of one type, and constants come in one order.
    like = (
        id(kernel),
        _current_device(),
        *[arg if type(arg) is int else _alike(arg) for arg in args],
        *constants.values(),
    )
    found = _found.get(like)
    if found is not None:
        found.compiled[(*grid, 1, 1)[:3]](*args, *found.constants)
        return
    try:
        compiled = kernel[grid](*args, **_FUSED | constants)
    except RuntimeError as error:
        if _NO_ROOM not in str(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error  # for the kernel's own code: what a full card means to all
    if isinstance(compiled, CompiledKernel):  # the interpreter has none
        if len(_found) >= _MOST_FOUND:
            _found.clear()
        _found[like] = _FoundKernel(compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :]))


def _current_device() -> int:
    """Where Triton launches: a compiled kernel is loaded on one device. -1 where there is none."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else -1


def _alike(arg: object) -> Hashable:
    """All of an argument that a compilation can depend on, and more of numbers."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % _ALIGNMENT == 0
    if arg is None or isinstance(arg, int | float):
        return arg
    described = cast(_Descriptor, arg)  # asking whether it is one takes ten times as long as all else here
    return described.base.dtype, tuple(described.block_shape)


def _dry_run(
    rehearsed: _DryRun,
    kernel: KernelInterface[object],
    grid: tuple[int, ...],
    args: tuple[object, ...],
    constants: dict[str, object],
) -> None:
    variant = (id(kernel), *map(_alike, args), *constants.items())
    if variant not in rehearsed.variants:  # most are of layers before: asking Triton takes a millisecond
        rehearsed.variants.add(variant)
        rehearsed.kernels.add(kernel)
        kernel.warmup(*args, grid=grid, **_FUSED | constants)


def launch_early(kernel: KernelInterface[object], grid: tuple[int, ...], *args: object, **constants: object) -> None:
    """A kernel that may begin while the one before it ends: see `overlap`."""
    if can_begin_early():
        launch(kernel, grid, *args, **constants, EARLY=True, launch_pdl=True)
    else:
        launch(kernel, grid, *args, **constants, EARLY=False)


@cache
def can_begin_early() -> bool:
    """On the card that kernels are compiled for."""
    if knobs.runtime.interpret:
        return False
    target = driver.active.get_current_target()
    return target.backend == "cuda" and int(target.arch) >= _FIRST_TO_OVERLAP


def to_be_filled(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a kernel will fill that others find their way by: in a rehearsal, zeros."""
    make = torch.empty if _rehearsal.get() is None else torch.zeros
    return make(size, dtype=dtype, device=device)


@triton.jit
def wait_for_others(EARLY: tl.constexpr):
    """Until all that was launched before is done and can be seen. Then the next may begin."""
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """As soon as all programs have begun, if there is room beside them. Whoever says so must still wait for others."""
    if EARLY:
        cuda.gdc_launch_dependents()


def cdiv(number: int, divisor: int) -> int:
    """How many of the divisor hold the number."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The least that is not less; 1 for 0."""
    return 1 << (number - 1).bit_length() if number > 0 else 1

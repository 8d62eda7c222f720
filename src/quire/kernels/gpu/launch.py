"""Triton launches: launch cache, dry runs, programmatic dependent launch (PDL), grid sizes.

Every launch goes through here. Does not depend on what kernels compute.

Launch cache: Triton inspects every argument of every launch to find the compiled kernel, which takes some 40 µs. A
launch with the signature of an earlier one (most of them: another layer of the same step) goes straight to its kernel.

Dry run: kernels are compiled instead of launched. A dry run of a step compiles all of its kernels without a list of
them.

PDL: from Hopper on, a kernel launched by `launch_with_pdl` starts as soon as all programs of the kernel before it have
ended or passed `pdl_wait`, which hides most of the launch latency. Before `pdl_wait` a kernel may read only what no
running kernel writes, such as weights, or what the kernel before it has waited for, and must write nothing. Every
program that writes passes `pdl_wait`, and at least one of every launch does: so waiting for one kernel waits for all
before it. A kernel may call `pdl_launch_dependents` before its own wait. All of its programs still wait, so it
completes after those before it, and the next kernel, which waits for it, sees all their writes.

Grid sizes are computed by `cdiv` and `next_power_of_2`: Triton's own are jit functions, on the host ten times slower.
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

_FIRST_WITH_PDL = 90  # compute capability of Hopper
_MAX_CACHED = 10_000  # signatures in the cache
_OUT_OF_MEMORY = "out of memory"  # in Triton's error
# Fused multiply-add, unless a kernel turns it off. Explicit here: Triton's default changes with 3.10.
_FP_FUSION = {"enable_fp_fusion": True}
_ALIGNMENT = 16  # Triton compiles one variant for pointers and integers that are multiples of it, one for others


class _Descriptor(Protocol):
    """A TMA descriptor of Triton or of Gluon. Gluon's has a shared-memory layout too, which follows from dtype and
    shape."""

    base: Tensor
    block_shape: list[int]


class _DryRun(NamedTuple):
    """Launches seen in a dry run."""

    variants: set[Hashable]
    kernels: set[KernelInterface[object]]


# The dry run of this thread, if any.
_current_dry_run: ContextVar[_DryRun | None] = ContextVar("quire_dry_run", default=None)


@contextmanager
def dry_run_launches(kernels: set[KernelInterface[object]] | None = None) -> Iterator[None]:
    """Within it this thread compiles kernels instead of launching them; their outputs are undefined. The kernels that
    would have been launched are added to the set."""
    token = _current_dry_run.set(_DryRun(set(), set() if kernels is None else kernels))
    try:
        yield
    finally:
        _current_dry_run.reset(token)


class _CachedKernel(NamedTuple):
    """A compiled kernel that is loaded on a device, with its constants in the order of its parameters."""

    compiled: CompiledKernel
    constants: tuple[object, ...]

    def launch(self, grid: tuple[int, ...], device: int, args: tuple[object, ...]) -> None:
        """As `compiled[grid](*args, *constants)` does, without a profiler's hooks, which take longer than the rest."""
        x, y, z = (*grid, 1, 1)[:3]
        kernel, stream = self.compiled, driver.active.get_current_stream(device)
        kernel.run(x, y, z, stream, kernel.function, kernel.packed_metadata, None, None, None, *args, *self.constants)


_cache: dict[Hashable, _CachedKernel] = {}


def launch(kernel: KernelInterface[object], grid: tuple[int, ...], *args: object, **constants: object) -> None:
    """Launch a kernel; with a known signature straight from the cache."""
    dry_run = _current_dry_run.get()
    if dry_run is not None:
        _dry_run(dry_run, kernel, grid, args, constants)
        return
    # Each kernel has one call site: an argument has one type, and constants come in one order. A compiled kernel is
    # loaded on one device.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
    signature = [arg if type(arg) is int else _signature(arg) for arg in args]
    key = (id(kernel), device, *signature, *constants.values())
    found = _cache.get(key)
    if found is not None:
        found.launch(grid, device, args)
        return
    try:
        compiled = kernel[grid](*args, **_FP_FUSION | constants)
    except RuntimeError as error:
        if _OUT_OF_MEMORY not in str(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error  # loading the kernel's code failed: the GPU is full
    if isinstance(compiled, CompiledKernel):  # the interpreter has none
        if len(_cache) >= _MAX_CACHED:
            _cache.clear()
        _cache[key] = _CachedKernel(compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :]))


def _signature(arg: object) -> Hashable:
    """Everything of an argument that a compilation can depend on; of numbers their value."""
    if isinstance(arg, Tensor):
        return arg.dtype if arg.data_ptr() % _ALIGNMENT == 0 else (arg.dtype, False)
    if arg is None or isinstance(arg, int | float):
        return arg
    descriptor = cast(_Descriptor, arg)  # an isinstance check takes ten times as long as all else here
    return descriptor.base.dtype, tuple(descriptor.block_shape)


def _specialization(arg: object) -> Hashable:
    """What a compilation depends on, as Triton sees it: of integers only this."""
    return (arg == 1, arg % _ALIGNMENT == 0, arg.bit_length() > 31) if type(arg) is int else _signature(arg)


def _dry_run(
    dry_run: _DryRun,
    kernel: KernelInterface[object],
    grid: tuple[int, ...],
    args: tuple[object, ...],
    constants: dict[str, object],
) -> None:
    variant = (id(kernel), *map(_specialization, args), *constants.items())
    if variant not in dry_run.variants:  # most repeat earlier layers, and a warmup takes a millisecond
        dry_run.variants.add(variant)
        dry_run.kernels.add(kernel)
        kernel.warmup(*args, grid=grid, **_FP_FUSION | constants)


def launch_with_pdl(kernel: KernelInterface[object], grid: tuple[int, ...], *args: object, **constants: object) -> None:
    """Launch with programmatic dependent launch (PDL) where the GPU supports it: see the module's docstring."""
    if supports_pdl():
        launch(kernel, grid, *args, **constants, PDL=True, launch_pdl=True)
    else:
        launch(kernel, grid, *args, **constants, PDL=False)


@cache
def supports_pdl() -> bool:
    """Whether the target GPU supports programmatic dependent launch."""
    if knobs.runtime.interpret:
        return False
    target = driver.active.get_current_target()
    return target.backend == "cuda" and int(target.arch) >= _FIRST_WITH_PDL


def new_index_tensor(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty tensor for indices that a kernel writes and later code indexes by; zeros in a dry run."""
    make = torch.empty if _current_dry_run.get() is None else torch.zeros
    return make(size, dtype=dtype, device=device)


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """PDL: wait until all earlier kernels are complete and visible, then allow the next kernel to start."""
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def pdl_launch_dependents(PDL: tl.constexpr):
    """PDL: allow the next kernel to start once all programs of this one have started. The caller still has to wait."""
    if PDL:
        cuda.gdc_launch_dependents()


def cdiv(number: int, divisor: int) -> int:
    """Ceiling division."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of 2 that is >= number; 1 for 0."""
    return 1 << (number - 1).bit_length() if number > 0 else 1

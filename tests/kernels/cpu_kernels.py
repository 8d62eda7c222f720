"""The CPU kernel sets under test, and the layout in which each of them stores keys."""

from functools import cache

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu.native_kernels import NativeKernels
from quire.kernels.cpu.native_library import load_native
from quire.kernels.cpu.torch_kernels import TorchCpuKernels
from quire.kernels.interface import Kernels, Rotation

needs_native = pytest.mark.skipif(load_native() is None, reason="the native kernels cannot be compiled here")
# By name: a parameter that is a kernel set would start its threads when tests are collected.
NAMES = [pytest.param("native", marks=needs_native), "torch"]
each_kernels = pytest.mark.parametrize("name", NAMES)


@cache
def native_kernels(num_threads: int = 2, quantization: str | None = None) -> NativeKernels:
    library = load_native()
    assert library is not None
    return NativeKernels(library, num_threads, quantization)


def cpu_kernels(name: str) -> Kernels:
    return native_kernels() if name == "native" else TorchCpuKernels()


def as_stored(kernels: Kernels, store: Tensor) -> Tensor:
    """A copy of a store [..., 2, block_size, kv_heads, dim] whose keys lie as the kernels write them."""
    store = store.clone()
    if isinstance(kernels, NativeKernels):  # [kv_heads, dim, block_size] in each block
        keys = store.select(-4, 0)
        keys.copy_(keys.clone().movedim(-3, -1).reshape(keys.shape))
    return store


def as_declared(kernels: Kernels, store: Tensor) -> Tensor:
    """The inverse of `as_stored`."""
    store = store.clone()
    if isinstance(kernels, NativeKernels):
        keys = store.select(-4, 0)
        block_size, kv_heads, dim = keys.shape[-3:]
        keys.copy_(keys.clone().reshape(*keys.shape[:-3], kv_heads, dim, block_size).movedim(-1, -3))
    return store


def no_rotation(num_tokens: int, dtype: torch.dtype = torch.float32) -> Rotation:
    """Leaves heads as they are."""
    return Rotation(torch.ones(num_tokens, 1, 2, dtype=dtype), torch.zeros(num_tokens, 1, 2, dtype=dtype))

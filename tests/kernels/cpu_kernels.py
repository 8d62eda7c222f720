"""The CPU kernel sets under test, and the layout in which each of them stores keys."""

from functools import cache

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu.native_kernels import NativeKernels
from quire.kernels.cpu.native_library import load_native
from quire.kernels.cpu.torch_kernels import TorchCpuKernels
from quire.kernels.interface import KV_SCALE_BYTES, Kernels, Rotation

needs_native = pytest.mark.skipif(load_native() is None, reason="the native kernels cannot be compiled here")
# By name: a parameter that is a kernel set would start its threads when tests are collected.
NAMES = [pytest.param("native", marks=needs_native), "torch"]
each_kernels = pytest.mark.parametrize("name", NAMES)


@cache
def native_kernels(
    num_threads: int = 2, quantization: str | None = None, kv_dtype: torch.dtype | None = None
) -> NativeKernels:
    library = load_native()
    assert library is not None
    return NativeKernels(library, num_threads, quantization, kv_dtype)


def cpu_kernels(name: str) -> Kernels:
    return native_kernels() if name == "native" else TorchCpuKernels()


def as_stored(kernels: Kernels, store: Tensor) -> Tensor:
    """A copy of a store [..., 2, block_size, kv_heads, dim] whose keys lie as the kernels write them."""
    store = store.clone()
    if isinstance(kernels, NativeKernels):  # [kv_heads, dim, block_size] in each block, and behind a head its scales
        keys = store.select(-4, 0)
        heads = [part.flatten(-2) for part in (_codes(keys).movedim(-3, -1), _scales(keys).movedim(-3, -2))]
        keys.copy_(torch.cat(heads, dim=-1).reshape(keys.shape))
    return store


def as_declared(kernels: Kernels, store: Tensor) -> Tensor:
    """The inverse of `as_stored`."""
    store = store.clone()
    if isinstance(kernels, NativeKernels):
        keys = store.select(-4, 0)
        block_size, kv_heads, _ = keys.shape[-3:]
        dim = _codes(keys).shape[-1]
        codes, scales = keys.clone().flatten(-3).unflatten(-1, (kv_heads, -1)).tensor_split([dim * block_size], dim=-1)
        codes, scales = codes.unflatten(-1, (dim, block_size)), scales.unflatten(-1, (block_size, keys.shape[-1] - dim))
        keys.copy_(torch.cat([codes.movedim(-1, -3), scales.movedim(-2, -3)], dim=-1))
    return store


def _codes(store: Tensor) -> Tensor:
    return store[..., :-KV_SCALE_BYTES] if store.dtype is torch.int8 else store


def _scales(store: Tensor) -> Tensor:
    """The bytes of the scales of an int8 store; nothing of others."""
    return store[..., -KV_SCALE_BYTES:] if store.dtype is torch.int8 else store[..., :0]


def no_rotation(num_tokens: int, dtype: torch.dtype = torch.float32) -> Rotation:
    """Leaves heads as they are."""
    return Rotation(torch.ones(num_tokens, 1, 2, dtype=dtype), torch.zeros(num_tokens, 1, 2, dtype=dtype))

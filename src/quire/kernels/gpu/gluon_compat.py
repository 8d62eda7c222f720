"""Gluon helpers for Hopper: names that differ between Triton releases, approximate math, TMA descriptors.

Does not depend on kernels.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

# TMA load: a block of a tensor with a descriptor, from global to shared memory.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
warps_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # for the warps of one partition


@gluon.jit
def reinterpret_shared(memory, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory with another shape and layout."""
    if _IS_PUBLIC:
        seen = memory.reinterpret(memory.dtype, shape, layout)
    else:
        seen = memory._reinterpret(memory.dtype, shape, layout)
    return seen


@gluon.jit
def tanh_approx(x):
    """To 11 bits, in one instruction; by an exponential and a division it takes ten."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def rcp_approx(x):
    """To the last bit but one, in one instruction; a division takes eight."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def tensor_descriptor(tensor: Tensor, *block: int) -> TensorDescriptor:
    """TMA descriptor of a tensor, for copies of such blocks. It keeps the tensor alive."""
    return TensorDescriptor.from_tensor(tensor, list(block), _layout(block, tensor.dtype))


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_TYPES[dtype])

"""Tensors as the copy engine of Hopper wants them: in blocks, and how each lies in shared memory. Knows no kernel."""

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def described(tensor: Tensor, *block: int) -> TensorDescriptor:
    """For kernels that copy such blocks. Who keeps it keeps the tensor."""
    return TensorDescriptor.from_tensor(tensor, list(block), _layout(block, tensor.dtype))


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_TYPES[dtype])

"""Chooses the kernels for a device, and says why. The only place that knows which sets exist."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels.ahead import CompilingAhead
from quire.kernels.choosing import Choosing
from quire.kernels.contract import Kernels
from quire.kernels.cpu import CpuKernels
from quire.kernels.reference import ReferenceKernels


class Choice(NamedTuple):
    """A set of kernels, and the reason a person may read."""

    kernels: Kernels
    reason: str
    choosing: Choosing | None = None  # None: tokens are chosen by tensor operations
    copy_blocks: Callable[[Tensor, Tensor, Tensor], None] | None = None  # None: block by block
    ahead: CompilingAhead | None = None  # None: there is nothing to compile


def select_kernels(name: str) -> Choice:
    """By device ("cpu", "cuda") or, for tests, by name ("reference")."""
    if name == "cpu":
        kernels = CpuKernels()
        rows = "compiled by numba" if kernels.compiled else "by torch (install numba for faster ones)"
        products = "float32 times bfloat16 on its matrix unit" if kernels.exact else "packed bfloat16 weights"
        return Choice(kernels, f"the device is the CPU: {products}, norms and decode attention {rows}")
    if name == "cuda":
        return _gpu_choice()
    if name == "reference":
        return Choice(ReferenceKernels(), "asked for by name: slow, and right by reading")
    raise ConfigError(f'There are no kernels for "{name}": choose "cpu" or "cuda".', param="device")


def _gpu_choice() -> Choice:
    if find_spec("triton") is None:
        return Choice(ReferenceKernels(), 'Triton is not installed (pip install "quire[gpu]"): the reference, slow')
    from quire.kernels.gpu.compiling import compile_first, compile_launched  # a CPU never waits for Triton to be loaded
    from quire.kernels.gpu.copies import copy_blocks
    from quire.kernels.gpu.finish import finish_rows
    from quire.kernels.gpu.kernels import GpuKernels
    from quire.kernels.gpu.sample import choose_tokens

    reason = "the device is a GPU: products by torch, attention and all between by Triton"
    ahead = CompilingAhead(compile_first, compile_launched)
    return Choice(GpuKernels(), reason, Choosing(choose_tokens, finish_rows), copy_blocks, ahead)

"""Chooses the kernels for a device, and says why. The only place that knows which sets exist."""

from typing import NamedTuple

from quire.core.errors import ConfigError
from quire.kernels.contract import Kernels
from quire.kernels.cpu import CpuKernels
from quire.kernels.reference import ReferenceKernels


class Choice(NamedTuple):
    """A set of kernels, and the reason a person may read."""

    kernels: Kernels
    reason: str


def select_kernels(name: str) -> Choice:
    """By device ("cpu", "cuda") or, for tests, by name ("reference")."""
    if name == "cpu":
        kernels = CpuKernels()
        rows = "compiled by numba" if kernels.compiled else "by torch (install numba for faster ones)"
        products = "float32 times bfloat16 on its matrix unit" if kernels.exact else "packed bfloat16 weights"
        return Choice(kernels, f"the device is the CPU: {products}, norms and decode attention {rows}")
    if name == "cuda":
        return Choice(ReferenceKernels(), "no kernels are written for GPUs yet: the plain reference, slow and right")
    if name == "reference":
        return Choice(ReferenceKernels(), "asked for by name: slow, and right by reading")
    raise ConfigError(f'There are no kernels for "{name}": choose "cpu" or "cuda".', param="device")

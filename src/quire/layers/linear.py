"""A weight matrix as the kernels like it, with its bias."""

from typing import Protocol

from torch import Tensor

from quire.kernels.interface import Kernels, PartialSums


class Projection(Protocol):
    """[tokens, in] to [tokens, out], perhaps in parts: for `Kernels.add_rms_norm` alone, unless it is a `Linear`."""

    def __call__(self, x: Tensor) -> Tensor | PartialSums: ...


class Linear:
    """x @ weight.T + bias. Keeps the packed weight alone, so that the caller may let go of the plain one."""

    __slots__ = ("_bias", "_kernels", "_packed")

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None = None) -> None:
        self._kernels = kernels
        self._packed = kernels.pack(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Returns [tokens, out]."""
        return self._kernels.linear(x, self._packed, self._bias)

    def to_add(self, x: Tensor) -> Tensor | PartialSums:
        """The same, perhaps in parts: see `Kernels.linear_unreduced`."""
        return self._kernels.linear_unreduced(x, self._packed, self._bias)

"""Linear layer: a packed weight with its bias."""

from typing import Protocol

from torch import Tensor

from quire.kernels.interface import Kernels, PartialSums, Weight


class Projection(Protocol):
    """[tokens, in] to [tokens, out], possibly unreduced: then only for `Kernels.add_rms_norm`."""

    def __call__(self, x: Tensor) -> Tensor | PartialSums: ...


class Linear:
    """x @ weight.T + bias. Keeps only the packed weight, so that the caller may free the original."""

    __slots__ = ("_kernels", "bias", "packed")

    def __init__(self, kernels: Kernels, weight: Weight, bias: Tensor | None = None) -> None:
        self._kernels = kernels
        self.packed = kernels.pack(weight)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Returns [tokens, out]."""
        return self._kernels.linear(x, self.packed, self.bias)

    def unreduced(self, x: Tensor) -> Tensor | PartialSums:
        """See `Kernels.linear_unreduced`."""
        return self._kernels.linear_unreduced(x, self.packed, self.bias)

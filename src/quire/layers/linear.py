"""Linear layer: a packed weight with its bias. Gated MLP: two of them, the feed-forward half of a layer."""

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


class GatedMlp:
    """down(activation(gate(x)) * up(x)), with gate and up in one matrix."""

    __slots__ = ("_activation", "_down", "_gate_up", "_kernels")

    def __init__(self, kernels: Kernels, gate_up: Linear, down: Projection, activation: str) -> None:
        self._kernels = kernels
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor | PartialSums:
        """x: [tokens, hidden]. Returns [tokens, hidden], like down."""
        return self._down(self._kernels.act_and_mul(self._gate_up(x), self._activation))

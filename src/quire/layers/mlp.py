"""Gated feed-forward half of a layer: up-projection, activation and multiplication, down-projection."""

from torch import Tensor

from quire.kernels.interface import Kernels, PartialSums
from quire.layers.linear import Linear, Projection


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

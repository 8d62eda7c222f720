"""The kernels for GPUs: products of many rows by torch, the rest by Triton. Knows nothing of models."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.gpu import activation as gates
from quire.kernels.gpu import norms
from quire.kernels.gpu import rope_and_kv_write as turns
from quire.kernels.gpu.attention.dispatch import GpuAttention
from quire.kernels.gpu.attention.hopper_dispatch import HopperPrefill
from quire.kernels.gpu.backends.interface import OWN, AttentionBackends
from quire.kernels.gpu.gemm.hopper_dispatch import HopperGemm
from quire.kernels.gpu.gemm.skinny import fits, skinny_product
from quire.kernels.interface import AttentionRule, HeadNorm, PartialSums, Rotation, StepLayout


class GpuKernels:
    """Launches only: nothing here waits for the device or reads from it, so that a graph may hold it.

    Other libraries may do parts of the attention; theirs may wait (`Backends.recordable`).
    """

    name = "gpu"

    def __init__(self, backends: AttentionBackends = OWN, windows: Sequence[int] = (0,)) -> None:
        """`windows`: those of the model's layers, 0 for none; another that comes up costs a little time."""
        self._backends = backends
        self._windows = tuple(windows)
        self._hopper = HopperPrefill.find()
        self._products = HopperGemm.find()

    def activations(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        product = None if self._products is None else self._products.product(x, packed, bias)
        return _linear_elsewhere(x, packed, bias) if product is None else product

    def linear_unreduced(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor | PartialSums:
        product = None if self._products is None else self._products.parts(x, packed, bias)
        return _linear_elsewhere(x, packed, bias) if product is None else product

    def logits(self, x: Tensor, packed: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        if weight.is_cuda and weight.dtype is not torch.float32:  # the sums are float32 anyway: not rounded at the end
            return torch.mm(x, weight.T, out_dtype=torch.float32, out=out)
        return torch.mm(x.float(), weight.float().T, out=out)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return norms.rms_norm(x, weight, epsilon)

    def add_rms_norm(self, x: Tensor | PartialSums, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return norms.add_rms_norm(x, residual, weight, epsilon)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        return gates.gate(gate_up, activation)

    def plan(self, layout: StepLayout, block_size: int) -> "GpuStep":
        return GpuStep(layout, self._windows, self._backends, self._hopper)


def _linear_elsewhere(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """On every card."""
    return skinny_product(x, weight, bias) if fits(x, weight, bias) else F.linear(x, weight, bias)


class GpuStep:
    """One step: keys and values are written by one kernel, and read by those of attention."""

    __slots__ = ("_attention", "_slots", "_windows")

    def __init__(
        self,
        layout: StepLayout,
        windows: tuple[int, ...],
        backends: AttentionBackends = OWN,
        hopper: HopperPrefill | None = None,
    ) -> None:
        self._slots = layout.slots
        self._windows = windows
        self._attention = GpuAttention(layout, layout.num_decodes, backends, hopper)

    def rope_and_write_kv(self, qkv: Tensor, head_norm: HeadNorm | None, rotation: Rotation, kv_layer: Tensor) -> None:
        self._attention.cut_decodes(kv_layer, self._windows)  # before the launch that lies between it and attention
        turns.rope_and_write_kv(qkv, head_norm, rotation, self._slots, kv_layer)
        self._attention.has_launched()

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule) -> Tensor:
        return self._attention.attend(query, kv_layer, rule)

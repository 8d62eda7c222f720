"""GPU kernel set: large GEMMs by torch, everything else by Triton and Gluon. Does not depend on models."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.gpu import norms
from quire.kernels.gpu.activation import act_and_mul
from quire.kernels.gpu.attention.dispatch import GpuAttention
from quire.kernels.gpu.attention.hopper_dispatch import HopperPrefill
from quire.kernels.gpu.backends.interface import OWN, AttentionBackends
from quire.kernels.gpu.gemm.hopper_dispatch import HopperGemm
from quire.kernels.gpu.gemm.skinny import fits, skinny_gemm
from quire.kernels.gpu.rope_and_kv_write import rope_and_write_kv
from quire.kernels.interface import (
    AttentionRule,
    HeadNorm,
    LayerByLayer,
    PartialSums,
    Rotation,
    StepAttention,
    StepLayout,
)


class GpuKernels(LayerByLayer):
    """Only launches: nothing waits for the device or reads from it, so a step can be captured as a CUDA graph.

    Other libraries may compute parts of the attention; theirs may wait (`AttentionBackends.capturable`).
    """

    name = "gpu"

    def __init__(self, backends: AttentionBackends = OWN, windows: Sequence[int] = (0,)) -> None:
        """`windows`: of the model's layers, 0 for none; any other window costs a launch when it is first seen."""
        self._backends = backends
        self._windows = tuple(windows)
        self._hopper = HopperPrefill.find()
        self._gemm = HopperGemm.find()

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        output = None if self._gemm is None else self._gemm.matmul(x, packed, bias)
        return _linear_any_gpu(x, packed, bias) if output is None else output

    def linear_unreduced(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor | PartialSums:
        output = None if self._gemm is None else self._gemm.matmul_unreduced(x, packed, bias)
        return _linear_any_gpu(x, packed, bias) if output is None else output

    def logits(self, x: Tensor, packed: Tensor, weight: Tensor | None, out: Tensor | None = None) -> Tensor:
        assert weight is not None
        if weight.is_cuda and weight.dtype is not torch.float32:  # float32 accumulation, not rounded at the end
            return torch.mm(x, weight.T, out_dtype=torch.float32, out=out)
        return torch.mm(x.float(), weight.float().T, out=out)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return norms.rms_norm(x, weight, epsilon)

    def add_rms_norm(self, x: Tensor | PartialSums, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return norms.add_rms_norm(x, residual, weight, epsilon)

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        return act_and_mul(gate_up, activation)

    def plan(self, layout: StepLayout, block_size: int) -> StepAttention:
        return GpuStep(layout, self._windows, self._backends, self._hopper)


def _linear_any_gpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """On any GPU."""
    return skinny_gemm(x, weight, bias) if fits(x, weight, bias) else F.linear(x, weight, bias)


class GpuStep:
    """Attention of one step: RoPE and KV write in one launch, then the attention kernels."""

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
        self._attention.split_decodes(kv_layer, self._windows)  # before the launch that separates it from attention
        rope_and_write_kv(qkv, head_norm, rotation, self._slots, kv_layer)
        self._attention.has_launched()

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule) -> Tensor:
        return self._attention.attend(query, kv_layer, rule)

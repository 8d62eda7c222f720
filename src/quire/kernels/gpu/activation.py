"""SwiGLU and GeGLU: activation(gate) * up in one pass (silu_and_mul, gelu_tanh_and_mul)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.launch import cdiv, launch_with_pdl, pdl_launch_dependents, pdl_wait

_NUMBERS = 1_024  # per program: 16 bytes of 16-bit numbers for each of 128 threads
_NUM_WARPS = 4


@triton.jit
def _act_and_mul(
    gate_up,  # [tokens, 2 * width], strided
    output,  # [tokens, width]
    token_stride,
    width,
    IS_SILU: tl.constexpr,
    NUMBERS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    inside = column < width
    row = gate_up + token * token_stride
    gate = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + width + column, mask=inside, other=0.0).to(tl.float32)
    if IS_SILU:
        steepness = gate
    else:  # 0.5 * (1 + tanh(z)) is sigmoid(2 * z); 1.5957691 is 2 * sqrt(2 / pi)
        steepness = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    activated = gate * tl.sigmoid(steepness)
    tl.store(output + token * width + column, (activated * up).to(output.dtype.element_ty), mask=inside)


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up ("silu" or "gelu_tanh"). gate_up: [tokens, 2 * ffn]. Returns [tokens, ffn], as gate_up."""
    assert activation in ("silu", "gelu_tanh"), activation
    assert gate_up.stride(1) == 1, gate_up.stride()
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    launch_with_pdl(
        _act_and_mul,
        (num_tokens, cdiv(width, _NUMBERS)),
        gate_up,
        output,
        gate_up.stride(0),
        width,
        IS_SILU=activation == "silu",
        NUMBERS=_NUMBERS,
        num_warps=_NUM_WARPS,
    )
    return output

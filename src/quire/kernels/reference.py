"""Reference kernels: every operation as its definition reads, in float32. The other kernels are tested against them."""

import torch
from torch import Tensor

from quire.kernels.interface import (
    KV_SCALE_BYTES,
    AttentionRule,
    HeadNorm,
    LayerByLayer,
    PartialSums,
    Rotation,
    StepLayout,
)


class ReferenceKernels(LayerByLayer):
    """Loops and definitions: nothing is fused, cached or skipped."""

    name = "reference"

    def __init__(self, kv_dtype: torch.dtype | None = None) -> None:
        self._kv_dtype = kv_dtype  # None: the model's

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._kv_dtype or dtype

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        product = x.float() @ packed.float().T
        return (product if bias is None else product + bias.float()).to(x.dtype)

    def linear_unreduced(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        return self.linear(x, packed, bias)

    def logits(self, x: Tensor, packed: Tensor, weight: Tensor | None, out: Tensor | None = None) -> Tensor:
        assert weight is not None
        return torch.mm(x.float(), weight.float().T, out=out)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return _rms_norm(x, weight, epsilon)

    def add_rms_norm(self, x: Tensor | PartialSums, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        residual.copy_(residual + (x.reduce() if isinstance(x, PartialSums) else x))
        return _rms_norm(residual, weight, epsilon).to(x.dtype)

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        if activation == "silu":
            activated = gate * torch.sigmoid(gate)
        else:
            assert activation == "gelu_tanh", activation
            inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
            activated = 0.5 * gate * (1 + torch.tanh(inner))
        return (activated * up).to(gate_up.dtype)

    def plan(self, layout: StepLayout, block_size: int) -> "ReferenceAttention":
        return ReferenceAttention(layout, block_size)


class ReferenceAttention:
    """One sequence after the other, one query after the other."""

    def __init__(self, layout: StepLayout, block_size: int) -> None:
        self._layout = layout
        self._block_size = block_size

    def rope_and_write_kv(self, qkv: Tensor, head_norm: HeadNorm | None, rotation: Rotation, kv_layer: Tensor) -> None:
        kv_heads = kv_layer.shape[3]
        rotated, heads = qkv[:, :-kv_heads], qkv.shape[1] - 2 * kv_heads
        if head_norm is not None:
            rotated.copy_(_rms_norm(rotated, head_norm.weight, head_norm.epsilon))
        _rotate(rotated, rotation)
        self.write(qkv[:, heads:].view(-1, 2, kv_heads, qkv.shape[2]), kv_layer)

    def write(self, key_value: Tensor, kv_layer: Tensor) -> None:
        """key_value: [tokens, 2, kv_heads, dim], stored as it is; in an int8 store, quantized."""
        if kv_layer.dtype is torch.int8:
            key_value = quantize_kv(key_value)
        for token, slot in enumerate(self._layout.slots.tolist()):
            kv_layer[slot // self._block_size, :, slot % self._block_size] = key_value[token]

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule) -> Tensor:
        output = torch.empty_like(query)
        starts = self._layout.query_starts.tolist()
        for sequence, length in enumerate(self._layout.context_lengths.tolist()):
            tokens = range(starts[sequence], starts[sequence + 1])
            for token in tokens:
                position = length - (tokens.stop - token)  # the last query sees `length` keys
                first = max(0, position - rule.window + 1) if rule.window else 0
                keys = self._read(kv_layer, sequence, range(first, position + 1))
                output[token] = _attend_one(query[token], keys, rule)
        return output.flatten(1)

    def _read(self, kv_layer: Tensor, sequence: int, positions: range) -> Tensor:
        """The keys and values at these positions, through the block table: [keys, 2, kv_heads, dim]."""
        table = self._layout.tables[sequence].tolist()
        size = self._block_size
        stored = torch.stack([kv_layer[table[p // size], :, p % size] for p in positions])
        return _dequantize_kv(stored) if stored.dtype is torch.int8 else stored.float()


def quantize_kv(x: Tensor) -> Tensor:
    """[..., dim] as [..., dim + KV_SCALE_BYTES] int8: codes, then the bytes of their scale, a float32."""
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    codes = (x / scale).round().nan_to_num(0.0).clamp(-127, 127).to(torch.int8)  # 0 / 0 where all are 0
    return torch.cat([codes, scale.view(torch.int8)], dim=-1)


def _dequantize_kv(stored: Tensor) -> Tensor:
    """The inverse of `quantize_kv`, as float32."""
    codes, scale = stored[..., :-KV_SCALE_BYTES], stored[..., -KV_SCALE_BYTES:]
    return codes.float() * scale.contiguous().view(torch.float32)


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x: [..., width]; weight: float32, broadcastable to x. As x."""
    wide = x.float()
    mean_square = (wide * wide).mean(dim=-1, keepdim=True)
    return (wide / torch.sqrt(mean_square + epsilon) * weight).to(x.dtype)


def _rotate(x: Tensor, rotation: Rotation) -> None:
    """RoPE on the first rotary_dim of each head, in place. x: [tokens, heads, dim], strided."""
    width = rotation.cos.shape[-1]
    rotated = x[..., :width].float()
    left, right = rotated.chunk(2, dim=-1)
    swapped = torch.cat([right, left], dim=-1)
    result = rotated * rotation.cos.float() + swapped * rotation.sin.float()
    x[..., :width] = result.to(x.dtype)


def _attend_one(query: Tensor, key_value: Tensor, rule: AttentionRule) -> Tensor:
    """query: [heads, dim]; key_value: [keys, 2, kv_heads, dim]. Returns [heads, dim]."""
    group = query.shape[0] // key_value.shape[2]
    keys, values = key_value.repeat_interleave(group, dim=2).unbind(dim=1)  # [keys, heads, dim]
    scores = (query.float() * keys).sum(dim=-1) * rule.scale  # [keys, heads]
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    weights = torch.softmax(scores, dim=0)
    return (weights[:, :, None] * values).sum(dim=0).to(query.dtype)

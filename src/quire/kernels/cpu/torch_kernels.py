"""CPU kernels by torch alone, for machines where the native ones cannot be compiled: correct, and slower."""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.interface import (
    AttentionRule,
    HeadNorm,
    LayerByLayer,
    PartialSums,
    Rotation,
    StepLayout,
)

# Two steps of bfloat16: logits this close to the highest, relative to it, may be reordered by rounding.
_NEAR = 2.0**-6
_MANY = 64  # near logits per row that are recomputed at most
_BLOCK = 64  # logits per block maximum: one pass over all logits instead of three


class TorchCpuKernels(LayerByLayer):
    """Torch operations; attention sequence by sequence."""

    name = "cpu"

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x.to(packed.dtype), packed, bias).to(x.dtype)

    def linear_unreduced(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        return self.linear(x, packed, bias)

    def logits(self, x: Tensor, packed: Tensor, weight: Tensor | None, out: Tensor | None = None) -> Tensor:
        logits = self.linear(x, packed, None).float()
        if packed.dtype is not torch.float32:
            near = _near_highest(logits)
            if len(near.rows) <= _MANY * len(x):  # else the distribution is flat and rounding does not matter
                recomputed = (x[near.rows].float() * packed[near.tokens].float()).sum(dim=-1)
                logits[near.rows, near.tokens] = recomputed
        return logits if out is None else out.copy_(logits)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, epsilon).to(x.dtype)

    def add_rms_norm(self, x: Tensor | PartialSums, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        if isinstance(x, PartialSums):
            x = x.reduce()
        residual += x
        return self.rms_norm(residual, weight, epsilon).to(x.dtype)

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "silu":
            return F.silu(gate).mul_(up)
        assert activation == "gelu_tanh", activation
        return F.gelu(gate, approximate="tanh").mul_(up)

    def plan(self, layout: StepLayout, block_size: int) -> "TorchCpuAttention":
        return TorchCpuAttention(layout, block_size)


class _Chunk(NamedTuple):
    """One sequence of a step: its tokens, its blocks, and the keys of its last query."""

    tokens: slice
    blocks: Tensor  # [blocks] int32
    num_keys: int

    @property
    def num_queries(self) -> int:
        return int(self.tokens.stop - self.tokens.start)


class TorchCpuAttention:
    """Attention of one step, one sequence after the other."""

    def __init__(self, layout: StepLayout, block_size: int) -> None:
        self._block_size = block_size
        self._blocks = layout.slots // block_size
        self._offsets = layout.slots % block_size
        starts, lengths = layout.query_starts.tolist(), layout.context_lengths.tolist()
        self._chunks = [
            _Chunk(slice(start, end), layout.tables[index], length)
            for index, ((start, end), length) in enumerate(zip(pairwise(starts), lengths, strict=True))
            if length > 0
        ]
        self._masks: dict[tuple[int, int], Tensor] = {}

    def rope_and_write_kv(self, qkv: Tensor, head_norm: HeadNorm | None, rotation: Rotation, kv_layer: Tensor) -> None:
        kv_heads = kv_layer.shape[3]
        rotated, heads = qkv[:, :-kv_heads], qkv.shape[1] - 2 * kv_heads
        if head_norm is not None:
            normed = F.rms_norm(rotated.float(), rotated.shape[-1:], None, head_norm.epsilon)
            rotated.copy_(normed * head_norm.weight)
        _rotate(rotated, rotation)
        self.write(qkv[:, heads:].view(-1, 2, kv_heads, qkv.shape[2]), kv_layer)

    def write(self, key_value: Tensor, kv_layer: Tensor) -> None:
        """key_value: [tokens, 2, kv_heads, dim], stored as it is."""
        kv_layer.transpose(1, 2).index_put_((self._blocks, self._offsets), key_value.to(kv_layer.dtype))

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule) -> Tensor:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for index, chunk in enumerate(self._chunks):
            output[chunk.tokens] = self._attend_chunk(index, query[chunk.tokens], kv_layer, rule)
        return output.flatten(1)

    def _attend_chunk(self, index: int, query: Tensor, kv_layer: Tensor, rule: AttentionRule) -> Tensor:
        """query: [queries, heads, dim] of one chunk. Returns the same shape."""
        chunk = self._chunks[index]
        first = max(0, chunk.num_keys - chunk.num_queries - rule.window + 1) if rule.window else 0
        first_block, last_block = first // self._block_size, (chunk.num_keys - 1) // self._block_size
        blocks = kv_layer.index_select(0, chunk.blocks[first_block : last_block + 1])
        base = first_block * self._block_size
        seen = blocks.transpose(0, 1).flatten(1, 2)[:, first - base : chunk.num_keys - base]
        keys, values = seen.transpose(1, 2).to(query.dtype)  # [kv_heads, keys, dim] each
        mask = self._mask(index, first, rule.window, query.dtype)
        return _attend_dense(query.transpose(0, 1), keys, values, mask, rule).transpose(0, 1)

    def _mask(self, index: int, first: int, window: int, dtype: torch.dtype) -> Tensor | None:
        """[queries, keys], 0 where the key is visible; built once per step for all layers of one window."""
        chunk = self._chunks[index]
        if chunk.num_queries == 1:
            return None
        if (index, window) not in self._masks:
            queries = torch.arange(chunk.num_keys - chunk.num_queries, chunk.num_keys)[:, None]
            distance = queries - torch.arange(first, chunk.num_keys)[None, :]
            hidden = distance < 0
            if window:
                hidden |= distance >= window
            nothing = torch.zeros(hidden.shape, dtype=dtype)
            self._masks[index, window] = nothing.masked_fill_(hidden, -math.inf)
        return self._masks[index, window]


def _rotate(x: Tensor, rotation: Rotation) -> None:
    """RoPE on the first rotary_dim of each head, in place. x: [tokens, heads, dim], strided."""
    width = rotation.cos.shape[-1]
    rotated = x[..., :width]
    swapped = rotated.roll(width // 2, dims=-1)
    torch.addcmul(rotated * rotation.cos, swapped, rotation.sin, out=rotated)


def _attend_dense(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rule: AttentionRule) -> Tensor:
    """query: [heads, queries, dim]; keys, values: [kv_heads, keys, dim]; mask: [queries, keys]. As query."""
    if not rule.softcap:
        return F.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=mask, scale=rule.scale, enable_gqa=True
        )[0]
    group = query.shape[0] // keys.shape[0]
    grouped = query.float().view(-1, group, *query.shape[1:])  # [kv_heads, group, queries, dim]
    scores = (grouped @ keys.float().transpose(1, 2)[:, None]) * (rule.scale / rule.softcap)
    scores.tanh_().mul_(rule.softcap)
    if mask is not None:
        scores += mask
    attended: Tensor = scores.softmax(dim=-1) @ values.float()[:, None]
    return attended.flatten(0, 1).to(query.dtype)


class _Near(NamedTuple):
    """Logits close to the highest of their row."""

    rows: Tensor  # [near] int64
    tokens: Tensor  # [near] int64


def _near_highest(logits: Tensor) -> _Near:  # [rows, vocab] float32
    blocks = logits.view(len(logits), -1, math.gcd(logits.shape[-1], _BLOCK))
    peaks = blocks.amax(dim=-1)
    highest = peaks.amax(dim=-1, keepdim=True)
    lowest = highest - highest.abs() * _NEAR
    rows, places = (peaks >= lowest).nonzero().unbind(dim=1)
    found, offsets = (blocks[rows, places] >= lowest[rows]).nonzero().unbind(dim=1)
    return _Near(rows[found], places[found] * blocks.shape[-1] + offsets)

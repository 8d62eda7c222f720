"""CPU kernel set for bfloat16 and float32: few torch calls per layer, packed weights, no padding.

Where numba is installed, queries of decodes and short chunks go through `cpu.attention`, norms through `cpu.norm`, and
matmuls through `cpu.amx_matmul` if the CPU has AMX: then activations are float32 in a bfloat16 model too.
"""

import math
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.interface import AttentionRule, HeadNorm, PartialSums, Rotation, StepLayout

# Two steps of bfloat16: logits this close to the highest, relative to it, may be reordered by rounding.
_NEAR = 2.0**-6
_MANY = 64  # near logits per row that are recomputed at most
# Chunks of so few queries, or with so few keys, are computed query by query: a torch call costs more.
_FEW_QUERIES = 8
_FEW_KEYS = 32
_BLOCK = 64  # logits per block maximum: one pass over all logits instead of three

Words = NDArray[np.uint16] | NDArray[np.int16] | NDArray[np.float32]

_LARGEST_HALF = torch.finfo(torch.float16).max

# Types for numba: numpy has no bfloat16, and numba no float16.
_WORDS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.float32: torch.float32}


class _CompiledCpuKernels(NamedTuple):
    """The modules that need numba."""

    attention: ModuleType
    norm: ModuleType
    amx_matmul: ModuleType | None  # where the CPU has AMX


class CpuKernels:
    """Torch operations; matmuls, norms and decode attention compiled by numba where it is installed."""

    name = "cpu"

    def __init__(self, use_numba: bool = True, use_amx: bool = True) -> None:
        self._compiled = _compiled() if use_numba else None
        self._amx = self._compiled.amx_matmul if self._compiled is not None and use_amx else None

    @property
    def compiled(self) -> bool:
        """Whether norms and decode attention are compiled."""
        return self._compiled is not None

    @property
    def has_amx(self) -> bool:
        """Whether activations stay float32 in a bfloat16 model: the CPU has AMX."""
        return self._amx is not None

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self._amx is not None else dtype

    def kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # float16 has three more mantissa bits than bfloat16: useful only with float32 activations.
        return torch.float16 if self._amx is not None and dtype is torch.bfloat16 else dtype

    def pack(self, weight: Tensor) -> Tensor:
        if self._amx is not None and weight.dtype is torch.bfloat16 and self._amx.fits(*weight.shape):
            out, width = weight.shape  # blocks of 32 inputs in pairs, and of 16 outputs
            return weight.view(out // 16, 16, width // 32, 16, 2).permute(0, 2, 3, 1, 4).contiguous()
        # bfloat16 in oneDNN's own layout: mostly 1.2 to 1.6 times as fast (docs/log.md). float32: not measured.
        if weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            return packed
        return weight

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        if _is_tiles(packed):
            return self._multiply(x, packed, bias)
        if packed.is_mkldnn:
            output: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(packed.dtype), packed, bias, "none", [], "")
            return output.to(x.dtype)
        return F.linear(x.to(packed.dtype), packed, bias).to(x.dtype)

    def _multiply(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        assert self._amx is not None
        output = torch.empty(len(x), packed.shape[0] * packed.shape[3])
        self._amx.multiply(x.contiguous().numpy(), _array(packed), torch.get_num_threads(), output.numpy())
        return output if bias is None else output.add_(bias)

    def linear_unreduced(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        return self.linear(x, packed, bias)

    def logits(self, x: Tensor, packed: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        logits = self._logits(x, packed, weight)
        return logits if out is None else out.copy_(logits)

    def _logits(self, x: Tensor, packed: Tensor, weight: Tensor) -> Tensor:
        logits = self.linear(x, packed, None).float()
        if weight.dtype is torch.float32 or _is_tiles(packed):
            return logits
        near = _near_highest(logits)
        if len(near.rows) <= _MANY * len(x):  # else the distribution is flat and rounding does not matter
            recomputed = (x[near.rows].float() * weight[near.tokens].float()).sum(dim=-1)
            logits[near.rows, near.tokens] = recomputed
        return logits

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        if self._compiled is not None and x.is_contiguous():
            output = torch.empty_like(x)
            width = x.shape[-1]
            self._compiled.norm.norm(
                _array(x.view(-1, width)), weight.numpy(), np.float32(epsilon), _array(output.view(-1, width))
            )
            return output
        return F.rms_norm(x.float(), weight.shape, weight, epsilon).to(x.dtype)

    def add_rms_norm(self, x: Tensor | PartialSums, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        if isinstance(x, PartialSums):
            x = x.reduce()
        if self._compiled is not None and residual.dtype is torch.float32:
            output = torch.empty_like(x)
            self._compiled.norm.add_norm(
                _array(x), residual.numpy(), weight.numpy(), np.float32(epsilon), _array(output)
            )
            return output
        residual += x
        return self.rms_norm(residual, weight, epsilon).to(x.dtype)

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "silu":
            return F.silu(gate).mul_(up)
        assert activation == "gelu_tanh", activation
        return F.gelu(gate, approximate="tanh").mul_(up)

    def plan(self, layout: StepLayout, block_size: int) -> "CpuAttention":
        return CpuAttention(layout, block_size, self._compiled)


class _Chunk(NamedTuple):
    """A sequence computed by itself: its tokens in the step, its blocks, and the keys of its last query."""

    tokens: slice
    blocks: Tensor  # [blocks] int32
    num_keys: int

    @property
    def num_queries(self) -> int:
        return int(self.tokens.stop - self.tokens.start)


class _Rows(NamedTuple):
    """Queries computed one by one, each over the keys up to its own."""

    tokens: Tensor  # [rows] int64: indices in the step
    tables: Tensor  # [rows, width] int32
    lengths: Tensor  # [rows] int32


def _rows(layout: StepLayout, by_row: list[bool]) -> _Rows:
    """All queries of the sequences that are computed by row."""
    chosen = torch.tensor(by_row, dtype=torch.bool)
    num_queries = layout.query_starts.diff()
    sequences = torch.arange(len(by_row)).repeat_interleave(num_queries)
    tokens = chosen[sequences].nonzero().flatten()
    sequences = sequences[tokens]
    num_later = layout.query_starts[1:][sequences] - 1 - tokens  # later queries of the sequence: keys are masked
    return _Rows(tokens, layout.tables[sequences], (layout.context_lengths[sequences] - num_later).int())


class CpuAttention:
    """Attention of one step: queries of decodes and short chunks in one call, longer chunks one by one."""

    def __init__(self, layout: StepLayout, block_size: int, compiled: _CompiledCpuKernels | None) -> None:
        self._compiled = compiled
        self._block_size = block_size
        self._blocks = layout.slots // block_size
        self._offsets = layout.slots % block_size
        starts = layout.query_starts.tolist()
        lengths = layout.context_lengths.tolist()
        by_row = [
            compiled is not None and (end - start <= _FEW_QUERIES or length <= _FEW_KEYS)
            for (start, end), length in zip(pairwise(starts), lengths, strict=True)
        ]
        self._chunks = [
            _Chunk(slice(starts[s], starts[s + 1]), layout.tables[s], length)
            for s, length in enumerate(lengths)
            if not by_row[s]
        ]
        rows = _rows(layout, by_row)
        self._row_tokens = rows.tokens
        self._row_tables = rows.tables.numpy()
        self._row_lengths = rows.lengths.numpy()
        self._masks: dict[tuple[int, int], Tensor] = {}
        self._num_threads = torch.get_num_threads()
        if compiled is not None:
            compiled.attention.use_threads(self._num_threads)

    @property
    def num_rows(self) -> int:
        """Queries computed one by one, all in one call."""
        return len(self._row_tokens)

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
        if kv_layer.dtype is torch.float16:  # values beyond its range are clamped instead of becoming infinite
            key_value = key_value.clamp(-_LARGEST_HALF, _LARGEST_HALF)
        kv_layer.transpose(1, 2).index_put_((self._blocks, self._offsets), key_value.to(kv_layer.dtype))

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule) -> Tensor:
        if not self._chunks:  # the rows are all tokens, in order
            return self._attend_rows(query, kv_layer, rule).flatten(1)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if len(self._row_tokens):
            output[self._row_tokens] = self._attend_rows(query[self._row_tokens], kv_layer, rule)
        for index, chunk in enumerate(self._chunks):
            output[chunk.tokens] = self._attend_chunk(index, query[chunk.tokens], kv_layer, rule)
        return output.flatten(1)

    def _attend_rows(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule) -> Tensor:
        """query: [rows, heads, dim], in the order of the tables. Returns the same shape."""
        assert self._compiled is not None
        rows, heads, dim = query.shape
        kv_heads = kv_layer.shape[3]
        output = torch.empty(rows, heads, dim, dtype=query.dtype)
        self._compiled.attention.attend_rows(
            _flat(query),
            _strides(query),
            _flat(kv_layer),
            _strides(kv_layer),
            self._block_size,
            heads // kv_heads,
            self._compiled.attention.tile_of(heads // kv_heads),
            1 if rows >= self._num_threads else kv_heads,  # with enough rows, one thread per row
            self._row_tables,
            self._row_lengths,
            rule.window,
            np.float32(rule.scale),
            np.float32(rule.softcap),
            _array(output),
        )
        return output

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


def _compiled() -> _CompiledCpuKernels | None:
    """None where numba is not installed or has no cache directory."""
    try:
        attention, norm = import_module("quire.kernels.cpu.attention"), import_module("quire.kernels.cpu.norm")
        num_threads = torch.get_num_threads()
        attention.use_threads(num_threads)
        torch.set_num_threads(num_threads)  # where both share one OpenMP, numba's first use sets all cores for both
        has_amx = import_module("quire.kernels.cpu.amx").has_amx() and torch.cpu._init_amx()
        return _CompiledCpuKernels(attention, norm, import_module("quire.kernels.cpu.amx_matmul") if has_amx else None)
    except (ImportError, RuntimeError):
        return None


def _is_tiles(packed: Tensor) -> bool:
    return packed.dim() == 5


def _array(x: Tensor) -> Words:
    """The same memory, bfloat16 as its bits."""
    array: Words = x.view(_WORDS[x.dtype]).numpy()
    return array


def _flat(x: Tensor) -> Words:
    """The same memory from the first element to the last, gaps included."""
    assert x.stride(-1) == 1, x.stride()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return _array(x.as_strided((extent,), (1,)))


def _strides(x: Tensor) -> NDArray[np.uintp]:
    return np.array(x.stride(), dtype=np.uintp)

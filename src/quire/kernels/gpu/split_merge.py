"""Joins what several programs gathered from their shares of one row's keys: the last to arrive does it.

Compiled into the kernels whose programs may share keys. The counters of `arrivals` are zero again afterwards, so one
scratch serves layer after layer. Knows nothing of keys or queries.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.key_tile import LOWEST, divided


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Room for parts of rows. For one stream at a time; what it holds between calls matters only in `arrivals`."""

    parts: Tensor  # [parts * dim] float32: sums of values, weighted
    maxima: Tensor  # [parts] float32: the exponents the weights are relative to
    sums: Tensor  # [parts] float32: sums of the weights
    arrivals: Tensor  # [counters] int32: zeros between calls

    @staticmethod
    def allocate(num_parts: int, num_counters: int, dim: int, device: torch.device) -> "SplitScratch":
        return SplitScratch(
            parts=torch.empty(num_parts * dim, dtype=torch.float32, device=device),
            maxima=torch.empty(num_parts, dtype=torch.float32, device=device),
            sums=torch.empty(num_parts, dtype=torch.float32, device=device),
            arrivals=torch.zeros(num_counters, dtype=torch.int32, device=device),
        )

    def holds(self, num_parts: int, num_counters: int, dim: int) -> bool:
        enough = self.maxima.numel() >= num_parts and self.parts.numel() >= num_parts * dim
        return enough and self.arrivals.numel() >= num_counters


@triton.jit
def store_part(
    parts, maxima, sums, first_part, gathered, running_max, running_sum, members, dims,
    GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """gathered: [members, dims], of which GROUP and DIM count."""
    numbers = first_part + members
    present = members < GROUP
    tl.store(maxima + numbers, running_max, mask=present)
    tl.store(sums + numbers, running_sum, mask=present)
    inside = present[:, None] & (dims[None, :] < DIM)
    tl.store(parts + numbers[:, None] * DIM + dims[None, :], gathered, mask=inside)


@triton.jit
def merge_parts(
    parts, maxima, sums, first_part, num_splits, members, dims,
    AT_ONCE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """[members, dims] of all splits; part = first_part + split * GROUP + member. AT_ONCE splits are in flight."""
    top = tl.full([members.shape[0]], LOWEST, tl.float32)
    total = tl.zeros([members.shape[0]], tl.float32)
    gathered = tl.zeros([members.shape[0], dims.shape[0]], tl.float32)
    for start in range(0, num_splits, AT_ONCE):
        splits = start + tl.arange(0, AT_ONCE)
        numbers = first_part + splits[:, None] * GROUP + members[None, :]
        present = (splits < num_splits)[:, None] & (members < GROUP)[None, :]
        exponents = tl.load(maxima + numbers, mask=present, other=float("-inf"), cache_modifier=".cg")
        weights = tl.load(sums + numbers, mask=present, other=0.0, cache_modifier=".cg")
        inside = present[:, :, None] & (dims < DIM)[None, None, :]
        pointers = parts + numbers[:, :, None] * DIM + dims[None, None, :]
        part = tl.load(pointers, mask=inside, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(exponents, 0))
        fade = tl.exp2(top - new_top)
        shares = tl.exp2(exponents - new_top[None, :])
        total = total * fade + tl.sum(weights * shares, 0)
        gathered = gathered * fade[:, None] + tl.sum(part * shares[:, :, None], 0)
        top = new_top
    return divided(gathered, total)

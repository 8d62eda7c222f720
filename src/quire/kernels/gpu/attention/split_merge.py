"""Joins what several programs gathered from their shares of one row's keys: the last to arrive does it.

Compiled into the kernels whose programs may share keys. The counters of `arrivals` are zero again afterwards, so one
scratch serves layer after layer. Knows nothing of keys or queries.

Which of several programs is the last: it sees what all others stored, and goes on for them without another launch.

A counter for all of them says so; it is zero again afterwards, replay after replay.

How much shared memory a program may have on this card, and how much one takes that attends to tiles of keys.

Tiles were measured on a card with 227 KiB for a program. Most others have 99 KiB (L4, A10, L40S, any RTX), and there a
kernel that asks for more is not slow: it cannot be launched at all. Knows sizes alone.
"""

import sys
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from quire.kernels.gpu.attention.softmax_tile import LOWEST, divided


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
    parts, maxima, sums, first_part, gathered, running_max, running_sum, sequences, dims,
    GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """gathered: [members, dims], of which GROUP and DIM count."""
    numbers = first_part + sequences
    present = sequences < GROUP
    tl.store(maxima + numbers, running_max, mask=present)
    tl.store(sums + numbers, running_sum, mask=present)
    inside = present[:, None] & (dims[None, :] < DIM)
    tl.store(parts + numbers[:, None] * DIM + dims[None, :], gathered, mask=inside)


@triton.jit
def merge_parts(
    parts, maxima, sums, first_part, num_splits, sequences, dims,
    AT_ONCE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """[members, dims] of all splits; part = first_part + split * GROUP + member. AT_ONCE splits are in flight."""
    top = tl.full([sequences.shape[0]], LOWEST, tl.float32)
    total = tl.zeros([sequences.shape[0]], tl.float32)
    gathered = tl.zeros([sequences.shape[0], dims.shape[0]], tl.float32)
    for start in range(0, num_splits, AT_ONCE):
        splits = start + tl.arange(0, AT_ONCE)
        numbers = first_part + splits[:, None] * GROUP + sequences[None, :]
        present = (splits < num_splits)[:, None] & (sequences < GROUP)[None, :]
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


@triton.jit
def is_last(arrivals, num_programs):
    """Counts this program in; true for the last, which then sees what the others stored."""
    tl.debug_barrier()  # every thread of this program has stored its share before one of them counts
    before = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    last = before == num_programs - 1
    if last:
        tl.store(arrivals, 0)
    return last


FEWEST_STAGES = 2  # with which anything is loaded ahead
_BESIDE = 2048  # bytes that maxima and sums may take, when they go from warp to warp


@cache
def shared_room() -> int:
    """Bytes: what Triton holds a kernel against. No bound where kernels are interpreted."""
    if knobs.runtime.interpret:
        return sys.maxsize
    properties = driver.active.utils.get_device_properties(driver.active.get_current_device())
    return int(properties["max_shared_mem"])


def attention_bytes(rows: int, keys: int, dim: int, element_bytes: int, stages: int) -> int:
    """Of a program: its queries, their weights of a tile of keys, and as many tiles of keys and values as it loads
    ahead. `rows` and `dim` as they are padded. No less than what kernels compiled for capability 8.0 and
    8.9 take."""
    loaded = 2 * keys * dim * max(stages - 1, 1)
    return element_bytes * (rows * dim + rows * keys + loaded) + _BESIDE

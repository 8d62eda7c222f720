"""Split-KV: merges partial results of programs that share one row's keys; shared-memory budget of a program.

The last program to arrive merges; it sees what all others stored, so no second launch is needed. The counters in
`arrivals` are zero again afterwards, so one scratch serves layer after layer and replay after replay.

Tiles were measured on a GPU with 227 KiB of shared memory per program. Most others have 99 KiB (L4, A10, L40S, any
RTX), and there a kernel that needs more cannot be launched at all. Does not depend on keys or queries.
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

from quire.kernels.gpu.attention.softmax_tile import LOWEST, normalize

MAXIMA_AT_ONCE = tl.constexpr(64)  # splits of a row: the most that a schedule of decodes has


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Scratch for partial results. For one stream at a time; between calls only `arrivals` must keep its zeros."""

    partials: Tensor  # [partials * dim] float32: unnormalised weighted sums of values
    maxima: Tensor  # [partials] float32: running maxima of the scores
    sums: Tensor  # [partials] float32: sums of the weights
    arrivals: Tensor  # [counters] int32: zeros between calls

    @staticmethod
    def allocate(num_partials: int, num_counters: int, dim: int, device: torch.device) -> "SplitScratch":
        return SplitScratch(
            partials=torch.empty(num_partials * dim, dtype=torch.float32, device=device),
            maxima=torch.empty(num_partials, dtype=torch.float32, device=device),
            sums=torch.empty(num_partials, dtype=torch.float32, device=device),
            arrivals=torch.zeros(num_counters, dtype=torch.int32, device=device),
        )

    def holds(self, num_partials: int, num_counters: int, dim: int) -> bool:
        enough = self.maxima.numel() >= num_partials and self.partials.numel() >= num_partials * dim
        return enough and self.arrivals.numel() >= num_counters


@triton.jit
def store_partial(
    partials, maxima, sums, first_partial, acc, running_max, running_sum, rows, dims,
    GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """acc: [rows, dims], padded; GROUP and DIM of them are stored."""
    numbers = first_partial + rows
    present = rows < GROUP
    tl.store(maxima + numbers, running_max, mask=present)
    tl.store(sums + numbers, running_sum, mask=present)
    inside = present[:, None] & (dims[None, :] < DIM)
    tl.store(partials + numbers[:, None] * DIM + dims[None, :], acc, mask=inside)


@triton.jit
def merge_partials(
    partials, maxima, sums, first_partial, num_splits, rows, dims,
    AT_ONCE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """[rows, dims] of all splits; partial = first_partial + split * GROUP + row. AT_ONCE splits are in flight."""
    top = tl.full([rows.shape[0]], LOWEST, tl.float32)
    total = tl.zeros([rows.shape[0]], tl.float32)
    acc = tl.zeros([rows.shape[0], dims.shape[0]], tl.float32)
    for start in range(0, num_splits, AT_ONCE):
        splits = start + tl.arange(0, AT_ONCE)
        numbers = first_partial + splits[:, None] * GROUP + rows[None, :]
        present = (splits < num_splits)[:, None] & (rows < GROUP)[None, :]
        exponents = tl.load(maxima + numbers, mask=present, other=float("-inf"), cache_modifier=".cg")
        weights = tl.load(sums + numbers, mask=present, other=0.0, cache_modifier=".cg")
        inside = present[:, :, None] & (dims < DIM)[None, None, :]
        pointers = partials + numbers[:, :, None] * DIM + dims[None, None, :]
        partial = tl.load(pointers, mask=inside, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(exponents, 0))
        rescale = tl.exp2(top - new_top)
        shares = tl.exp2(exponents - new_top[None, :])
        total = total * rescale + tl.sum(weights * shares, 0)
        acc = acc * rescale[:, None] + tl.sum(partial * shares[:, :, None], 0)
        top = new_top
    return normalize(acc, total)


@triton.jit
def merge_rows(
    partials, maxima, sums, first_partial, num_splits, rows, dims,
    AT_ONCE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The same for many rows, whose splits are added one by one: nothing is exchanged between threads, and no load
    waits for another, because the maxima of all splits are known before."""
    top = tl.full([rows.shape[0]], LOWEST, tl.float32)
    for start in range(0, num_splits, MAXIMA_AT_ONCE):
        splits = start + tl.arange(0, MAXIMA_AT_ONCE)
        numbers = first_partial + splits[:, None] * GROUP + rows[None, :]
        present = (splits < num_splits)[:, None] & (rows < GROUP)[None, :]
        exponents = tl.load(maxima + numbers, mask=present, other=float("-inf"), cache_modifier=".cg")
        top = tl.maximum(top, tl.max(exponents, 0))
    total = tl.zeros([rows.shape[0]], tl.float32)
    acc = tl.zeros([rows.shape[0], dims.shape[0]], tl.float32)
    for start in range(0, num_splits, AT_ONCE):
        for each in tl.static_range(AT_ONCE):
            places = (start + each) * GROUP + rows
            present = (rows < GROUP) & (places < num_splits * GROUP)
            numbers = first_partial + places
            share = tl.exp2(tl.load(maxima + numbers, mask=present, other=float("-inf"), cache_modifier=".cg") - top)
            total += tl.load(sums + numbers, mask=present, other=0.0, cache_modifier=".cg") * share
            inside = present[:, None] & (dims < DIM)[None, :]
            pointers = partials + numbers[:, None] * DIM + dims[None, :]
            acc += tl.load(pointers, mask=inside, other=0.0, cache_modifier=".cg") * share[:, None]
    return normalize(acc, total)


@triton.jit
def merge_splits(
    partials, maxima, sums, first_partial, num_splits, rows, dims,
    AT_ONCE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, MANY_ROWS: tl.constexpr,
):  # fmt: skip
    """As was faster on an H200 (docs/performance/ledger, section 60)."""
    if MANY_ROWS:
        merged = merge_rows(partials, maxima, sums, first_partial, num_splits, rows, dims, AT_ONCE, GROUP, DIM)
    else:
        merged = merge_partials(partials, maxima, sums, first_partial, num_splits, rows, dims, AT_ONCE, GROUP, DIM)
    return merged


@triton.jit
def is_last(arrivals, num_programs):
    """Count this program; true for the last to arrive, which then sees what the others stored."""
    tl.debug_barrier()  # all threads of this program have stored before one of them counts
    before = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    last = before == num_programs - 1
    if last:
        tl.store(arrivals, 0)
    return last


MIN_STAGES = 2  # the fewest that prefetch anything
_REDUCTION_BYTES = 2048  # for maxima and sums exchanged between warps


@cache
def shared_memory_budget() -> int:
    """Bytes of shared memory per program, the limit Triton checks. Unbounded in the interpreter."""
    if knobs.runtime.interpret:
        return sys.maxsize
    properties = driver.active.utils.get_device_properties(driver.active.get_current_device())
    return int(properties["max_shared_mem"])


def attention_bytes(rows: int, keys: int, dim: int, element_bytes: int, stages: int) -> int:
    """Shared memory of a program: its queries, their weights for a tile of keys, and the prefetched tiles of keys and
    values. `rows` and `dim` are padded. An upper bound of what kernels compiled for capability 8.0 and 8.9 take."""
    loaded = 2 * keys * dim * max(stages - 1, 1)
    return element_bytes * (rows * dim + rows * keys + loaded) + _REDUCTION_BYTES

"""What runs before the first request: a step of padding, so that no request waits for compilation and weight packing,
and measurements: the times of a decode, of a chunk, and of the copy of a block to the host."""

import time
from collections.abc import Callable
from itertools import accumulate
from statistics import median

import torch

from quire.core.ids import NULL_BLOCK, BlockId
from quire.core.moves import Move, Place, Tier
from quire.kernels.interface import StepLayout
from quire.models.interface import Model
from quire.runner.cuda_graphs import StepTimes
from quire.runner.kv_store import KvStores

# Blocks per copy and number of rounds when the transfer time is measured.
_MEASURED_BLOCKS = 8
_MEASURED_ROUNDS = 5
_POSITIONS = 2  # of padding: a context may be shorter than a block
_TIMED_CHUNK = 32  # tokens: enough that a step waits for arithmetic, not for memory


@torch.inference_mode()
def warm_up(model: Model, stores: KvStores, *, samples: bool = True) -> None:
    """Run a chunk of two tokens and a decode, in the null block, which is never read. A pipeline stage before the last
    does not sample."""
    _run_padding(model, stores, 2, 1, samples=samples)


@torch.inference_mode()
def time_steps(model: Model, stores: KvStores, clock: Callable[[], float], *, samples: bool = True) -> StepTimes:
    """Times of a decode and of a chunk, on a device that computes a step before it returns. Call after `warm_up`."""

    def seconds(length: int) -> float:
        began_s = clock()
        _run_padding(model, stores, length, samples=samples)
        return clock() - began_s

    # The shorter time: the first step of a kind may allocate, and other programs may interfere.
    decode_s, chunk_s = (min(seconds(length), seconds(length)) for length in (1, _TIMED_CHUNK))
    return StepTimes(decode_s, chunk_s / _TIMED_CHUNK)


def _run_padding(model: Model, stores: KvStores, *lengths: int, samples: bool) -> None:
    """A step with a chunk of each length, in the null block."""
    kv, counts = stores.device, torch.tensor(lengths)
    device = kv.device
    places = torch.cat([torch.arange(length, device=device) for length in lengths]) % stores.block_size
    width = max(2, -(-max(lengths) // stores.block_size))
    layout = StepLayout(
        positions=places % _POSITIONS,
        slots=places + NULL_BLOCK * stores.block_size,
        tables=torch.full((len(lengths), width), NULL_BLOCK, dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
        context_lengths=counts.int().to(device),
        max_lengths=counts.repeat_interleave(counts).to(device),
    )
    hidden = model.forward(torch.zeros(len(places), dtype=torch.int64, device=device), layout, kv)
    if samples:
        model.logits(hidden[-len(lengths) :])


def measure_transfer(stores: KvStores, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds to copy one block between device and host: the median of some copies out and back.

    Call before the host tier holds anything. The contents of the device stay.
    """
    assert stores.host is not None, "there is no host tier to measure"
    count = min(_MEASURED_BLOCKS, len(stores.device), len(stores.host))
    here = [Place(Tier.DEVICE, BlockId(block)) for block in range(count)]
    there = [Place(Tier.HOST, BlockId(block)) for block in range(count)]
    out = [Move(src, dst) for src, dst in zip(here, there, strict=True)]
    back = [Move(dst, src) for src, dst in zip(here, there, strict=True)]
    seconds = []
    for _ in range(_MEASURED_ROUNDS + 1):
        begun = clock()
        stores.carry(out)
        stores.carry(back)
        if stores.device.is_cuda:
            torch.cuda.synchronize(stores.device.device)
        seconds.append(clock() - begun)
    return median(seconds[1:]) / (2 * count)  # the first round touches fresh pages

"""Times of single kernels on a GPU, beside the floor that bytes or products set. Knows shapes, no models.

Each kernel is recorded many times over different layers of a store larger than the cache, and the recording replayed:
what a launch costs the host is not in the figure, as it is not in a served step.
"""

from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels.contract import AttentionRule, Ragged
from quire.kernels.gpu.attention import GpuAttention
from quire.kernels.gpu.hopper_chunks import HopperChunks

_BLOCK_SIZE = 16
_CACHE_BYTES = 1 << 28  # more than any GPU keeps on the chip
_REPLAYS = 7
_LAUNCHES = 12  # in a replay, at the least: as in a step, where only the first begins with nothing before it


class HeadShape(NamedTuple):
    """Heads of an attention layer."""

    queries: int = 32
    keys: int = 8
    dim: int = 128


class Figure(NamedTuple):
    """The time of one launch, and the rate that it comes to."""

    name: str
    microseconds: float
    rate: float
    unit: str  # of the rate: TB/s or TFLOP/s


# Rows x keys, and new tokens: the shapes that docs/performance/gpu.md has the field's figures for.
DECODES = ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (64, 4096), (16, 16384))
CHUNKS = (2048, 8192, 32768)


def measure_kernels(shape: HeadShape, dtype: torch.dtype = torch.bfloat16) -> Iterator[Figure]:
    """One figure after the other, as it is found."""
    if not torch.cuda.is_available():
        raise ConfigError("There is no GPU here; the times of its kernels need one.", param="device")
    for rows, length in DECODES:
        yield measure_decode(rows, length, shape, dtype)
    for length in CHUNKS:
        yield measure_chunk(length, shape, dtype)


def measure_decode(rows: int, length: int, shape: HeadShape, dtype: torch.dtype) -> Figure:
    """As a step of so many rows has it."""
    layers = _layers(rows * length, shape, dtype)
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    lengths = torch.full((rows,), length, dtype=torch.int32, device="cuda")
    places = lengths.long() - 1
    ragged = Ragged(places, places, _tables(rows, length), starts, lengths, places, num_decodes=rows)
    query = torch.randn(rows, shape.queries, shape.dim, dtype=dtype, device="cuda")
    rule = AttentionRule(shape.dim**-0.5)
    attention = GpuAttention(ragged, rows)
    seconds = _seconds(layers, lambda kv: attention.attend(query, kv, rule))
    num_bytes = 2 * rows * length * shape.keys * shape.dim * dtype.itemsize
    return Figure(f"decode {rows}x{length}", seconds * 1e6, num_bytes / seconds / 1e12, "TB/s")


def measure_chunk(length: int, shape: HeadShape, dtype: torch.dtype) -> Figure:
    """As a step of one prompt has it, by whichever of our kernels is for it; what is done once a step is done once."""
    layers = _layers(length, shape, dtype)[:4]
    starts = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    places = torch.arange(length, device="cuda")
    ragged = Ragged(places, places, _tables(1, length), starts, starts[1:], places)
    query = torch.randn(length, shape.queries, shape.dim, dtype=dtype, device="cuda")
    rule = AttentionRule(shape.dim**-0.5)
    attention = GpuAttention(ragged, 0, hopper=HopperChunks.find())
    seconds = _seconds(layers, lambda kv: attention.attend(query, kv, rule))
    operations = 2 * shape.queries * shape.dim * length * length  # two products over half the square
    return Figure(f"chunk {length}", seconds * 1e6, operations / seconds / 1e12, "TFLOP/s")


def _layers(num_tokens: int, shape: HeadShape, dtype: torch.dtype) -> list[Tensor]:
    """Layers of one store, together larger than the cache: [blocks, 2, block_size, kv_heads, dim] each."""
    layer_bytes = 2 * num_tokens * shape.keys * shape.dim * dtype.itemsize
    count = max(2, min(32, _CACHE_BYTES // layer_bytes + 1))
    num_blocks = num_tokens // _BLOCK_SIZE + 1
    store = torch.randn(num_blocks, count, 2, _BLOCK_SIZE, shape.keys, shape.dim, dtype=dtype, device="cuda")
    return [store[:, layer] for layer in range(count)]


def _tables(rows: int, length: int) -> Tensor:
    """Every row its own blocks, scattered over the store. [rows, width] int32."""
    width = length // _BLOCK_SIZE
    return (1 + torch.randperm(rows * width, device="cuda")).view(rows, width).int()


def _seconds(layers: list[Tensor], launch: Callable[[Tensor], object]) -> float:
    """Of one launch: the median over replays of launches for one layer after the other."""
    layers = layers * -(-_LAUNCHES // len(layers))
    launch(layers[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            launch(layer)
    graph.replay()
    found: list[float] = []
    for _ in range(_REPLAYS):
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record()
        graph.replay()
        done.record()
        done.synchronize()
        found.append(begun.elapsed_time(done) / 1000 / len(layers))
    return median(found)

"""Times of attention on a GPU, beside the floor that bytes or products set, and beside a library's where one is named.

Launches for different layers of a store larger than the cache are recorded, and the recording replayed: what a launch
costs the host is not in the figure, as it is not in a served step. Whoever is compared takes turns.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from quire.bench.attention_work import WORKS, Work
from quire.core.errors import ConfigError
from quire.kernels.attention_choice import AttentionNeeds, Surroundings
from quire.kernels.contract import AttentionRule, Ragged
from quire.kernels.find_backends import find_backends
from quire.kernels.gpu.attention import GpuAttention
from quire.kernels.gpu.backends.share import OWN, Backends
from quire.kernels.gpu.hopper_chunks import HopperChunks
from quire.kernels.select import settle_attention
from quire.runner.replay import Recorder, Replay

_CACHE_BYTES = 1 << 28  # more than any GPU keeps on the chip
_MOST_LAYERS = 32
_REPLAYS = 7
_LAUNCHES = 12  # in a replay, at the least: as in a step, where only the first begins with nothing before it


class HeadShape(NamedTuple):
    """An attention layer."""

    queries: int = 32
    keys: int = 8
    dim: int = 128
    window: int = 0  # 0: none
    softcap: float = 0.0  # 0: none
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16

    @property
    def rule(self) -> AttentionRule:
        return AttentionRule(self.dim**-0.5, self.window, self.softcap)

    def num_bytes(self, num_keys: int) -> int:
        """Of so many keys and their values."""
        return 2 * num_keys * self.keys * self.dim * self.dtype.itemsize


class Figure(NamedTuple):
    """The time of one launch, and the rate that it comes to."""

    name: str
    microseconds: float
    rate: float
    unit: str  # of the rate: TB/s or TFLOP/s
    beside_microseconds: float | None = None  # of the library that was named


class Step(NamedTuple):
    """What a layer is given."""

    ragged: Ragged
    query: Tensor  # [tokens, heads, dim]
    layers: list[Tensor]  # [blocks, 2, block_size, kv_heads, dim] each


def measure_kernels(shape: HeadShape, beside: str | None = None, works: Sequence[Work] = WORKS) -> Iterator[Figure]:
    """One figure after the other, as it is found."""
    if not torch.cuda.is_available():
        raise ConfigError("There is no GPU here; the times of its kernels need one.", param="device")
    backends = None if beside is None else library(beside, shape)
    for work in works:
        yield measure(work, shape, backends)


def library(name: str, shape: HeadShape) -> Backends:
    """A library's attention, after a small trial."""
    device = torch.device("cuda")
    needs = AttentionNeeds(shape.queries, shape.keys, shape.dim, shape.dtype, shape.block_size, (shape.rule,))
    here = Surroundings(torch.cuda.get_device_capability(), find_backends())
    backends, _ = settle_attention(name, needs, here, device)
    assert backends.recordable, name
    return backends


def measure(work: Work, shape: HeadShape, beside: Backends | None = None) -> Figure:
    """`beside`: a library, which takes part if it does such work itself."""
    step = step_of(work, shape, torch.device("cuda"))
    contestants = [_attention(step, OWN)]
    if beside is not None and (theirs := _attention(step, beside)).is_others:
        contestants.append(theirs)
    seconds = _seconds(step, shape.rule, contestants)
    rate, unit = shape.num_bytes(work.num_read(shape.window)) / seconds[0], "TB/s"
    if not work.decodes:  # two products, of which each pair has a multiplication and an addition for every dim
        rate, unit = 4 * shape.queries * shape.dim * work.num_scores(shape.window) / seconds[0], "TFLOP/s"
    return Figure(work.name, seconds[0] * 1e6, rate / 1e12, unit, seconds[1] * 1e6 if seconds[1:] else None)


def step_of(work: Work, shape: HeadShape, device: torch.device) -> Step:
    """Every sequence has its own blocks, scattered over a store whose layers together exceed the cache."""
    lengths = [span.length for span in work.spans]
    news = [span.num_new for span in work.spans]
    num_blocks = [-(-length // shape.block_size) for length in lengths]
    scattered = 1 + torch.randperm(sum(num_blocks), device=device).int()
    tables = torch.nn.utils.rnn.pad_sequence([*torch.split(scattered, num_blocks)], batch_first=True)
    starts = torch.tensor([0, *news], device=device).cumsum(0).int()
    context_lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    places = torch.arange(sum(news), device=device)  # attention reads neither positions nor slots
    num_decodes = len(lengths) if work.decodes else 0
    ragged = Ragged(places, places, tables, starts, context_lengths, places, num_decodes)
    layer_bytes = shape.num_bytes(sum(num_blocks) * shape.block_size)
    num_layers = max(2, min(_MOST_LAYERS, _CACHE_BYTES // layer_bytes + 1))
    size = (sum(num_blocks) + 1, num_layers, 2, shape.block_size, shape.keys, shape.dim)
    store = torch.randn(size, dtype=shape.dtype, device=device)
    query = torch.randn(sum(news), shape.queries, shape.dim, dtype=shape.dtype, device=device)
    return Step(ragged, query, [store[:, layer] for layer in range(num_layers)])


def _attention(step: Step, backends: Backends) -> GpuAttention:
    return GpuAttention(step.ragged, step.ragged.num_decodes, backends, HopperChunks.find())


def _seconds(step: Step, rule: AttentionRule, contestants: Sequence[GpuAttention]) -> list[float]:
    """Of one launch by each of them: the median over replays, which they take turns at."""
    layers = step.layers * -(-_LAUNCHES // len(step.layers))
    replays = [_recorded(attention, step.query, layers, rule) for attention in contestants]
    found: list[list[float]] = [[] for _ in contestants]
    for _ in range(_REPLAYS):
        for replay, times in zip(replays, found, strict=True):
            begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begun.record()
            replay()
            done.record()
            done.synchronize()
            times.append(begun.elapsed_time(done) / 1000 / len(layers))
    return [median(times) for times in found]


def _recorded(attention: GpuAttention, query: Tensor, layers: Sequence[Tensor], rule: AttentionRule) -> Replay:
    """One layer after the other; what is done once a step is done before."""

    def attend() -> Tensor:
        for layer in layers[:-1]:
            attention.attend(query, layer, rule)
        return attention.attend(query, layers[-1], rule)

    replay = Recorder(query.device).record(attend)
    replay()
    return replay

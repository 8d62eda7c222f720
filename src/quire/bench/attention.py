"""Times of attention on a GPU, beside the floor that bytes or products set, and beside a library's where one is named.

Launches for different layers of a store larger than the cache are recorded, and the recording replayed: what a launch
costs the host is not in the figure, as it is not in a served step. Whoever is compared takes turns.

Steps that attention is measured by: how long their sequences are, and what they ask for at the least. No torch.
"""

import re
from collections.abc import Iterator, Sequence
from random import Random
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.errors import ConfigError, shown
from quire.kernels.attention_backends import AttentionEnvironment, AttentionNeeds, find_backends
from quire.kernels.gpu.attention.dispatch import GpuAttention
from quire.kernels.gpu.attention.hopper_dispatch import HopperPrefill
from quire.kernels.gpu.backends.interface import OWN, AttentionBackends
from quire.kernels.interface import AttentionRule, StepLayout
from quire.kernels.select import select_attention
from quire.runner.cuda_graphs import GraphCapturer, Replay

_DECODE = re.compile(r"decode ([0-9]{1,9})x([0-9]{1,9})(?:\.\.([0-9]{1,9}))?")
_CHUNKS = re.compile(r"chunks? (?:([0-9]{1,9})x)?([0-9]{1,9})(?:\+([0-9]{1,9}))?")
_MOST_KEYS = 1 << 23  # of all sequences: 32 GiB a layer with 8 key heads of 128


class QuerySpan(NamedTuple):
    """One sequence of a step."""

    num_before: int  # keys that are there
    num_new: int  # tokens

    @property
    def length(self) -> int:
        return self.num_before + self.num_new


class AttentionWork(NamedTuple):
    """One layer of one step: decodes alone, or chunks alone."""

    name: str
    spans: tuple[QuerySpan, ...]

    @property
    def decodes(self) -> bool:
        return all(span.num_new == 1 for span in self.spans)

    def num_read(self, window: int) -> int:
        """Keys that some query sees, each counted once; window: 0 for none."""
        return sum(min(each.length, window + each.num_new - 1 if window else each.length) for each in self.spans)

    def num_scores(self, window: int) -> int:
        """Pairs of a query and a key that it sees."""
        return sum(_num_scores(each.length, window) - _num_scores(each.num_before, window) for each in self.spans)


def _num_scores(length: int, window: int) -> int:
    """Of so many tokens from the first on."""
    growing = min(length, window or length)
    return growing * (growing + 1) // 2 + (length - growing) * window


def even(rows: int, length: int) -> AttentionWork:
    return AttentionWork(f"decode {rows}x{length}", (QuerySpan(length - 1, 1),) * rows)


def uneven(rows: int, shortest: int, longest: int) -> AttentionWork:
    """Lengths at equal distances, in an order of no meaning."""
    lengths = [shortest + (longest - shortest) * row // (rows - 1) for row in range(rows)]
    Random(0).shuffle(lengths)
    return AttentionWork(f"decode {rows}x{shortest}..{longest}", tuple(QuerySpan(length - 1, 1) for length in lengths))


def chunks(count: int, num_new: int, num_before: int = 0) -> AttentionWork:
    before = f"+{num_before}" if num_before else ""
    name = f"chunk {num_new}{before}" if count == 1 else f"chunks {count}x{num_new}{before}"
    return AttentionWork(name, (QuerySpan(num_before, num_new),) * count)


# Those that docs/performance/gpu.md has the field's figures for, and those that differ from them as real steps do.
WORKS = (
    even(1, 1024), even(8, 1024), even(32, 1024), even(64, 1024), even(128, 1024), even(256, 1024), even(64, 4096),
    even(16, 16384), uneven(64, 100, 1900), uneven(256, 100, 1900),
    chunks(1, 512), chunks(1, 2048), chunks(1, 8192), chunks(1, 32768), chunks(4, 512), chunks(16, 128, 896),
    chunks(1, 2048, 6144),
)  # fmt: skip


def find(name: str) -> AttentionWork:
    """A step by such a name, whatever its numbers: decode 24x700, decode 9x10..2000, chunk 300+5000, chunks 3x40."""
    decode, chunk = _DECODE.fullmatch(name), _CHUNKS.fullmatch(name)
    if decode is not None:
        rows, shortest, longest = int(decode[1]), int(decode[2]), int(decode[3] or decode[2])
        _check(name, rows * longest, rows > 0 and 0 < shortest <= longest and (rows > 1 or decode[3] is None))
        return even(rows, shortest) if decode[3] is None else uneven(rows, shortest, longest)
    if chunk is not None:
        count, num_new, num_before = int(chunk[1] or 1), int(chunk[2]), int(chunk[3] or 0)
        _check(name, count * (num_new + num_before), count > 0 and num_new > 1)
        return chunks(count, num_new, num_before)
    raise ConfigError(
        f"there is no step {shown(name)}; steps are written as in the table: decode 64x4096 (rows, and keys of each), "
        "decode 64x100..1900, chunk 2048+6144 (tokens behind so many keys), chunks 16x128+896."
    )


def _check(name: str, most_keys: int, is_step: bool) -> None:
    if not is_step:
        raise ConfigError(
            f"{name} is no step: there is 1 row or chunk at the least, 1 key to a row and 2 tokens to a chunk; of two "
            "lengths, for 2 rows or more, the shorter comes first."
        )
    if most_keys > _MOST_KEYS:
        raise ConfigError(
            f"{name} has up to {most_keys:,} keys, more than the {_MOST_KEYS:,} that are measured at most; ask for "
            "fewer or shorter sequences."
        )


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


class KernelFigure(NamedTuple):
    """The time of one launch, and the rate that it comes to."""

    name: str
    microseconds: float
    rate: float
    unit: str  # of the rate: TB/s or TFLOP/s
    beside_microseconds: float | None = None  # of the library that was named


class KernelStep(NamedTuple):
    """What a layer is given."""

    layout: StepLayout
    query: Tensor  # [tokens, heads, dim]
    layers: list[Tensor]  # [blocks, 2, block_size, kv_heads, dim] each


def measure_kernels(
    shape: HeadShape, beside: str | None = None, works: Sequence[AttentionWork] = WORKS
) -> Iterator[KernelFigure]:
    """One figure after the other, as it is found."""
    if not torch.cuda.is_available():
        raise ConfigError("There is no GPU here; the times of its kernels need one.", param="device")
    backends = None if beside is None else library(beside, shape)
    for work in works:
        yield measure(work, shape, backends)


def library(name: str, shape: HeadShape) -> AttentionBackends:
    """A library's attention, after a small trial."""
    device = torch.device("cuda")
    needs = AttentionNeeds(shape.queries, shape.keys, shape.dim, shape.dtype, shape.block_size, (shape.rule,))
    here = AttentionEnvironment(torch.cuda.get_device_capability(), find_backends())
    backends, _ = select_attention(name, needs, here, device)
    assert backends.capturable, name
    return backends


def measure(work: AttentionWork, shape: HeadShape, beside: AttentionBackends | None = None) -> KernelFigure:
    """`beside`: a library, which takes part if it does such work itself."""
    step = step_of(work, shape, torch.device("cuda"))
    contestants = [_attention(step, OWN)]
    if beside is not None and (theirs := _attention(step, beside)).uses_backend:
        contestants.append(theirs)
    seconds = _seconds(step, shape.rule, contestants)
    rate, unit = shape.num_bytes(work.num_read(shape.window)) / seconds[0], "TB/s"
    if not work.decodes:  # two products, of which each pair has a multiplication and an addition for every dim
        rate, unit = 4 * shape.queries * shape.dim * work.num_scores(shape.window) / seconds[0], "TFLOP/s"
    return KernelFigure(work.name, seconds[0] * 1e6, rate / 1e12, unit, seconds[1] * 1e6 if seconds[1:] else None)


def step_of(work: AttentionWork, shape: HeadShape, device: torch.device) -> KernelStep:
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
    layout = StepLayout(places, places, tables, starts, context_lengths, places, num_decodes)
    layer_bytes = shape.num_bytes(sum(num_blocks) * shape.block_size)
    num_layers = max(2, min(_MOST_LAYERS, _CACHE_BYTES // layer_bytes + 1))
    size = (sum(num_blocks) + 1, num_layers, 2, shape.block_size, shape.keys, shape.dim)
    store = torch.randn(size, dtype=shape.dtype, device=device)
    query = torch.randn(sum(news), shape.queries, shape.dim, dtype=shape.dtype, device=device)
    return KernelStep(layout, query, [store[:, layer] for layer in range(num_layers)])


def _attention(step: KernelStep, backends: AttentionBackends) -> GpuAttention:
    return GpuAttention(step.layout, step.layout.num_decodes, backends, HopperPrefill.find())


def _seconds(step: KernelStep, rule: AttentionRule, contestants: Sequence[GpuAttention]) -> list[float]:
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

    replay = GraphCapturer(query.device).capture(attend)
    replay()
    return replay

"""Attention kernels on a GPU: times of a launch, bandwidth or FLOP rate, and the times of another library.

Launches for the layers of a store larger than the L2 cache are captured as a CUDA graph, which is replayed: the host
cost of a launch is not in the figure, as in a served step. Compared kernels alternate.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from quire.bench.attention_steps import STANDARD_STEPS, AttentionStep
from quire.core.errors import ConfigError
from quire.kernels.attention_backends import AttentionNeeds, AttentionPlatform, find_backends
from quire.kernels.gpu.attention.dispatch import GpuAttention
from quire.kernels.gpu.attention.hopper_dispatch import HopperPrefill
from quire.kernels.gpu.backends.interface import OWN, AttentionBackends
from quire.kernels.interface import AttentionRule, StepLayout
from quire.kernels.select import select_attention
from quire.runner.cuda_graphs import GraphCapturer, Replay

_CACHE_BYTES = 1 << 28  # more than the L2 cache of any GPU
_MAX_LAYERS = 32
_REPLAYS = 7
_LAUNCHES = 12  # in a replay, at least: as in a step, where only the first launch follows none


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
        """Of `num_keys` keys and their values."""
        return 2 * num_keys * self.keys * self.dim * self.dtype.itemsize


class KernelFigure(NamedTuple):
    """The time of one launch, and its rate."""

    name: str
    microseconds: float
    rate: float
    unit: str  # of the rate: TB/s or TFLOP/s
    beside_microseconds: float | None = None  # of the compared library


class KernelInputs(NamedTuple):
    """The inputs of an attention layer."""

    layout: StepLayout
    query: Tensor  # [tokens, heads, dim]
    layers: list[Tensor]  # [blocks, 2, block_size, kv_heads, dim] each


def measure_kernels(
    shape: HeadShape, beside: str | None = None, steps: Sequence[AttentionStep] = STANDARD_STEPS
) -> Iterator[KernelFigure]:
    """The figure of each step, as soon as it is measured."""
    if not torch.cuda.is_available():
        raise ConfigError("There is no GPU here; the times of its kernels need one.", param="device")
    backends = None if beside is None else library(beside, shape)
    for step in steps:
        yield measure(step, shape, backends)


def library(name: str, shape: HeadShape) -> AttentionBackends:
    """The attention of a library, after its self test."""
    device = torch.device("cuda")
    needs = AttentionNeeds(shape.queries, shape.keys, shape.dim, shape.dtype, shape.block_size, (shape.rule,))
    here = AttentionPlatform(torch.cuda.get_device_capability(), find_backends())
    backends, _ = select_attention(name, needs, here, device)
    assert backends.capturable, name
    return backends


def measure(step: AttentionStep, shape: HeadShape, beside: AttentionBackends | None = None) -> KernelFigure:
    """`beside`: a library, measured if it runs such steps itself."""
    inputs = kernel_inputs(step, shape, torch.device("cuda"))
    compared = [_attention(inputs, OWN)]
    if beside is not None and (theirs := _attention(inputs, beside)).uses_backend:
        compared.append(theirs)
    seconds = _seconds(inputs, shape.rule, compared)
    rate, unit = shape.num_bytes(step.num_read(shape.window)) / seconds[0], "TB/s"
    if not step.decodes and not step.verifies:  # two products, each with a multiplication and an addition per dimension
        rate, unit = 4 * shape.queries * shape.dim * step.num_scores(shape.window) / seconds[0], "TFLOP/s"
    return KernelFigure(step.name, seconds[0] * 1e6, rate / 1e12, unit, seconds[1] * 1e6 if seconds[1:] else None)


def kernel_inputs(step: AttentionStep, shape: HeadShape, device: torch.device) -> KernelInputs:
    """Every sequence has its own blocks, scattered over a store whose layers together exceed the cache."""
    lengths = [span.length for span in step.spans]
    news = [span.num_new for span in step.spans]
    num_blocks = [-(-length // shape.block_size) for length in lengths]
    scattered = 1 + torch.randperm(sum(num_blocks), device=device).int()
    tables = torch.nn.utils.rnn.pad_sequence([*torch.split(scattered, num_blocks)], batch_first=True)
    starts = torch.tensor([0, *news], device=device).cumsum(0).int()
    context_lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    unused = torch.arange(sum(news), device=device)  # attention reads neither positions nor slots
    num_decodes = len(lengths) if step.decodes else 0
    max_queries = max(news) if step.verifies else 0
    layout = StepLayout(unused, unused, tables, starts, context_lengths, unused, num_decodes, max_queries)
    layer_bytes = shape.num_bytes(sum(num_blocks) * shape.block_size)
    num_layers = max(2, min(_MAX_LAYERS, _CACHE_BYTES // layer_bytes + 1))
    size = (sum(num_blocks) + 1, num_layers, 2, shape.block_size, shape.keys, shape.dim)
    store = torch.randn(size, dtype=shape.dtype, device=device)
    query = torch.randn(sum(news), shape.queries, shape.dim, dtype=shape.dtype, device=device)
    return KernelInputs(layout, query, [store[:, layer] for layer in range(num_layers)])


def _attention(inputs: KernelInputs, backends: AttentionBackends) -> GpuAttention:
    return GpuAttention(inputs.layout, inputs.layout.num_decodes, backends, HopperPrefill.find())


def _seconds(inputs: KernelInputs, rule: AttentionRule, compared: Sequence[GpuAttention]) -> list[float]:
    """Seconds of one launch of each: the median over replays, which alternate."""
    layers = inputs.layers * -(-_LAUNCHES // len(inputs.layers))
    replays = [_capture(attention, inputs.query, layers, rule) for attention in compared]
    seconds: list[list[float]] = [[] for _ in compared]
    for _ in range(_REPLAYS):
        for replay, times in zip(replays, seconds, strict=True):
            started, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            started.record()
            replay()
            done.record()
            done.synchronize()
            times.append(started.elapsed_time(done) / 1000 / len(layers))
    return [median(times) for times in seconds]


def _capture(attention: GpuAttention, query: Tensor, layers: Sequence[Tensor], rule: AttentionRule) -> Replay:
    """A CUDA graph of one launch per layer. The work done once per step is done before."""

    def attend() -> Tensor:
        for layer in layers[:-1]:
            attention.attend(query, layer, rule)
        return attention.attend(query, layers[-1], rule)

    replay = GraphCapturer(query.device).capture(attend)
    replay()
    return replay

"""The kernel for Hopper: ragged steps, graphs and large stores against plain float32 and our generic kernels.

One program that takes all tiles, one after the other, must give what many give. Elsewhere these skip and say so.
"""

from dataclasses import astuple
from typing import NamedTuple

import pytest
import torch

from quire.kernels.gpu.attention.dispatch import GpuAttention
from quire.kernels.gpu.attention.hopper_dispatch import HopperPrefill
from quire.kernels.gpu.kernels import GpuKernels
from quire.kernels.gpu.precompile import compile_launched
from quire.kernels.interface import AttentionRule, StepLayout
from quire.runner.cuda_graphs import GraphCapturer
from tests.kernels import fake_backends as strangers
from tests.kernels.layouts import Part

CUDA = torch.device("cuda")
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
NO_BLOCK = 2**30
DECODES = [Part(0, 1), Part(130, 1), Part(700, 1)]
CHUNKS = [
    Part(0, 37),
    Part(5, 64),
    Part(130, 1),
    Part(900, 100),
    Part(0, 16),
    Part(255, 1),
    Part(0, 300),
    Part(127, 129),
]
LONG = [Part(301, 1100)]
PARTS = {"chunks": CHUNKS, "beside decodes": DECODES + CHUNKS, "long": LONG, "long beside decodes": DECODES + LONG}


class Shape(NamedTuple):
    """Of heads and blocks, and how keys are scored: a compilation over pages, and one over keys that were gathered."""

    dim: int = 128
    group: int = 4
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_heads: int = 2
    window: int = 0
    softcap: float = 0.0
    loudness: float = 1.0  # how far scores lie apart


SHAPES = [
    Shape(),
    Shape(dim=64),
    Shape(group=1, block_size=32, dtype=torch.float16),
    Shape(group=2, block_size=64),
    Shape(dim=64, group=8, block_size=128, dtype=torch.float16),
    Shape(group=8, block_size=8, kv_heads=1),
    Shape(group=7, dtype=torch.float16, softcap=4.0),
    Shape(dim=64, group=3, block_size=64, dtype=torch.float16, window=150),
    Shape(dim=256, group=2, kv_heads=1),
    Shape(dim=256, group=6, block_size=32, kv_heads=1, window=63, softcap=4.0),
    Shape(window=128),
    Shape(group=2, block_size=128, window=600),
    Shape(group=5, dtype=torch.float16, window=1),
    Shape(group=3),
    Shape(dim=64, group=71, kv_heads=1),
    Shape(dim=96, group=1),
    Shape(dim=80, group=3, dtype=torch.float16, window=150),
    Shape(dim=192, group=4, block_size=32),
    Shape(dim=40, group=5, softcap=4.0),
    Shape(softcap=50.0, loudness=10.0),
    Shape(dtype=torch.float16, softcap=50.0, loudness=10.0),
]


class Step:
    """Keys in blocks of a shuffled store, with NaN wherever there is none."""

    def __init__(self, parts: list[Part], shape: Shape, seed: int = 0, room: int = 0, first_block: int = 0) -> None:
        """`room`: tokens behind the last sequence, which are nobody's; as many sequences without keys come with them.
        `first_block`: of the store that are used."""
        generator = torch.Generator(CUDA).manual_seed(seed)
        dim, group, block_size, dtype, kv_heads = shape[:5]
        lengths = [part.num_before + part.num_new for part in parts]
        needed = [-(-length // block_size) for length in lengths]
        num_blocks = sum(needed) + 3
        order = first_block + torch.randperm(num_blocks, generator=generator, device=CUDA, dtype=torch.int32)
        store = torch.empty(first_block + num_blocks, 2, 2, block_size, kv_heads, dim, dtype=dtype, device=CUDA)
        store[first_block:] = torch.nan
        tables = torch.full((len(parts) + room, max(needed)), NO_BLOCK, dtype=torch.int32, device=CUDA)
        self.keys: list[torch.Tensor] = []
        for row, (count, length) in enumerate(zip(needed, lengths, strict=True)):
            tables[row, :count], order = order[:count], order[count:]
            sides = torch.randn(count * block_size, 2, kv_heads, dim, generator=generator, device=CUDA, dtype=dtype)
            sides[length:] = torch.nan
            pages = sides.view(count, block_size, 2, kv_heads, dim).transpose(1, 2)
            gone = max(parts[row].num_before - shape.window + 1, 0) // block_size if shape.window else 0
            store[tables[row, gone:count].long(), 1] = pages[gone:]
            tables[row, :gone] = NO_BLOCK  # before every window: freed
            self.keys.append(sides[:length].float())
        starts = torch.tensor([0] + [part.num_new for part in parts] + [0] * room).cumsum(0)
        num_tokens = int(starts[-1]) + room
        nothing = torch.zeros(num_tokens, dtype=torch.int64, device=CUDA)
        counted = torch.tensor(lengths + [0] * room, dtype=torch.int32, device=CUDA)
        self.layout = StepLayout(nothing, nothing, tables, starts.to(CUDA, torch.int32), counted, nothing)
        qkv = torch.randn(num_tokens, (group + 2) * kv_heads, dim, generator=generator, device=CUDA).to(dtype)
        self.query = qkv[:, : group * kv_heads]
        self.kv_layer = store[:, 1]
        self.rule = AttentionRule(shape.loudness * dim**-0.5, shape.window, shape.softcap)
        self.num_decodes = next((i for i, part in enumerate(parts) if part.num_new > 1), len(parts))

    def attend(self, hopper: HopperPrefill | None) -> torch.Tensor:
        attention = GpuAttention(self.layout, self.num_decodes, hopper=hopper)
        output = attention.attend(self.query, self.kv_layer, self.rule)
        assert (hopper is not None) == (attention._items is not None), "another kernel was taken"
        assert hopper is None or not hopper._is_broken
        return output

    def check(self, output: torch.Tensor) -> None:
        starts = self.layout.query_starts.tolist()
        for sequence, keys in enumerate(self.keys):
            rows = slice(starts[sequence], starts[sequence + 1])
            query, (scale, window, softcap) = self.query[rows].float(), astuple(self.rule)
            truth = strangers.one_sequence(query, *keys.unbind(1), scale, window - 1, softcap)
            torch.testing.assert_close(output[rows].float(), truth.flatten(1), atol=TOLERANCE[output.dtype], rtol=0.0)


@pytest.fixture(scope="module", autouse=True)
def _hopper() -> None:
    """All kernels, compiled side by side."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"{torch.cuda.get_device_name()} is no Hopper")
    assert HopperPrefill.find() is not None, "Triton's Gluon has not what the kernel needs"
    steps = [Step(parts, shape) for shape in SHAPES for parts in PARTS.values()]

    def play() -> None:
        for step in steps:
            for hopper in (HopperPrefill(1), None):
                step.attend(hopper)

    compiled = compile_launched(play, 16)
    assert not compiled.errors, compiled.errors


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ragged_steps_agree(shape: Shape, parts: list[Part]) -> None:
    step = Step(parts, shape)
    alone = step.attend(HopperPrefill(1))
    step.check(alone)
    assert torch.equal(alone, step.attend(HopperPrefill(8))), "a tile is the same whoever takes it"
    others = step.attend(None)
    torch.testing.assert_close(alone.float(), others.float(), atol=TOLERANCE[shape.dtype], rtol=0.0)


@pytest.mark.parametrize("parts", [CHUNKS, LONG], ids=["chunks", "long"])
def test_runs_give_the_same_bits(parts: list[Part]) -> None:
    """Whatever the order in which loads, products and softmax come: nobody reads what is not there yet."""
    step = Step(parts, SHAPES[0])
    first = step.attend(HopperPrefill(8))
    for num_sms in (8, 3, 1, 8, 8, 5, 8, 8):
        assert torch.equal(first, step.attend(HopperPrefill(num_sms)))


def test_padding_changes_nothing() -> None:
    """Sequences without keys, and tokens behind the last one."""
    bare, padded = Step(CHUNKS, SHAPES[0]), Step(CHUNKS, SHAPES[0], room=5)
    padded.query[: len(bare.query)] = bare.query
    assert torch.equal(padded.attend(HopperPrefill(8))[: len(bare.query)], bare.attend(HopperPrefill(8)))


def test_one_captured_graph_serves_other_lengths() -> None:
    """Recorded with nobody in it, and replayed with other sequences each time."""
    steps = [
        Step(parts, SHAPES[0], seed) for seed, parts in enumerate((CHUNKS, [*CHUNKS[2:], Part(0, 80), Part(64, 9)]))
    ]
    num_rows, num_blocks = max(len(step.query) for step in steps), max(len(step.kv_layer) for step in steps)
    width = max(step.layout.tables.shape[1] for step in steps)
    held = Step(CHUNKS, SHAPES[0])
    heads, dim = held.query.shape[1:]
    query = torch.zeros(num_rows, heads, dim, dtype=held.query.dtype, device=CUDA)
    kv_layer = torch.full((num_blocks, *held.kv_layer.shape[1:]), torch.nan, dtype=query.dtype, device=CUDA)
    tables = torch.full((len(CHUNKS), width), NO_BLOCK, dtype=torch.int32, device=CUDA)
    starts = torch.zeros(len(CHUNKS) + 1, dtype=torch.int32, device=CUDA)
    lengths = torch.zeros(len(CHUNKS), dtype=torch.int32, device=CUDA)
    nothing = torch.zeros(num_rows, dtype=torch.int64, device=CUDA)
    hopper = HopperPrefill(8)
    layout = StepLayout(nothing, nothing, tables, starts, lengths, nothing)
    replay = GraphCapturer(CUDA).capture(
        lambda: GpuAttention(layout, 0, hopper=hopper).attend(query, kv_layer, held.rule)
    )
    for step in (*steps, steps[0]):
        query[: len(step.query)] = step.query
        kv_layer[: len(step.kv_layer)] = step.kv_layer
        tables[:, : step.layout.tables.shape[1]] = step.layout.tables
        starts.copy_(step.layout.query_starts)
        lengths.copy_(step.layout.context_lengths)
        step.check(replay())


@pytest.mark.parametrize("parts", [CHUNKS, LONG], ids=["chunks", "long"])
def test_keys_beyond_two_to_the_31_numbers_are_found(parts: list[Part]) -> None:
    near = Step(parts, SHAPES[0])
    far = Step(parts, SHAPES[0], first_block=2**31 // near.kv_layer[0].numel() // 2 + 1)
    assert far.kv_layer.stride(0) * len(far.kv_layer) > 2**31
    assert torch.equal(near.attend(HopperPrefill(8)), far.attend(HopperPrefill(8)))


@pytest.mark.parametrize("block_size", [1, 24, 256])
def test_a_long_chunk_may_use_blocks_of_any_size(block_size: int) -> None:
    """Its keys are gathered first."""
    step = Step(LONG, Shape(block_size=block_size))
    step.check(step.attend(HopperPrefill(8)))


def test_a_step_on_this_gpu_uses_the_hopper_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine plans it: 2,048 tokens have work for every processor, 16 have not."""
    taken = []
    attend = HopperPrefill.attend
    monkeypatch.setattr(HopperPrefill, "attend", lambda *given: (taken.append(1), attend(*given))[1])
    shape = Shape(kv_heads=8)
    for parts in ([Part(0, 2048)], [Part(0, 512)] * 4, [Part(0, 16)]):
        step = Step(parts, shape)
        plan = GpuKernels().plan(step.layout, shape.block_size)
        step.check(plan.attend(step.query, step.kv_layer, step.rule))
    assert len(taken) == 2

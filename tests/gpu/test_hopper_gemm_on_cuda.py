"""The kernel with a ring against float32: every way of cutting, many runs, graphs, kernels that overlap, a model.

Elsewhere than on Hopper these skip and say so.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from quire.core.model import ModelSpec, RopeSpec
from quire.kernels.gpu.gemm.hopper_dispatch import HopperGemm
from quire.kernels.gpu.gemm.hopper_split import STREAM_K
from quire.kernels.gpu.kernels import GpuKernels
from quire.kernels.gpu.precompile import compile_launched
from quire.kernels.interface import PartialSums
from quire.models.decoder import Decoder
from quire.runner.cuda_graphs import GraphCapturer
from quire.weights.allocate import dummy_weights
from tests.models.running import in_chunks, run

CUDA = torch.device("cuda")
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
ROWS = (2, 3, 7, 9, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128)
REPEATS = 20


class Shape(NamedTuple):
    """Of a weight, whether its product may come in parts, and with a bias."""

    in_width: int
    out_width: int
    may_split: bool
    has_bias: bool = False
    dtype: torch.dtype = torch.bfloat16


LLAMA = [Shape(4096, 6144, False), Shape(4096, 4096, True), Shape(4096, 28672, False), Shape(14336, 4096, True)]
QWEN = [Shape(1024, 4096, False), Shape(2048, 1024, True), Shape(1024, 6144, False), Shape(3072, 1024, True)]
ODD = [
    Shape(1536, 576, True),  # SmolLM2
    Shape(3584, 4608, False, has_bias=True),  # Qwen2.5-7B
    Shape(1032, 4129, False),  # neither whole slices nor whole tiles
    Shape(1032, 20_001, False, has_bias=True),
    Shape(520, 1000, True, has_bias=True),
    Shape(1024, 4096, False, dtype=torch.float16),
    Shape(1024, 1024, True, dtype=torch.float16),
    Shape(1024, 16_384, False, dtype=torch.float16),
]
SHAPES = LLAMA + QWEN + ODD


class Drawn(NamedTuple):
    """Numbers for 128 rows, and what they come to in float32."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    exact: Tensor  # without the bias
    sizes: Tensor  # sums of what was added, without signs


@cache
def drawn(shape: Shape) -> Drawn:
    generator = torch.Generator(CUDA).manual_seed(shape.in_width + shape.out_width)

    def numbers(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=CUDA).to(shape.dtype)

    x, weight = numbers(128, shape.in_width), numbers(shape.out_width, shape.in_width)
    wide = x.float(), weight.float().T
    return Drawn(x, weight, numbers(shape.out_width), wide[0] @ wide[1], wide[0].abs() @ wide[1].abs())


@pytest.fixture(scope="module")
def gemm() -> Iterator[HopperGemm]:
    """With all kernels compiled side by side."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"{torch.cuda.get_device_name()} is no Hopper")
    torch.backends.cuda.matmul.allow_tf32 = False
    found = HopperGemm.find()
    assert found is not None, "Triton's Gluon has not what the kernel needs"

    def play() -> None:
        for shape in SHAPES:
            for num_rows in (16, 32, 64, 128):
                multiply(found, shape, num_rows)

    compiled = compile_launched(play, 16)
    assert not compiled.errors, compiled.errors
    torch.cuda.synchronize()  # weights are read before what was launched last is waited for
    yield found
    assert not found._is_broken
    assert not found._arrivals.any(), "counters are zero between launches"
    drawn.cache_clear()


def multiply(gemm: HopperGemm, shape: Shape, num_rows: int) -> Tensor | PartialSums | None:
    numbers = drawn(shape)
    ask = gemm.matmul_unreduced if shape.may_split else gemm.matmul
    return ask(numbers.x[:num_rows], numbers.weight, numbers.bias if shape.has_bias else None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matmuls_agree_for_every_number_of_rows(gemm: HopperGemm, shape: Shape) -> None:
    numbers, num_taken = drawn(shape), 0
    for num_rows in ROWS:
        product = multiply(gemm, shape, num_rows)
        if product is None:
            continue
        num_taken += 1
        rounding = 0.0 if isinstance(product, PartialSums) else ROUNDING[shape.dtype]
        total = product.sums.sum(0) if isinstance(product, PartialSums) else product.float()
        exact = numbers.exact[:num_rows] + (numbers.bias.float() if shape.has_bias else 0.0)
        assert total.shape == exact.shape
        assert ((total - exact).abs() <= rounding * exact.abs() + 2**-15 * numbers.sizes[:num_rows]).all(), num_rows
    is_small = numbers.weight.nbytes <= 16 * 2**20
    assert num_taken == len([rows for rows in ROWS if rows <= 64 or is_small])
    assert not gemm._is_broken


def test_every_kind_of_split_is_covered(gemm: HopperGemm) -> None:
    cuts = [gemm._split(drawn(shape).x[:16], drawn(shape).weight, None, shape.may_split) for shape in SHAPES]
    parts = {how.splits for how in cuts if how is not None}
    assert {STREAM_K, 1, 2, 8} <= parts


@pytest.mark.parametrize("shape", [*LLAMA, *QWEN[:2], ODD[3]], ids=str)
def test_runs_give_the_same_bits(gemm: HopperGemm, shape: Shape) -> None:
    """One launched right behind the other, so that each begins while another ends."""
    for num_rows in (5, 64):
        results = [multiply(gemm, shape, num_rows) for _ in range(REPEATS)]
        plain = [result.sums if isinstance(result, PartialSums) else result for result in results]
        assert all(each is not None and torch.equal(each, plain[0]) for each in plain)


def test_a_captured_gemm_reads_its_inputs_at_replay(gemm: HopperGemm) -> None:
    shapes = [LLAMA[2], LLAMA[1], QWEN[0]]
    given = [drawn(shape).x[:20].clone() for shape in shapes]
    recorded: list[Tensor | PartialSums | None] = []

    def go() -> list[Tensor | PartialSums | None]:
        pairs = zip(shapes, given, strict=True)
        return [
            (gemm.matmul_unreduced if shape.may_split else gemm.matmul)(x, drawn(shape).weight, None)
            for shape, x in pairs
        ]

    def work() -> Tensor:
        recorded[:] = go()
        return given[0]

    replay = GraphCapturer(CUDA).capture(work)
    for first in (40, 7, 40):
        for shape, x in zip(shapes, given, strict=True):
            x.copy_(drawn(shape).x[first : first + 20])
        replay()
        torch.cuda.synchronize()
        replayed = [
            (each.sums if isinstance(each, PartialSums) else each).clone() for each in recorded if each is not None
        ]
        expected = [each.sums if isinstance(each, PartialSums) else each for each in go() if each is not None]
        assert len(replayed) == 3
        assert all(torch.equal(one, other) for one, other in zip(replayed, expected, strict=True))


@pytest.mark.parametrize("layer", [LLAMA, QWEN], ids=["llama", "qwen"])
@pytest.mark.parametrize("num_rows", [3, 16, 64])
def test_kernels_that_overlap_agree_with_serial_launches(gemm: HopperGemm, layer: list[Shape], num_rows: int) -> None:
    """Layers as a decoder has them, in which each kernel lets the next begin before it has waited itself."""
    kernels = GpuKernels()
    kernels._gemm = gemm
    qkv, output, gate_up, down = (drawn(shape).weight for shape in layer)
    scale = torch.rand(layer[0].in_width, device=CUDA) / layer[3].in_width ** 0.5
    context = drawn(layer[1]).x[:num_rows]
    torch.cuda.synchronize()

    def go(between: Callable[[], None]) -> list[Tensor]:
        residual = drawn(layer[0]).x[:num_rows].float()
        x: Tensor | PartialSums = drawn(layer[0]).x[:num_rows]
        kept = []
        for _ in range(6):
            normed = kernels.add_rms_norm(x, residual, scale, 1e-5)
            between()
            kept.append(kernels.linear(normed, qkv, None))
            between()
            attended = kernels.linear_unreduced(context, output, None)
            between()
            normed = kernels.add_rms_norm(attended, residual, scale, 1e-5)
            between()
            wide = kernels.linear(normed, gate_up, None)
            between()
            gated = kernels.act_and_mul(wide, "silu")
            between()
            x = kernels.linear_unreduced(gated, down, None)
            between()
        return [*kept, x.sums if isinstance(x, PartialSums) else x, residual]

    apart = go(torch.cuda.synchronize)
    for _ in range(3):
        together = go(lambda: None)
        assert all(torch.equal(one, other) for one, other in zip(apart, together, strict=True))
    assert all(each.isfinite().all() for each in apart)


def test_a_model_generates_the_same_without_it(gemm: HopperGemm) -> None:
    """Layers as wide as those of Qwen3-0.6B: steps of 40 rows, and of one row fewer after the other."""
    spec = ModelSpec(
        "qwen3", 3, 1024, 16, 8, 128, 3072, 2048, 4096, 1e-6, RopeSpec(1e6, 128), tied_embeddings=True, qk_norm=True
    )
    weights = dummy_weights(spec, torch.bfloat16, CUDA).filled()
    lengths = [3] * 20 + [5] * 20
    prompts = [[(31 * place + 7 * row) % 2048 for place in range(length)] for row, length in enumerate(lengths)]
    logits = []
    for with_ring in (True, False):
        kernels = GpuKernels()
        kernels._gemm = gemm if with_ring else None
        model = Decoder(spec, weights, kernels, 32)
        logits.append(torch.cat(run(model, prompts, in_chunks(lengths, 1), block_size=16, device="cuda")))
    ring, library = logits
    assert not torch.equal(ring, library), "both by the library"
    assert (ring - library).norm() <= 2e-2 * library.norm()
    agreed = (ring.argmax(-1) == library.argmax(-1)).float().mean()
    assert agreed > 0.85, agreed

"""Splits of the Hopper GEMM, which shapes it takes, and the fallback. The kernel itself is tested in tests/gpu."""

import logging

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import knobs

from quire.kernels.gpu import hopper_support
from quire.kernels.gpu.gemm import hopper_dispatch, hopper_ring
from quire.kernels.gpu.gemm.hopper_dispatch import HopperGemm
from quire.kernels.gpu.gemm.hopper_split import COLUMNS, MAX_ROWS, OUTS, STREAM_K, GemmSplit, split_gemm
from quire.kernels.gpu.kernels import GpuKernels
from quire.kernels.interface import PartialSums
from tests.kernels.without_gluon import without_gluon

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_SMS = 132
SHARED_BYTES = 227 * 1024
META = torch.device("meta")


def shares(how: GemmSplit) -> list[range]:
    """As the kernel computes them."""
    total = how.num_tiles * how.num_slices
    return [range(*hopper_ring._unit_range.fn(program, total, how.num_programs)) for program in range(how.num_programs)]


@settings(max_examples=60)
@given(
    num_rows=st.integers(1, MAX_ROWS + 1),
    in_width=st.integers(1, 2000).map(lambda eighths: 8 * eighths),
    out_width=st.integers(1, 40_000),
    num_sms=st.integers(64, 200),
    may_split=st.booleans(),
)
def test_every_slice_is_assigned_once_and_programs_get_equal_runs(
    num_rows: int, in_width: int, out_width: int, num_sms: int, may_split: bool
) -> None:
    how = split_gemm(num_rows, in_width, out_width, num_sms, may_split)
    if how is None:
        return
    assert how.num_tiles * OUTS >= out_width and how.num_slices * COLUMNS >= in_width
    assert how.box_rows >= max(16, num_rows) and how.box_rows.bit_count() == 1
    runs = shares(how)
    assert [unit for run in runs for unit in run] == list(range(how.num_tiles * how.num_slices))
    sizes = {len(run) for run in runs}
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1 and 1 <= how.stages <= max(sizes)
    assert how.stages > 1 or max(sizes) == 1, "a slot is given back when the next slice is being multiplied"
    assert how.stages * (OUTS + how.box_rows) * COLUMNS * 2 < SHARED_BYTES
    if how.splits == STREAM_K:
        total = how.num_tiles * how.num_slices
        holder = {unit: program for program, run in enumerate(runs) for unit in run}
        for tile in range(how.num_tiles):
            last = hopper_ring._last_program.fn(tile, how.num_slices, total, how.num_programs)
            assert last == holder[(tile + 1) * how.num_slices - 1]
    else:
        for program, run in enumerate(runs):
            assert {unit // how.num_slices for unit in run} == {program // how.splits}, "a part is of one tile"
    assert may_split or how.splits in (STREAM_K, 1)


def parts_of(num_rows: int, shapes: dict[tuple[int, int], bool]) -> list[int | None]:
    cuts = [split_gemm(num_rows, *shape, NUM_SMS, may_split) for shape, may_split in shapes.items()]
    return [None if how is None else how.splits for how in cuts]


LLAMA = {(4096, 6144): False, (4096, 4096): True, (4096, 28672): False, (14336, 4096): True}
QWEN = {(1024, 4096): False, (2048, 1024): True, (1024, 6144): False, (3072, 1024): True}


def test_measured_layers_keep_their_splits() -> None:
    for num_rows in (2, 16, 33, 64):
        assert parts_of(num_rows, LLAMA) == [1, 2, STREAM_K, 2]
        assert parts_of(num_rows, QWEN) == [1, 8, 1, 8]
    assert parts_of(128, QWEN) == [1, 8, 1, 8]


def test_shapes_where_cublas_is_as_fast_are_declined() -> None:
    nobody = [None] * 4
    assert parts_of(65, LLAMA) == parts_of(128, LLAMA) == nobody
    assert parts_of(1, LLAMA) == parts_of(1, QWEN) == parts_of(129, QWEN) == nobody
    smol = {(576, 960): False, (576, 576): True, (576, 3072): False, (1536, 576): True}
    assert parts_of(16, smol) == [None, None, None, 8], "programs enough for one of four"
    assert split_gemm(16, 9216, 2304, NUM_SMS, may_split=False) is None, "few tiles that may not be parted"


def is_taken(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    return HopperGemm(NUM_SMS, META)._split(x, weight, bias, may_split=True) is not None


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def test_tensors_that_tma_cannot_read_are_declined() -> None:
    assert is_taken(numbers(16, 1024), numbers(4096, 1024), numbers(4096))
    assert is_taken(numbers(16, 1032), numbers(4095, 1032)), "neither width need be whole slices or tiles"
    assert is_taken(numbers(16, 1024, dtype=torch.float16), numbers(4096, 1024, dtype=torch.float16))
    assert not is_taken(numbers(16, 1024, dtype=torch.float32), numbers(4096, 1024, dtype=torch.float32))
    assert not is_taken(numbers(16, 1024, dtype=torch.float16), numbers(4096, 1024))
    assert not is_taken(numbers(16, 1028), numbers(4096, 1028)), "rows of 16 bytes"
    assert not is_taken(numbers(16, 2048)[:, :1024], numbers(4096, 1024))
    assert not is_taken(numbers(16, 1024), numbers(1024, 4096).T)
    assert not is_taken(numbers(16, 1024), numbers(4096, 1024), numbers(4096, 2)[:, 0])
    assert not is_taken(numbers(129, 1024), numbers(4096, 1024))
    odd = torch.empty(16 * 1024 + 1, dtype=torch.bfloat16)[1:].view(16, 1024)
    assert odd.data_ptr() % 16 and not is_taken(odd, numbers(4096, 1024))


def with_products() -> GpuKernels:
    kernels = GpuKernels()
    kernels._gemm = HopperGemm(NUM_SMS, DEVICE)
    return kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the kernel may be compiled for it")
def test_a_kernel_that_does_not_compile_is_logged_once_and_results_are_correct(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, weight = torch.randn(9, 256).half(), torch.randn(4096, 256).half()
    kernels = with_products()
    for multiply in (kernels.linear, kernels.linear_unreduced, kernels.linear):
        product = multiply(x, weight, None)
        assert isinstance(product, torch.Tensor) and torch.equal(product, F.linear(x, weight))
    [line] = caplog.records
    assert line.levelno == logging.WARNING and "by the portable kernels" in line.message
    assert "\n" not in line.message


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_out_of_memory_or_an_invalidated_capture_does_not_mark_the_kernel_broken(
    error: type[RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_off(*given: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(hopper_support, "_is_capturing", lambda: error is RuntimeError)
    monkeypatch.setattr(hopper_dispatch, "ring_gemm", broken_off)
    gemm = HopperGemm(NUM_SMS, "cpu")
    x, weight = torch.randn(9, 256).half(), torch.randn(4096, 256).half()
    with pytest.raises(error):
        gemm.matmul(x, weight, None)
    monkeypatch.setattr(hopper_dispatch, "ring_gemm", lambda *given: F.linear(x, weight))
    assert gemm.matmul(x, weight, None) is not None


def test_partial_sums_go_only_to_callers_that_reduce_and_one_row_uses_the_skinny_gemm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hopper_dispatch, "ring_gemm", ring_sums)
    kernels = with_products()
    x, weight = torch.randn(9, 1024).half().to(DEVICE), torch.randn(1024, 1024).half().to(DEVICE)
    assert kernels._gemm is not None and kernels._gemm.matmul(x, weight, None) is None
    parts = kernels.linear_unreduced(x, weight, None)
    assert isinstance(parts, PartialSums) and parts.sums.shape == (8, 9, 1024) and parts.dtype is x.dtype
    torch.testing.assert_close(parts.reduce(), F.linear(x, weight), atol=4e-2, rtol=4e-3)
    assert isinstance(kernels.linear(x, weight, None), torch.Tensor)
    assert isinstance(kernels.linear_unreduced(x[:2], weight, None), PartialSums)
    assert isinstance(kernels.linear_unreduced(x[:1], weight, None), torch.Tensor), "skinny_gemm's"
    assert len(kernels._gemm._descriptors) == 1, "a weight is described once"


def ring_sums(x, weight, bias, room, arrivals, how):
    """What the kernel computes when it is asked for parts."""
    columns = [slice(run.start * COLUMNS, run.stop * COLUMNS) for run in shares(how)[: how.splits]]
    return torch.stack([x[:, some].float() @ weight.base[:, some].float().T for some in columns])


def test_there_is_no_hopper_kernel_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    assert HopperGemm.find() is None
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert HopperGemm.find() is None


def test_a_triton_without_gluon_is_logged_and_the_kernel_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without = without_gluon(monkeypatch, hopper_dispatch, "quire.kernels.gpu.gemm.hopper_ring")
    assert without.HopperGemm.find() is None
    [line] = caplog.records
    assert "triton.experimental.gluon" in line.message

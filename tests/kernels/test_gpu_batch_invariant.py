"""Kernels of the batch-invariant mode against float64 and the reference: compiled on a GPU, else interpreted. Bits are
compared in tests/gpu/test_batch_invariance_on_cuda.py: in the interpreter numpy multiplies, which promises none."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.gpu.batch_invariant import BatchInvariantKernels
from quire.kernels.gpu.gemm.batch_invariant import InvariantTiles, batch_invariant_gemm
from tests.kernels.layouts import Part
from tests.kernels.test_gpu_attention import DTYPES, Step, lengths_before, rules
from tests.kernels.test_gpu_skinny_gemm import DEVICE, HALVES, close, drawn
from tests.tiers import examples

SMALL = InvariantTiles(rows=16, outs=16, columns=32, warps=1, stages=2)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@settings(max_examples=examples(4, 12, gpu=True))
@given(
    num_rows=st.integers(1, 70),
    in_width=st.integers(1, 130),
    out_width=st.integers(1, 40),
    has_bias=st.booleans(),
    tiles=st.sampled_from([None, SMALL]),
)
def test_gemms_of_every_shape_agree(dtype, num_rows, in_width, out_width, has_bias, tiles) -> None:
    x, weight = drawn(num_rows, in_width, dtype=dtype), drawn(out_width, in_width, dtype=dtype, seed=1)
    bias = drawn(out_width, dtype=dtype, seed=2) if has_bias else None
    close(batch_invariant_gemm(x, weight, bias, tiles=tiles), x, weight, bias)


def test_logits_are_not_rounded() -> None:
    x, weight = drawn(3, 64, dtype=HALVES[0]), drawn(50, 64, dtype=HALVES[0], seed=1)
    exact = x.float() @ weight.float().T
    out = torch.full((3, 50), float("nan"), device=DEVICE)
    found = BatchInvariantKernels().logits(x, weight, weight, out)
    assert found is out and (found - exact).abs().max() <= 1e-4
    assert torch.equal(BatchInvariantKernels().logits(x, weight, weight), found)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=examples(2, 12, gpu=True))
@given(
    parts=st.lists(st.builds(Part, lengths_before, st.sampled_from([1, 1, 2, 20, 70])), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 3, 16, 128]),
    rule=rules,
    seed=st.integers(0, 9),
)
def test_attention_of_decodes_and_chunks_agrees(dtype, parts, block_size, rule, seed) -> None:
    step = Step(parts, block_size=block_size, dtype=dtype, rule=rule, seed=seed)
    step.check(BatchInvariantKernels().plan(step.layout, block_size).attend(step.query, step.kv_layer, step.rule))

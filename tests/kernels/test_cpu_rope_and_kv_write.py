"""Queries and keys normed, turned and stored by the CPU kernels, against the reference."""

import math

import pytest
import torch

from quire.kernels.cpu.kernels import CpuKernels
from quire.kernels.reference import ReferenceKernels
from tests.kernels.rope_inputs import Turning, heads_apart

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.06}
DTYPES = list(TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [16, 32])
@pytest.mark.parametrize("has_norm", [False, True])
def test_queries_and_the_store_agree_with_the_reference(dtype, rotary_dim, has_norm):
    turning = Turning.drawn(dtype, rotary_dim=rotary_dim, has_norm=has_norm)
    fast, truth = turning.through(CpuKernels()), turning.through(ReferenceKernels())
    close = {"atol": TOLERANCE[dtype], "rtol": 1e-2, "equal_nan": True}
    torch.testing.assert_close(fast.query, truth.query, **close)
    torch.testing.assert_close(fast.store, truth.store, **close)


def test_without_a_norm_what_is_beyond_the_rotary_width_stays_bit_for_bit():
    turning = Turning.drawn(torch.bfloat16, rotary_dim=16, has_norm=False)
    before, after = heads_apart(turning.qkv), turning.through(CpuKernels())
    assert torch.equal(after.query[..., 16:], before.query[..., 16:])
    assert not torch.equal(after.query[..., :16], before.query[..., :16])
    assert torch.equal(turning.written(after.store)[:, 0, :, 16:], before.key[..., 16:])
    assert torch.equal(turning.written(after.store)[:, 1], before.value)


def test_a_rotation_by_hand():
    """A quarter turn brings (1, 2 | 3, 4) to (-3, -4 | 1, 2); the norm before it divides by the root of 7.5."""
    turning = Turning.drawn(torch.float32, rotary_dim=4, has_norm=True, dim=4)
    turning.qkv[:] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    turning.rotation.cos[:] = 0.0
    turning.rotation.sin[:] = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    turned = torch.tensor([-3.0, -4.0, 1.0, 2.0]) / math.sqrt(7.5)
    for kernels in (ReferenceKernels(), CpuKernels()):
        query = turning._replace(head_norm=turning.head_norm._replace(weight=torch.ones(6, 4))).through(kernels).query
        torch.testing.assert_close(query, turned.expand_as(query), atol=1e-5, rtol=0)


def test_keys_and_values_are_written_to_their_slots_only():
    turning = Turning.drawn(torch.float32, rotary_dim=32, has_norm=False)
    store = turning.through(CpuKernels()).store
    assert turning.written(store).isfinite().all()
    assert store.isfinite().sum() == turning.written(store).numel()

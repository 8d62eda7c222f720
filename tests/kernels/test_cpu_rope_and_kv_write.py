"""Queries and keys normed, turned and stored by the CPU kernels, against the reference."""

import math

import pytest
import torch

from quire.kernels.reference import ReferenceKernels
from tests.kernels.cpu_kernels import as_declared, cpu_kernels, each_kernels, needs_native
from tests.kernels.rope_inputs import Turned, Turning, heads_apart

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 0.06}
# Kernels, dtype of the activations, dtype of the store. The native kernels take float32 alone.
SETS = [
    pytest.param("native", torch.float32, torch.float32, marks=needs_native),
    pytest.param("native", torch.float32, torch.float16, marks=needs_native),
    pytest.param("native", torch.float32, torch.bfloat16, marks=needs_native),
    ("torch", torch.float32, torch.float32),
    ("torch", torch.bfloat16, torch.bfloat16),
]


def turned_by(name: str, turning: Turning) -> Turned:
    kernels = cpu_kernels(name)
    query, store = turning.through(kernels)
    return Turned(query, as_declared(kernels, store))


@pytest.mark.parametrize(("name", "dtype", "stored"), SETS)
@pytest.mark.parametrize("rotary_dim", [16, 32])
@pytest.mark.parametrize("has_norm", [False, True])
def test_queries_and_the_store_agree_with_the_reference(name, dtype, stored, rotary_dim, has_norm):
    turning = Turning.drawn(dtype, rotary_dim=rotary_dim, has_norm=has_norm, stored=stored)
    fast, truth = turned_by(name, turning), turning.through(ReferenceKernels())
    torch.testing.assert_close(fast.query, truth.query, atol=TOLERANCE[dtype], rtol=1e-2)
    torch.testing.assert_close(fast.store, truth.store, atol=TOLERANCE[stored], rtol=1e-2, equal_nan=True)


@each_kernels
@pytest.mark.parametrize(("dim", "rotary_dim"), [(20, 12), (7, 6), (256, 64)])
def test_heads_of_every_width_agree(name, dim, rotary_dim):
    turning = Turning.drawn(torch.float32, dim=dim, rotary_dim=rotary_dim, has_norm=True)
    fast, truth = turned_by(name, turning), turning.through(ReferenceKernels())
    torch.testing.assert_close(fast.query, truth.query, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fast.store, truth.store, atol=1e-5, rtol=1e-5, equal_nan=True)


@each_kernels
def test_without_a_norm_what_is_beyond_the_rotary_width_stays_bit_for_bit(name):
    turning = Turning.drawn(torch.float32, rotary_dim=16, has_norm=False)
    before, after = heads_apart(turning.qkv), turned_by(name, turning)
    assert torch.equal(after.query[..., 16:], before.query[..., 16:])
    assert not torch.equal(after.query[..., :16], before.query[..., :16])
    assert torch.equal(turning.written(after.store)[:, 0, :, 16:], before.key[..., 16:])
    assert torch.equal(turning.written(after.store)[:, 1], before.value)


@each_kernels
def test_a_rotation_by_hand(name):
    """A quarter turn brings (1, 2 | 3, 4) to (-3, -4 | 1, 2); the norm before it divides by the root of 7.5."""
    turning = Turning.drawn(torch.float32, rotary_dim=4, has_norm=True, dim=4)
    turning.qkv[:] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    turning.rotation.cos[:] = 0.0
    turning.rotation.sin[:] = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    turned = torch.tensor([-3.0, -4.0, 1.0, 2.0]) / math.sqrt(7.5)
    for kernels in (ReferenceKernels(), cpu_kernels(name)):
        query = turning._replace(head_norm=turning.head_norm._replace(weight=torch.ones(6, 4))).through(kernels).query
        torch.testing.assert_close(query, turned.expand_as(query), atol=1e-5, rtol=0)


@each_kernels
def test_keys_and_values_are_written_to_their_slots_only(name):
    turning = Turning.drawn(torch.float32, rotary_dim=32, has_norm=False)
    store = turned_by(name, turning).store
    assert turning.written(store).isfinite().all()
    assert store.isfinite().sum() == turning.written(store).numel()

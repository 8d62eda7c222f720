"""`quire bench kernels` on the GPU: a library is measured where it does the work itself."""

import pytest

from quire.bench.attention import HeadShape, library, measure
from quire.bench.attention_steps import decode_step, prefill_step

SHAPE = HeadShape(8, 2, 64)


def test_torchs_attention_is_compared_with_quires():
    theirs = library("torch", SHAPE)
    decodes, one = measure(decode_step(4, 256), SHAPE, theirs), measure(prefill_step(1, 1024), SHAPE, theirs)
    assert decodes.beside_microseconds is None and decodes.microseconds > 0
    assert one.beside_microseconds is not None and one.beside_microseconds > 0
    num_operations = 4 * 8 * 64 * (1024 * 1025 // 2)
    assert one.rate * one.microseconds * 1e6 == pytest.approx(num_operations)

"""What rows do next, by one kernel and by tensor operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.gpu import decode_inputs as decode_inputs_module
from quire.kernels.gpu.decode_inputs import decode_inputs
from quire.kernels.row_interface import NextTokens, RowColumns, decode_inputs_reference
from tests.tiers import examples

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@settings(max_examples=examples(6, 15, gpu=True), deadline=None)
@given(
    seed=st.integers(0, 2**31),
    max_rows=st.integers(1, 40),
    width=st.integers(1, 70),
    block_size=st.sampled_from([1, 8, 16, 24, 128]),
)
def test_decode_inputs_agree_with_the_reference(seed: int, max_rows: int, width: int, block_size: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    columns = RowColumns(
        tables=torch.randint(0, 2**31 - 1, (max_rows, width), generator=dice).int().to(DEVICE),
        lengths=torch.randint(1, width * block_size + 1, (max_rows,), generator=dice).to(DEVICE),
        max_lengths=torch.randint(1, 2**40, (max_rows,), generator=dice).to(DEVICE),
        last_tokens=torch.randint(0, 2**20, (max_rows,), generator=dice).to(DEVICE),
        alive=(torch.rand(max_rows, generator=dice) < 0.7).to(DEVICE),
    )
    rows = torch.randperm(max_rows, generator=dice)[: 1 + seed % max_rows].to(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_inputs_module, "_COLUMNS", 16)
        found = decode_inputs(rows, columns, block_size)
    expected = decode_inputs_reference(rows, columns, block_size)
    for name, mine, others in zip(NextTokens._fields, found, expected, strict=True):
        assert mine.dtype == others.dtype and torch.equal(mine, others), name


def test_no_rows_do_nothing() -> None:
    nothing = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    columns = RowColumns(nothing[:, None].int(), nothing + 1, nothing, nothing, nothing.bool())
    found = decode_inputs(nothing[:0], columns, 16)
    assert len(found.tokens) == len(found.tables) == len(found.context_lengths) == 0

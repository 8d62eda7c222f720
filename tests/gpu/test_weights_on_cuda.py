"""Weights copied to the GPU by threads: the tests of host memory, and many pieces through a few slots."""

from pathlib import Path

import pytest
import torch

from quire.weights import tensor_reader as pieces
from quire.weights.dequantize import FloatsOnly
from quire.weights.loader_threads import load_slices
from quire.weights.tensor_reader import slices_of
from tests.weights.test_loader_threads import (  # noqa: F401 -- collected here, where there is a GPU
    store,
    test_a_file_that_became_shorter,
    test_a_file_that_went_away,
    test_an_interrupt_waits_for_little,
    test_every_dtype_comes_to_every_other,
    test_in_inference_mode,
    test_what_is_packed_is_unpacked_by_several_threads,
)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_many_slices(tmp_path: Path, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PLAIN_BYTES", 1 << 16)
    values = torch.randn(20_000, 700, generator=torch.Generator().manual_seed(1)).to(stored)
    room = torch.zeros(20_000, 700, dtype=torch.bfloat16, device="cuda")
    load_slices(slices_of(store(tmp_path / "t", values), room), FloatsOnly(), room.device, lambda num_bytes: None)
    assert torch.equal(room.cpu(), values.to(torch.bfloat16))

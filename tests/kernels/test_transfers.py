"""Arrays that travel together arrive as they were, each where kernels are compiled to find it."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.transfers import upload_integers

CPU = torch.device("cpu")


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), min_size=1, max_size=6))
def test_each_array_arrives_and_begins_at_a_multiple_of_16_bytes(lists: list[list[int]]) -> None:
    arrays = [np.array(each, dtype=np.int32 if place % 2 else np.int64) for place, each in enumerate(lists)]
    sent = upload_integers(CPU, *arrays)
    assert [part.tolist() for part in sent] == lists
    assert {part.dtype for part in sent} == {torch.int64}
    assert all(part.storage_offset() * 8 % 16 == 0 for part in sent)

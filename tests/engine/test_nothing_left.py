"""Whether a request's own constraints leave no token to sample, by hand."""

import numpy as np
import pytest

from quire.core.ids import IntArray, RequestId
from quire.core.request import Request, RequestGroup
from quire.core.sampling import RowSampling
from quire.engine.engine import is_nothing_left

VOCAB = 40
END = 39


def mask_of(*tokens: int) -> IntArray:
    flags = np.zeros(64, np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


@pytest.mark.parametrize(
    ("sampling", "mask", "nothing_left"),
    [
        (RowSampling(), None, False),
        (RowSampling(), mask_of(33), False),
        (RowSampling(allowed_ids=(33,)), mask_of(33, 5), False),
        (RowSampling(allowed_ids=(7,)), mask_of(33, 5), True),
        (RowSampling(), mask_of(50), True),  # beyond the logits
        (RowSampling(min_tokens=3, end_ids=(END,)), mask_of(END), True),
        (RowSampling(min_tokens=2, end_ids=(END,)), mask_of(END), False),  # two have come
        (RowSampling(bad_words=((5,),)), mask_of(5), True),
        (RowSampling(bad_words=((2, 3, 4, 5),)), mask_of(5), True),  # the prompt counts
        (RowSampling(bad_words=((9, 4, 5),)), mask_of(5), False),
        (RowSampling(bad_words=((1, 1, 2, 3, 4, 5),)), mask_of(5), False),  # longer than all there is
        (RowSampling(bad_words=((4, 5), (6,)), allowed_ids=(5, 6)), None, True),
    ],
)
def test_is_nothing_left(sampling: RowSampling, mask: IntArray | None, nothing_left: bool) -> None:
    request = Request(RequestId(0), np.array([1, 2], dtype=np.int32), 8, sampling)
    (sequence,) = RequestGroup(request, 0, 0.0).sequences
    sequence.tokens = np.array([1, 2, 3, 4], dtype=np.int32)
    assert is_nothing_left(sequence, mask, VOCAB) is nothing_left

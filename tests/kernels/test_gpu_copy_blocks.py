"""Copies of blocks on the GPU (elsewhere interpreted) against plain ones."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.gpu.copy_blocks import copy_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pairs(sources: list[int], targets: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.tensor([sources, targets], dtype=torch.int64, device=DEVICE)
    return index[0], index[1]


@settings(max_examples=15)
@given(
    order=st.permutations(range(9)),
    num_pairs=st.integers(0, 4),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.int32, torch.uint8]),
    size=st.sampled_from([1, 2, 3, 40, 5000]),
)
def test_targets_become_their_sources_and_all_others_stay(order, num_pairs, dtype, size):
    sources, targets = order[:num_pairs], order[num_pairs : 2 * num_pairs]
    store = torch.randint(256, (9, 2, size), generator=torch.Generator().manual_seed(size)).to(DEVICE, dtype)
    expected = store.clone()
    expected[targets] = store[sources]
    copy_blocks(store, store, *pairs(sources, targets))
    assert torch.equal(store, expected)


def test_one_source_may_go_to_several_targets():
    store = torch.arange(5, device=DEVICE)[:, None].repeat(1, 8)
    copy_blocks(store, store, *pairs([4, 4, 0], [1, 2, 3]))
    assert store[:, 0].tolist() == [0, 4, 4, 0, 4]


def test_bits_are_copied_and_not_numbers():
    """A signalling NaN would come out of a float register as another one."""
    store = torch.tensor([[0x7FA00001], [0]], dtype=torch.int32, device=DEVICE).view(torch.float32)
    copy_blocks(store, store, *pairs([0], [1]))
    assert store.view(torch.int32).flatten().tolist() == [0x7FA00001, 0x7FA00001]


def test_blocks_beyond_two_to_the_31_words_are_copied():
    """Of an odd number of bytes, so that words are bytes. What is not touched costs no memory."""
    block_bytes = 4097
    last = 2**31 // block_bytes + 1
    store = torch.empty(last + 1, block_bytes, dtype=torch.uint8, device=DEVICE)
    store[0], store[last], store[last - 1] = 3, 5, 7
    copy_blocks(store, store, *pairs([last, 0], [1, last - 1]))
    assert (store[1] == 5).all() and (store[last - 1] == 3).all() and (store[last] == 5).all()

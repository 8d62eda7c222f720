"""The integer model behind the real store against the closed form."""

from itertools import islice

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.core.oracle import continuation
from quire.models.oracle import OracleModel
from tests.kernels.steps import Pages, Part
from tests.models.running import in_chunks, run

token_lists = st.lists(st.integers(0, 996), min_size=1, max_size=40)


def following(tokens: list[int], vocab_size: int) -> int:
    return next(continuation(np.array(tokens, dtype=np.int32), vocab_size))


@given(
    prompts=st.lists(token_lists, min_size=1, max_size=4),
    chunk=st.integers(1, 41),
    block_size=st.integers(1, 32),
)
def test_every_token_of_every_mixture_is_followed_by_the_closed_form(prompts, chunk, block_size):
    rows = run(OracleModel(997), prompts, in_chunks([len(prompt) for prompt in prompts], chunk), block_size)
    for prompt, logits in zip(prompts, rows, strict=True):
        assert logits.sum(dim=1).eq(1).all()
        assert logits.argmax(dim=1).tolist() == [following(prompt[: i + 1], 997) for i in range(len(prompt))]


def test_it_continues_its_own_tokens():
    prompt = [5, 900, 3]
    expected = list(islice(continuation(np.array(prompt, dtype=np.int32), 997), 20))
    rows = run(OracleModel(997), [prompt + expected], in_chunks([len(prompt) + 20], 1))[0]
    assert rows.argmax(dim=1).tolist()[2:-1] == expected


def test_one_wrong_slot_changes_the_next_token():
    model = OracleModel(997)
    pages = Pages.shuffled([8], block_size=4, seed=0)
    kv = torch.zeros(model.kv_geometry.store_shape(pages.num_blocks, 4), dtype=torch.int32)
    model.forward(torch.arange(7), pages.ragged({0: Part(0, 7)}), kv)
    last = pages.ragged({0: Part(7, 1)})
    right = model.forward(torch.tensor([7]), last, kv.clone()).item()
    assert right == following(list(range(8)), 997)
    slot = pages.slot(0, 2)
    for part in (0, 1):
        damaged = kv.clone()
        damaged[slot // 4, 0, part, slot % 4] += 1
        assert model.forward(torch.tensor([7]), last, damaged).item() != right

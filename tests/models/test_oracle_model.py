"""The integer model behind the real store against the closed form."""

from itertools import islice

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.core.oracle import candidates, continuation, total
from quire.models.oracle import OracleModel
from tests.kernels.layouts import Pages, Part
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
        assert logits.log_softmax(dim=1).equal(logits)
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
    model.forward(torch.arange(7), pages.layout({0: Part(0, 7)}), kv)
    last = pages.layout({0: Part(7, 1)})
    right = model.forward(torch.tensor([7]), last, kv.clone()).item()
    assert right == total(np.arange(8, dtype=np.int32))
    assert right % 997 == following(list(range(8)), 997)
    slot = pages.slot(0, 2)
    for part in (0, 1):
        damaged = kv.clone()
        damaged[slot // 4, 0, part, slot % 4] += 1
        assert model.forward(torch.tensor([7]), last, damaged).item() % 997 != right % 997


@given(prompt=token_lists, count=st.integers(1, 30), vocab_size=st.sampled_from([1, 2, 30, 97, 997, 1024]))
def test_its_logits_are_the_closed_form_of_the_candidates(prompt, count, vocab_size):
    known = np.array(prompt, dtype=np.int32)
    expected = candidates(total(known), vocab_size, count)
    logits = OracleModel(vocab_size).logits(torch.tensor([[total(known)]]))[0]
    assert expected.ids.tolist() == logits.sort(descending=True, stable=True).indices[:count].tolist()
    assert expected.logprobs.tolist() == logits.log_softmax(dim=0)[expected.ids.tolist()].tolist()
    assert expected.ids[0] == following(prompt, vocab_size)
    assert (np.diff(expected.logprobs) < 0).all()

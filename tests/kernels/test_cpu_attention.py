"""Ragged attention of the CPU kernels against the reference: any mixture of chunks and decodes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.interface import AttentionRule
from quire.kernels.reference import ReferenceKernels
from tests.kernels.cpu_kernels import (
    as_declared,
    as_stored,
    cpu_kernels,
    each_kernels,
    native_kernels,
    needs_native,
    no_rotation,
)
from tests.kernels.layouts import Pages, Part, fill
from tests.tiers import choices, examples

NUM_LAYERS = 2
LAYER = 1
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

mixtures = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 5, 8, 9, 20, 33])), min_size=1, max_size=4
)


def attend_both(
    name: str,
    parts: list[Part],
    *,
    block_size: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    activations: torch.dtype | None = None,
    rule: AttentionRule | None = None,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same step through both kernels, each on its own copy of a store with NaN where nothing is."""
    generator = torch.Generator().manual_seed(seed)
    pages = Pages.shuffled([part.num_before + part.num_new for part in parts], block_size, seed)
    store = torch.full((pages.num_blocks, NUM_LAYERS, 2, block_size, kv_heads, dim), math.nan, dtype=dtype)
    fill(store, LAYER, pages, [part.num_before for part in parts], generator)
    layout = pages.layout(dict(enumerate(parts)))
    num_tokens = len(layout.positions)
    kernels = cpu_kernels(name)
    activations = activations or kernels.activation_dtype(dtype)
    qkv = torch.randn(num_tokens, heads + 2 * kv_heads, dim, generator=generator).to(activations)
    outputs = []
    for each in (kernels, ReferenceKernels()):
        layer, mine = as_stored(each, store)[:, LAYER], qkv.clone()
        step = each.plan(layout, block_size)
        step.rope_and_write_kv(mine, None, no_rotation(num_tokens, activations), layer)
        outputs.append(step.attend(mine[:, :heads], layer, rule or AttentionRule(dim**-0.5)).float())
    return outputs[0], outputs[1]


@each_kernels
@settings(max_examples=examples(15, 40))
@given(
    mixture=mixtures,
    block_size=st.sampled_from([1, 2, 3, 8, 16, 32, 128]),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3, 9, 15]),
    dtype=st.sampled_from(DTYPES),
    dim=st.sampled_from(choices([16, 77], [16, 24, 64, 77, 128, 256])),
    window=st.sampled_from([0, 0, 1, 7, 64]),
    softcap=st.sampled_from([0.0, 0.0, 5.0]),
    seed=st.integers(0, 1000),
)
def test_every_mixture_of_chunks_and_decodes_agrees_with_the_reference(
    name, mixture, block_size, kv_heads, group, dtype, dim, window, softcap, seed
):
    fast, truth = attend_both(
        name,
        [Part(*part) for part in mixture],
        block_size=block_size,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=dim,
        dtype=dtype,
        rule=AttentionRule(dim**-0.5, window, softcap),
        seed=seed,
    )
    torch.testing.assert_close(fast, truth, atol=TOLERANCE[dtype], rtol=0.0)


@each_kernels
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_every_group_of_heads_agrees_for_one_row_and_for_several(name, group, num_rows):
    parts = [Part(num_before, 1) for num_before in (40, 0, 18)][:num_rows]
    fast, truth = attend_both(
        name, parts, heads=2 * group, kv_heads=2, dim=64, dtype=torch.bfloat16, rule=AttentionRule(0.2, window=30)
    )
    torch.testing.assert_close(fast, truth, atol=TOLERANCE[torch.bfloat16], rtol=0.0)


@each_kernels
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_float32_queries_over_a_narrower_store_are_not_rounded(name, stored, softcap):
    parts = [Part(20, 1), Part(3, 7), Part(0, 1)]
    rule = AttentionRule(0.3, softcap=softcap)
    fast, truth = attend_both(name, parts, dtype=stored, activations=torch.float32, rule=rule)
    torch.testing.assert_close(fast, truth, atol=TOLERANCE[torch.float32], rtol=0.0)


@each_kernels
def test_weights_are_exact_over_the_whole_range_of_scores(name):
    """A large scale makes scores far apart: the softmax must neither overflow nor lose small weights early."""
    for scale in (1e-3, 1.0, 8.0, 100.0):
        fast, truth = attend_both(name, [Part(50, 1), Part(7, 1)], rule=AttentionRule(scale))
        torch.testing.assert_close(fast, truth, atol=1e-4, rtol=0.0)


@each_kernels
@pytest.mark.parametrize("side", [0, 1])
def test_a_key_or_value_that_is_not_a_number_shows_in_its_own_row_only(name, side):
    pages = Pages.shuffled([9, 9], block_size=4, seed=0)
    store = torch.zeros(pages.num_blocks, 1, 2, 4, 1, 16)
    slot = pages.slot(1, 3)
    store[slot // 4, 0, side, slot % 4] = math.nan
    kernels = cpu_kernels(name)
    step = kernels.plan(pages.layout({0: Part(8, 1), 1: Part(8, 1)}), 4)
    attended = step.attend(torch.ones(2, 1, 16), as_stored(kernels, store)[:, 0], AttentionRule(1.0))
    assert attended[0].isfinite().all()
    assert attended[1].isnan().all()


@each_kernels
def test_a_token_attends_to_itself_alone_when_it_is_first(name):
    fast, _ = attend_both(name, [Part(0, 1)], heads=1, kv_heads=1)
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(1, 3, 16, generator=generator)[0, 2]
    torch.testing.assert_close(fast[0], value)


@each_kernels
def test_what_free_blocks_and_unwritten_slots_hold_changes_nothing(name):
    parts = [Part(5, 1), Part(0, 9), Part(33, 1), Part(20, 3)]
    fast, _ = attend_both(name, parts, rule=AttentionRule(0.25, window=11))
    assert torch.isfinite(fast).all()


@each_kernels
def test_a_window_hides_keys_that_are_a_window_away(name):
    """With window 1 every query sees only itself: the answer is its own value."""
    parts = [Part(6, 1), Part(0, 4)]
    fast, _ = attend_both(name, parts, heads=2, kv_heads=2, rule=AttentionRule(1.0, window=1))
    pages = Pages.shuffled([7, 4], 16, 0)
    generator = torch.Generator().manual_seed(0)
    fill(torch.empty(pages.num_blocks, NUM_LAYERS, 2, 16, 2, 16), LAYER, pages, [6, 0], generator)
    values = torch.randn(5, 6, 16, generator=generator)[:, 4:]
    torch.testing.assert_close(fast, values.flatten(1))


@each_kernels
def test_new_keys_land_in_their_slots_and_nowhere_else(name):
    pages = Pages.shuffled([10, 3], block_size=4, seed=1)
    layout = pages.layout({0: Part(7, 3), 1: Part(2, 1)})
    qkv = torch.randn(4, 6, 8)
    kernels, store = cpu_kernels(name), torch.zeros(pages.num_blocks, 3, 2, 4, 2, 8)
    kernels.plan(layout, 4).rope_and_write_kv(qkv.clone(), None, no_rotation(4), store[:, 1])
    flat = as_declared(kernels, store)[:, 1].transpose(1, 2).flatten(0, 1)
    new = qkv[:, 2:].unflatten(1, (2, 2))
    assert torch.equal(flat[layout.slots], new)
    assert store.count_nonzero() == new.numel()


@needs_native
def test_what_a_half_cannot_hold_is_stored_as_its_largest_and_nan_as_nan():
    """The native kernels store halves for models whose activations have a wider range."""
    pages = Pages.shuffled([2], block_size=4, seed=0)
    store = torch.zeros(pages.num_blocks, 1, 2, 4, 1, 19, dtype=torch.float16)
    kernels = native_kernels()
    written = torch.tensor([1e6, math.nan])[:, None, None].expand(2, 3, 19).contiguous()
    kernels.plan(pages.layout({0: Part(0, 2)}), 4).rope_and_write_kv(written, None, no_rotation(2), store[:, 0])
    store = as_declared(kernels, store)
    first, second = (store[pages.slot(0, place) // 4, 0, :, pages.slot(0, place) % 4] for place in (0, 1))
    assert (first == torch.finfo(torch.float16).max).all() and second.isnan().all()

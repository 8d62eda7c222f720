"""Native attention beyond what `test_cpu_attention.py` asks of every CPU: long contexts, equal bits, int8 stores."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.interface import AttentionRule
from quire.kernels.reference import ReferenceKernels, quantize_kv
from tests.kernels.cpu_kernels import as_declared, as_stored, native_kernels, needs_native, no_rotation
from tests.kernels.layouts import Pages, Part
from tests.tiers import choices, examples

pytestmark = needs_native

SPLIT = 512  # keys that one softmax covers; tests stand on both sides of it
BLOCK_SIZES = [1, 2, 3, 16, 128]


def filled(pages: Pages, lengths: list[int], kv_heads: int, dim: int, dtype: torch.dtype, seed: int) -> Tensor:
    """A store [blocks, 2, block_size, kv_heads, dim] with NaN where no sequence has a key."""
    store = torch.full((pages.num_blocks, 2, pages.block_size, kv_heads, dim), math.nan)
    slots = torch.tensor([pages.slot(s, position) for s, length in enumerate(lengths) for position in range(length)])
    values = torch.randn(len(slots), 2, kv_heads, dim, generator=torch.Generator().manual_seed(seed))
    store[slots // pages.block_size, :, slots % pages.block_size] = values
    return quantize_kv(store) if dtype is torch.int8 else store.to(dtype)


def attend(
    parts: list[Part], store: Tensor, pages: Pages, query: Tensor, rule: AttentionRule, num_threads: int = 2
) -> Tensor:
    kernels = native_kernels(num_threads)
    step = kernels.plan(pages.layout(dict(enumerate(parts))), pages.block_size)
    return step.attend(query, as_stored(kernels, store), rule)


@settings(max_examples=examples(10, 40), deadline=None)
@given(
    lengths=st.lists(st.tuples(st.sampled_from([1, 63, 64, 65, 511, 512, 513, 700, 1030]), st.sampled_from([1, 2, 5])),
                     min_size=1, max_size=2),
    block_size=st.sampled_from(BLOCK_SIZES),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 8]),
    dim=st.sampled_from(choices([16, 24, 64], [16, 24, 64, 80, 128, 256])),
    window=st.sampled_from([0, 0, 1, 64, 200, SPLIT, 600]),
    softcap=st.sampled_from([0.0, 0.0, 4.0]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int8]),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_long_contexts_agree_with_the_reference(
    lengths, block_size, kv_heads, group, dim, window, softcap, dtype, seed
):
    parts = [Part(max(0, length - new), min(new, length)) for length, new in lengths]
    held = [part.num_before + part.num_new for part in parts]
    pages = Pages.shuffled(held, block_size, seed)
    store = filled(pages, held, kv_heads, dim, dtype, seed)
    num_tokens = sum(part.num_new for part in parts)
    query = torch.randn(num_tokens, kv_heads * group, dim, generator=torch.Generator().manual_seed(seed + 1))
    rule = AttentionRule(dim**-0.5, window, softcap)
    layout = pages.layout(dict(enumerate(parts)))
    truth = ReferenceKernels().plan(layout, block_size).attend(query, store, rule)
    torch.testing.assert_close(attend(parts, store, pages, query, rule), truth, atol=2e-5, rtol=0)


@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_every_head_width_and_block_size_agrees(dim: int, block_size: int, dtype: torch.dtype) -> None:
    parts = [Part(20, 6), Part(70, 1)]
    pages = Pages.shuffled([26, 71], block_size, 0)
    store = filled(pages, [26, 71], 2, dim, dtype, 0)
    query = torch.randn(7, 4, dim, generator=torch.Generator().manual_seed(1))
    rule = AttentionRule(dim**-0.5)
    truth = ReferenceKernels().plan(pages.layout(dict(enumerate(parts))), block_size).attend(query, store, rule)
    torch.testing.assert_close(attend(parts, store, pages, query, rule), truth, atol=2e-5, rtol=0)


@settings(max_examples=examples(15, 60), deadline=None)
@given(
    num_keys=st.sampled_from([5, 64, 100, 513, 1100]),
    num_queries=st.integers(1, 60),
    chunk=st.integers(1, 60),
    window=st.sampled_from([0, 1, 30, 100, 530]),
    softcap=st.sampled_from([0.0, 3.0]),
    group=st.sampled_from([1, 3]),
    block_size=st.sampled_from(BLOCK_SIZES),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.int8]),
)
def test_a_query_has_the_same_bits_however_its_sequence_is_chunked(
    num_keys, num_queries, chunk, window, softcap, group, block_size, dtype
):
    """Token by token with one thread; in chunks of any size, beside another sequence, with two."""
    first = max(0, num_keys - num_queries)
    pages = Pages.shuffled([num_keys, 40], block_size, 3)
    store = filled(pages, [num_keys, 40], 2, 32, dtype, 4)
    queries = torch.randn(num_keys - first, 2 * group, 32, generator=torch.Generator().manual_seed(5))
    rule = AttentionRule(0.2, window, softcap)
    alone = [
        attend([Part(first + i, 1)], store, pages, queries[i : i + 1], rule, num_threads=1) for i in range(len(queries))
    ]
    for start in range(0, len(queries), chunk):
        some = queries[start : start + chunk]
        beside = torch.randn(7, 2 * group, 32, generator=torch.Generator().manual_seed(6))
        parts = [Part(first + start, len(some)), Part(33, 7)]
        together = attend(parts, store, pages, torch.cat([some, beside]), rule)[: len(some)]
        assert torch.equal(together, torch.cat(alone[start : start + chunk]))


@pytest.mark.parametrize("num_keys", [9, 600])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("num_new", [1, 8])
def test_what_is_not_a_number_shows_in_its_own_sequence_only(num_keys: int, side: int, num_new: int) -> None:
    pages = Pages.shuffled([num_keys, num_keys], 16, 0)
    store = filled(pages, [num_keys] * 2, 1, 16, torch.float32, 0)
    parts = [Part(num_keys - num_new, num_new)] * 2
    query = torch.randn(2 * num_new, 2, 16, generator=torch.Generator().manual_seed(1))
    clean = attend(parts, store, pages, query, AttentionRule(0.25))
    slot = pages.slot(1, 0)
    store[slot // 16, side, slot % 16] = math.nan
    found = attend(parts, store, pages, query, AttentionRule(0.25))
    assert torch.equal(found[:num_new], clean[:num_new]) and clean.isfinite().all()
    assert found[num_new:].isnan().all()


def test_a_query_that_is_not_a_number_shows_in_its_own_row_only() -> None:
    pages = Pages.shuffled([30], 16, 0)
    store = filled(pages, [30], 1, 16, torch.float32, 0)
    query = torch.randn(9, 2, 16, generator=torch.Generator().manual_seed(1))
    clean = attend([Part(21, 9)], store, pages, query, AttentionRule(0.25))
    query[4, 1, 3] = math.nan
    found = attend([Part(21, 9)], store, pages, query, AttentionRule(0.25)).view(9, 2, 16)
    assert found[4, 1].isnan().all()
    found[4, 1] = clean.view(9, 2, 16)[4, 1]
    assert torch.equal(found.flatten(1), clean)


def test_padding_has_no_keys_and_changes_nothing() -> None:
    """A sequence of context length 0, and tokens behind the last sequence."""
    pages = Pages.shuffled([20, 5], 4, 0)
    store = filled(pages, [20, 5], 1, 16, torch.float32, 0)
    layout = pages.layout({0: Part(19, 1), 1: Part(4, 1)})
    query = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(1))
    kernels = native_kernels()
    whole = kernels.plan(layout, 4).attend(query[:2], as_stored(kernels, store), AttentionRule(0.25))
    layout.context_lengths[1] = 0
    padded = kernels.plan(layout, 4).attend(query, as_stored(kernels, store), AttentionRule(0.25))
    assert torch.equal(padded[0], whole[0])


@settings(max_examples=examples(10, 40), deadline=None)
@given(
    block_size=st.sampled_from(BLOCK_SIZES),
    kv_heads=st.sampled_from([1, 3]),
    dim=st.sampled_from([8, 16, 19, 64, 77, 128]),
    exponents=st.lists(st.sampled_from([-40, -20, 0, 1, 20]), min_size=5, max_size=5),
    seed=st.integers(0, 1000),
)
def test_an_int8_store_has_the_codes_and_scales_of_the_reference(block_size, kv_heads, dim, exponents, seed):
    """Bit for bit, of numbers of every size: each head of a token has its own scale."""
    pages = Pages.shuffled([5], block_size, seed)
    layout = pages.layout({0: Part(0, 5)})
    qkv = torch.randn(5, 1 + 2 * kv_heads, dim, generator=torch.Generator().manual_seed(seed))
    qkv *= torch.tensor([10.0**exponent for exponent in exponents])[:, None, None]
    qkv[1, 1], qkv[2, 2, 0] = 0.0, 0.0
    store = torch.zeros(pages.num_blocks, 2, block_size, kv_heads, dim + 4, dtype=torch.int8)
    stores = []
    for kernels in (native_kernels(), ReferenceKernels()):
        mine = as_stored(kernels, store)
        kernels.plan(layout, block_size).rope_and_write_kv(qkv.clone(), None, no_rotation(5), mine)
        stores.append(as_declared(kernels, mine))
    assert torch.equal(*stores)
    assert stores[0].count_nonzero() > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 18])
def test_a_number_that_is_not_finite_shows_in_its_own_head_of_an_int8_store(bad: float, place: int) -> None:
    pages = Pages.shuffled([2, 2], 4, 0)
    layout = pages.layout({0: Part(0, 2), 1: Part(0, 2)})
    qkv = torch.randn(4, 6, 19, generator=torch.Generator().manual_seed(0))
    qkv[1, 5, place] = bad  # the value of the second head
    store = torch.zeros(pages.num_blocks, 2, 4, 2, 23, dtype=torch.int8)
    for kernels in (native_kernels(), ReferenceKernels()):
        step, mine = kernels.plan(layout, 4), qkv.clone()
        step.rope_and_write_kv(mine, None, no_rotation(4), store)
        found = step.attend(mine[:, :2], store, AttentionRule(0.2)).view(4, 2, 19)
        assert found[1, 1].isnan().all()
        found[1, 1] = 0.0
        assert found.isfinite().all()

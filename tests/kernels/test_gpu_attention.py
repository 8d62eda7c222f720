"""Paged attention in Triton against the reference, over shuffled stores with NaN wherever no key is."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.gpu import kernels as gpu_kernels
from quire.kernels.gpu.attention import dispatch as attention
from quire.kernels.gpu.attention.decode import DecodeTiles, decode_attention
from quire.kernels.gpu.attention.decode_schedule import list_splits, longest_first
from quire.kernels.gpu.attention.dispatch import GpuAttention
from quire.kernels.gpu.attention.prefill import PrefillTiles, prefill_attention, prefill_scratch
from quire.kernels.gpu.attention.prefill_contiguous import TILE_KEYS, ContextCopy, gather_context, gathered_attention
from quire.kernels.gpu.attention.split_merge import SplitScratch
from quire.kernels.gpu.backends.interface import AttentionBackends
from quire.kernels.gpu.kernels import GpuKernels
from quire.kernels.interface import AttentionRule, Rotation
from quire.kernels.reference import ReferenceKernels
from tests.kernels.layouts import Pages, Part, fill
from tests.tiers import choices, examples, long_only

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()  # not in the interpreter
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NUM_LAYERS = 2
LAYER = 1

lengths_before = st.integers(0, 40) | st.integers(0, 150)
chunks = st.lists(st.tuples(lengths_before, st.sampled_from([1, 2, 5, 20, 40])), max_size=2)
rules = st.builds(AttentionRule, st.just(0.2), st.sampled_from([0, 0, 1, 7, 64]), st.sampled_from([0.0, 0.0, 5.0]))


def tiles_for(slots: int) -> DecodeTiles:
    """As if so many programs ran at the same time, and none cost anything besides its tiles."""
    return DecodeTiles(16, 4, 2, slots, 0.0)


class Step:
    """A step whose keys are all written, on the device, and what the reference says of it."""

    def __init__(
        self,
        parts: list[Part],
        *,
        block_size: int = 16,
        group: int = 2,
        kv_heads: int = 2,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        rule: AttentionRule | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = [part.num_before + part.num_new for part in parts]
        pages = Pages.shuffled(lengths, block_size, seed)
        store = torch.full((pages.num_blocks, NUM_LAYERS, 2, block_size, kv_heads, dim), math.nan, dtype=dtype)
        fill(store, LAYER, pages, lengths, generator)
        layout = pages.layout(dict(enumerate(parts)))
        heads = group * kv_heads
        num_tokens = len(layout.positions)
        qkv = torch.randn(num_tokens, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
        self.pages = pages
        self.rule = rule or AttentionRule(dim**-0.5)
        self.truth = ReferenceKernels().plan(layout, block_size).attend(qkv[:, :heads], store[:, LAYER], self.rule)
        self.layout = pages.layout(dict(enumerate(parts)), DEVICE)
        self.kv_layer = store.to(DEVICE)[:, LAYER]
        self.query = qkv.to(DEVICE)[:, :heads]
        self.num_decodes = next((i for i, part in enumerate(parts) if part.num_new > 1), len(parts))

    def attend(self) -> torch.Tensor:
        return GpuAttention(self.layout, self.num_decodes).attend(self.query, self.kv_layer, self.rule)

    def decode(
        self, tiles: DecodeTiles, scratch: SplitScratch | None = None, order: torch.Tensor | None = None
    ) -> torch.Tensor:
        output = torch.full_like(self.truth, math.nan, device=DEVICE)
        layout, order = self.layout, order if order is None else order.to(DEVICE)
        _, _, block_size, kv_heads, _ = self.kv_layer.shape
        splits = list_splits(
            layout.context_lengths, order, self.rule.window, kv_heads=kv_heads, tile=tiles.keys, block_size=block_size,
            slots=tiles.slots, overhead=tiles.overhead,
        )  # fmt: skip
        decode_attention(self.query, self.kv_layer, layout.tables, splits, tiles, self.rule, output, scratch)
        return output

    def attend_gathered(self, tiles: PrefillTiles | None = None) -> torch.Tensor:
        """The only sequence of the step, through a workspace with NaN in it."""
        num_keys = (self.pages.lengths[0] // TILE_KEYS + 1) * TILE_KEYS
        workspace = torch.full((num_keys, *self.kv_layer.shape[1:2], *self.kv_layer.shape[3:]), math.nan)
        workspace = workspace.to(self.kv_layer)
        output = torch.full_like(self.truth, math.nan, device=DEVICE)
        layout = self.layout
        gather_context(self.kv_layer, layout.tables[0], layout.context_lengths, workspace)
        starts, lengths = layout.query_starts, layout.context_lengths
        gathered_attention(self.query, workspace, starts, lengths, self.rule, output, tiles)
        return output

    def check(self, output: torch.Tensor) -> None:
        torch.testing.assert_close(output.cpu(), self.truth, atol=TOLERANCE[self.truth.dtype], rtol=0.0)


@settings(max_examples=examples(4, 15, gpu=True))
@given(
    decodes=st.lists(lengths_before, max_size=2),
    chunks=chunks,
    block_size=st.sampled_from([1, 3, 8, 16, 32, 128]),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 4, 7, 8]),
    dim=st.sampled_from(choices([16, 24], [16, 24, 64], gpu=True)),
    dtype=st.sampled_from(DTYPES),
    rule=rules,
    seed=st.integers(0, 1000),
)
def test_every_mixture_agrees_with_the_reference(decodes, chunks, block_size, kv_heads, group, dim, dtype, rule, seed):
    parts = [Part(num_before, 1) for num_before in decodes] + [Part(*chunk) for chunk in chunks]
    if parts:
        step = Step(
            parts,
            block_size=block_size,
            kv_heads=kv_heads,
            group=group,
            dim=dim,
            dtype=dtype,
            rule=rule,
            seed=seed,
        )
        step.check(step.attend())


@settings(max_examples=examples(4, 15, gpu=True))
@given(
    rows=st.lists(st.tuples(lengths_before, st.integers(1, 8)), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 3, 16]),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 4, 8]),
    dtype=st.sampled_from(DTYPES),
    rule=rules,
    slots=st.sampled_from([1, 12]),
    num_padding=st.integers(0, 2),
)
def test_rows_with_several_queries_agree(rows, block_size, kv_heads, group, dtype, rule, slots, num_padding):
    """Rows that verify drafts, in one tile, however they are split; rows without a query do nothing."""
    parts = [Part(*row) for row in rows]
    step = Step(parts, block_size=block_size, kv_heads=kv_heads, group=group, dtype=dtype, rule=rule)
    layout, most = step.layout, max(part.num_new for part in parts)
    starts = torch.cat([layout.query_starts, layout.query_starts[-1:].expand(num_padding)])
    lengths = torch.cat([layout.context_lengths, layout.context_lengths.new_zeros(num_padding)])
    tables = torch.cat([layout.tables, layout.tables[:1].expand(num_padding, -1)])
    padded = replace(layout, query_starts=starts, context_lengths=lengths, tables=tables, max_queries=most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "decode_tiles", lambda rows, kv_layer: tiles_for(slots))
        step.check(GpuAttention(padded, 0).attend(step.query, step.kv_layer, step.rule))


@pytest.mark.long(gpu=True)  # 5 s in the interpreter
def test_many_rows_with_several_queries_go_longest_first():
    step = Step([Part(7 * place % 40, 1 + place % 4) for place in range(40)], kv_heads=1, group=4)
    layout = replace(step.layout, max_queries=4)
    step.check(GpuAttention(layout, 0).attend(step.query, step.kv_layer, step.rule))


@pytest.mark.parametrize("group", [12, *long_only([128], gpu=True)])
def test_queries_that_fit_no_tile_are_chunks(group, monkeypatch):
    monkeypatch.setattr(attention, "max_query_heads", lambda dim, element_bytes: 32)
    step = Step([Part(20, 3), Part(5, 1), Part(9, 4)], kv_heads=1, group=group)
    layout = replace(step.layout, max_queries=4)
    step.check(GpuAttention(layout, 0).attend(step.query, step.kv_layer, step.rule))


@pytest.mark.parametrize("dim", [80, *long_only([96, 128, 256], gpu=True)])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_heads_of_real_models_agree(dim, dtype):
    step = Step([Part(60, 1), Part(3, 20)], kv_heads=1, group=4, dim=dim, dtype=dtype)
    step.check(step.attend())


@pytest.mark.parametrize(
    "group, dim, dtype",
    [
        (71, 64, torch.float16),
        *long_only(
            [
                (33, 64, torch.float32),
                (64, 128, torch.float32),
                (128, 128, torch.float16),
                (100, 256, torch.float16),
                (200, 128, torch.float16),
            ],
            gpu=True,
        ),
    ],
)
def test_many_query_heads_to_a_key_head_agree(group, dim, dtype):
    step = Step([Part(20, 1), Part(3, 5), Part(0, 2)], kv_heads=1, group=group, dim=dim, dtype=dtype)
    step.check(step.attend())


@pytest.mark.parametrize("group, dim", [(71, 64), (2, 8), *long_only([(129, 64)], gpu=True)])
def test_one_long_chunk_with_odd_head_dims_agrees(group, dim, monkeypatch):
    monkeypatch.setattr(attention, "_MIN_GATHERED", 16)
    step = Step([Part(3, 20)], kv_heads=1, group=group, dim=dim, dtype=torch.float16)
    step.check(step.attend())


def test_sequences_of_chunks_without_a_token_do_nothing():
    step = Step([Part(20, 1)], group=17, kv_heads=1)
    layout = step.layout
    tables, lengths = torch.cat([layout.tables] * 2), torch.cat([layout.context_lengths, layout.context_lengths * 0])
    starts = torch.cat([layout.query_starts, layout.query_starts[-1:]])
    padded = replace(layout, tables=tables, context_lengths=lengths, query_starts=starts)
    step.check(GpuAttention(padded, 1).attend(step.query, step.kv_layer, step.rule))


@pytest.mark.parametrize("slots, window", [(1, 0), (40, 33), *long_only([(8, 0), (40, 0), (8, 100)], gpu=True)])
def test_short_and_long_rows_agree_however_they_are_split(slots, window):
    """Lengths around the edges of tiles and splits: one key, a full tile, one more, and many splits' worth."""
    parts = [Part(length - 1, 1) for length in (1, 17, 32, 280)]
    step = Step(parts, group=3, kv_heads=1, rule=AttentionRule(0.3, window))
    step.check(step.decode(tiles_for(slots)))


def test_one_scratch_serves_layer_after_layer():
    """The counters are zero again, and what earlier rows left in the scratch is not seen by shorter ones."""
    tiles = tiles_for(12)
    scratch = SplitScratch.allocate(30, 15, 16, torch.device(DEVICE))
    scratch.partials.fill_(math.nan), scratch.maxima.fill_(math.nan), scratch.sums.fill_(math.nan)
    for lengths in ([80, 40, 16], [17, 81, 1], [33]):
        step = Step([Part(length - 1, 1) for length in lengths], kv_heads=1)
        step.check(step.decode(tiles, scratch))
        assert not scratch.arrivals.any()
    assert scratch.sums.isfinite().any(), "no row was cut"


@pytest.mark.parametrize("slots", [12, *long_only([1], gpu=True)])
def test_padding_rows_become_zeros_and_read_nothing(slots):
    step = Step([Part(20, 1), Part(40, 1), Part(80, 1)], kv_heads=1)
    step.layout.context_lengths[1] = 0
    step.layout.tables[1] = 2**30  # no block at all: reading it would be an error
    step.truth[1] = 0
    step.check(step.decode(tiles_for(slots)))


def test_chunks_agree_and_other_tokens_are_untouched():
    """More sequences than are searched at once; sequences without queries lie before, between and after."""
    parts = [Part(index % 5, index % 3) for index in range(67)]
    step = Step(parts, group=3, kv_heads=1)
    query = torch.cat([step.query, torch.full_like(step.query[:4], math.nan)])
    output = torch.full((len(query), step.truth.shape[1]), 7.0, device=DEVICE)
    layout = step.layout
    starts, lengths = layout.query_starts, layout.context_lengths
    prefill_attention(query, step.kv_layer, layout.tables, starts, lengths, step.rule, output)
    step.check(output[:-4])
    assert (output[-4:] == 7.0).all()


@pytest.mark.parametrize(
    "window, num_before", [(5, 50), (16, 15), *long_only([(1, 0), (33, 50), (64, 50), (64, 0)], gpu=True)]
)
def test_a_window_that_begins_inside_a_tile_of_keys_agrees(window, num_before):
    step = Step([Part(num_before, 45)], group=1, kv_heads=1, rule=AttentionRule(0.3, window))
    output = torch.empty_like(step.truth, device=DEVICE)
    layout = step.layout
    starts, lengths, tiles = layout.query_starts, layout.context_lengths, PrefillTiles(32, 16, 4, 2)
    prefill_attention(step.query, step.kv_layer, layout.tables, starts, lengths, step.rule, output, tiles=tiles)
    step.check(output)


@pytest.mark.parametrize(
    "splits, min_tiles, slots", [(5, 3, 1024), (5, 1, 19), *long_only([(2, 1, 24), (7, 1, 1024), (7, 1, 3)], gpu=True)]
)
def test_chunks_agree_with_any_split_kv(splits, min_tiles, slots):
    """One scratch for all: its counters are zero again. Chunks that share and chunks too short for it lie together. The
    shape has more sequences and tokens than the step, as that of a CUDA graph may."""
    tiles = PrefillTiles(32, 16, 4, 2, splits, min_tiles, slots)
    scratch = None
    for parts in ([Part(75, 12), Part(0, 3), Part(31, 11)], [Part(0, 21), Part(120, 2), Part(16, 1)]):
        step = Step(parts, group=3, kv_heads=2, rule=AttentionRule(0.3))
        layout = step.layout
        query = torch.cat([step.query, torch.full_like(step.query[:9], math.nan)])
        starts = torch.cat([layout.query_starts, layout.query_starts[-1:].repeat(2)])
        lengths = torch.cat([layout.context_lengths, torch.zeros_like(layout.context_lengths[:2])])
        tables = torch.cat([layout.tables, torch.full_like(layout.tables[:2], 2**30)])
        scratch = scratch or prefill_scratch(query, 2, len(lengths), tiles, 0)
        scratch.partials.fill_(math.nan), scratch.maxima.fill_(math.nan), scratch.sums.fill_(math.nan)
        output = torch.full((len(query), step.truth.shape[1]), 7.0, device=DEVICE)
        prefill_attention(query, step.kv_layer, tables, starts, lengths, step.rule, output, 0, scratch, tiles)
        step.check(output[:-9])
        assert (output[-9:] == 7.0).all()
        assert not scratch.arrivals.any()


def test_weights_are_exact_over_the_whole_range_of_scores():
    """Scores far apart, in tiles and splits whose maxima differ: nothing overflows, small weights are not lost."""
    for scale in (1e-3, 100.0):
        step = Step([Part(200, 1), Part(7, 1), Part(70, 20)], kv_heads=1, rule=AttentionRule(scale))
        torch.testing.assert_close(step.attend().cpu(), step.truth, atol=2e-4, rtol=0.0)


def test_what_freed_blocks_hold_changes_nothing():
    """Beyond a window and beyond a row's end nothing is read: the same bits with NaN there and with zeros."""
    parts = [Part(50, 1), Part(5, 1), Part(33, 9), Part(0, 20)]
    step = Step(parts, block_size=8, kv_heads=1, rule=AttentionRule(0.25, window=11))
    poisoned = step.attend()
    step.kv_layer.nan_to_num_(nan=0.0)
    assert poisoned.isfinite().all()
    assert torch.equal(poisoned, step.attend())
    for row, first_block in ((0, (50 - 11) // 8), (2, (33 - 11) // 8)):
        step.kv_layer[step.layout.tables[row, :first_block].long()] = math.nan
    assert torch.equal(poisoned, step.attend())


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    "num_before, num_new, softcap", [(40, 24, 5.0), *long_only([(0, 20, 0.0), (70, 20, 0.0)], gpu=True)]
)
def test_gathered_keys_give_the_same_as_pages(num_before, num_new, softcap, dtype):
    rule = AttentionRule(0.2, 0, softcap)
    step = Step([Part(num_before, num_new)], group=3, kv_heads=2, dtype=dtype, rule=rule)
    step.check(step.attend_gathered(PrefillTiles(32, 16, 4, 2)))


@pytest.mark.parametrize("gathered", [False, True])
def test_keys_beyond_two_to_the_31_numbers_are_found(gathered):
    """The same blocks at the end of a large store, of which nothing else is touched: no memory is spent on it."""
    parts = [Part(30, 12)] if gathered else [Part(20, 1), Part(40, 1), Part(9, 12)]
    step = Step(parts, dtype=torch.float16)
    near = step.attend_gathered(PrefillTiles(32, 16, 4, 2)) if gathered else step.attend()
    blocks = step.kv_layer.contiguous()
    first = 2**31 // blocks[0].numel() + 1
    step.kv_layer = torch.empty(first + len(blocks), *blocks.shape[1:], dtype=blocks.dtype, device=DEVICE)
    step.kv_layer[first:] = blocks
    step.layout = replace(step.layout, tables=step.layout.tables + first)
    far = step.attend_gathered(PrefillTiles(32, 16, 4, 2)) if gathered else step.attend()
    assert torch.equal(far, near)


def test_a_long_chunk_is_gathered_beside_decodes(monkeypatch):
    gathering = []
    monkeypatch.setattr(attention, "_MIN_GATHERED", 16)
    gather = ContextCopy.gather
    monkeypatch.setattr(ContextCopy, "gather", lambda *given: (gathering.append(1), gather(*given))[1])
    step = Step([Part(60, 1), Part(5, 1), Part(7, 20)], group=3, dtype=torch.float16)
    step.check(step.attend())
    assert gathering == [1]
    short = Step([Part(60, 1), Part(7, 15)], dtype=torch.float16)
    short.check(short.attend())
    several = Step([Part(7, 20), Part(3, 20)], dtype=torch.float16)
    several.check(several.attend())
    assert gathering == [1], "few tokens, or several chunks, are read through their pages"


def test_a_gathered_context_has_its_keys_in_order_and_then_zeros():
    pages = Pages.shuffled([130], block_size=3, seed=0)
    store = torch.full((pages.num_blocks, 1, 2, 3, 3, 16), math.nan)
    fill(store, 0, pages, [130], torch.Generator().manual_seed(0))
    workspace = torch.full((3 * TILE_KEYS, 2, 3, 16), 7.0, device=DEVICE)
    layout = pages.layout({0: Part(129, 1)})
    lengths = layout.context_lengths.to(DEVICE)
    gather_context(store.to(DEVICE)[:, 0], layout.tables[0].to(DEVICE), lengths, workspace)
    slots = [pages.slot(0, position) for position in range(130)]
    wanted = torch.stack([store[slot // 3, 0, :, slot % 3] for slot in slots])
    assert torch.equal(workspace[:130].cpu(), wanted)
    assert (workspace[130 : 2 * TILE_KEYS] == 0).all()
    assert (workspace[2 * TILE_KEYS :] == 7.0).all()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=70))
@settings(max_examples=examples(8, 15, gpu=True), deadline=None)
def test_rows_are_sorted_by_length_and_equal_ones_stay_in_order(lengths):
    order = longest_first(torch.tensor(lengths, dtype=torch.int32, device=DEVICE)).tolist()
    assert order == sorted(range(len(lengths)), key=lambda row: -lengths[row])


@pytest.mark.parametrize("slots", [12, *long_only([1], gpu=True)])
def test_rows_agree_in_any_order(slots):
    step = Step([Part(num_before, 1) for num_before in (3, 70, 0, 150, 33)], kv_heads=1)
    for order in ([3, 1, 4, 0, 2], [0, 1, 2, 3, 4]):
        step.check(step.decode(tiles_for(slots), order=torch.tensor(order, dtype=torch.int32)))


def test_many_rows_go_longest_first_and_are_split_once_per_window(monkeypatch):
    orders = []
    monkeypatch.setattr(attention, "_MIN_ORDERED", 3)
    cut = attention.list_splits
    monkeypatch.setattr(
        attention, "list_splits", lambda *given, **how: (orders.append(given[1]), cut(*given, **how))[1]
    )
    for num_rows in (2, 3):
        step = Step([Part(20 * row, 1) for row in range(num_rows)], kv_heads=1)
        planned = GpuAttention(step.layout, num_rows)
        for _ in range(2):
            step.check(planned.attend(step.query, step.kv_layer, step.rule))
    assert len(orders) == 2 and orders[0] is None and orders[1].tolist() == [2, 1, 0]


@pytest.mark.parametrize("announced", [(0, 20), *long_only([((),)], gpu=True)])
def test_layers_with_a_window_and_without_agree_in_one_step(announced, monkeypatch):
    """Attention uses PDL only where the list of splits is older than the launch before it."""
    pdl = []
    decode = attention.decode_attention
    monkeypatch.setattr(
        attention, "decode_attention", lambda *given, **how: (pdl.append(how["pdl"]), decode(*given, **how))
    )
    plain, windowed = (
        Step([Part(90, 1), Part(7, 1), Part(0, 1)], kv_heads=1, rule=rule)
        for rule in (AttentionRule(0.3), AttentionRule(0.3, window=20))
    )
    planned = GpuAttention(plain.layout, 3)
    planned.split_decodes(plain.kv_layer, announced)
    for step in (plain, windowed, plain):
        step.check(planned.attend(step.query, step.kv_layer, step.rule))
    assert pdl == [False, bool(announced), True]


def test_keys_are_written_between_the_schedule_and_the_attention(monkeypatch):
    step = Step([Part(90, 1), Part(7, 1)], kv_heads=1)
    order = []
    for owner, name in (
        (attention, "list_splits"),
        (gpu_kernels, "rope_and_write_kv"),
        (attention, "decode_attention"),
    ):
        done = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *given, _do=done, _name=name, **how: (order.append((_name, how.get("pdl"))), _do(*given, **how))[1],
        )
    planned = GpuKernels(windows=(0, 20)).plan(replace(step.layout, num_decodes=2), 16)
    qkv = torch.zeros(2, step.query.shape[1] + 2, 16, device=DEVICE)
    angles = torch.zeros(2, 1, 16, device=DEVICE)
    store = torch.zeros_like(step.kv_layer)
    for _ in range(2):
        planned.rope_and_write_kv(qkv, None, Rotation(angles.cos(), angles.sin()), store)
        planned.attend(step.query, step.kv_layer, step.rule)
    layer = [("rope_and_write_kv", None), ("decode_attention", True)]
    assert order == [("list_splits", None)] * 2 + layer * 2


def test_decodes_that_a_library_declines_use_quires_kernel():
    class Leaving:
        def prepare(self, sequences):
            return self

        def takes(self, kv_layer):
            return False

    step = Step([Part(90, 1), Part(7, 1)], kv_heads=1)
    planned = GpuAttention(step.layout, 2, AttentionBackends(decodes=Leaving()))
    planned.split_decodes(step.kv_layer, (0,))
    step.check(planned.attend(step.query, step.kv_layer, step.rule))

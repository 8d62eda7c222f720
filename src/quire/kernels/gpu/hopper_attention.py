"""Attention of chunks on Hopper, in Gluon: loads, products and softmax by different warps. Bound by tensor cores.

A program takes tiles of 128 rows from a list, one after the other: tokens of a sequence with all query heads of one key
head. One warp loads keys and values through the copy engine, page by page, some tiles ahead. Two groups of four warps
have 64 rows each: while the tensor cores add the values of one tile of keys, a group has the scores of the next and
takes their softmax. Keys come from the last to the first, so that what must be masked comes first. Keys that were
gathered are a store whose pages are as large as a tile. Knows nothing of windows and soft caps, nor of sharing keys
between programs: it is for chunks with work for every processor.
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.contract import AttentionRule
from quire.kernels.gpu.described import described
from quire.kernels.gpu.gluon_names import group_barrier, load_block, reinterpreted
from quire.kernels.gpu.key_tile import LOWEST, Rates
from quire.kernels.gpu.launch import launch
from quire.kernels.gpu.work_list import FIRST_PLACE, FIRST_ROW, LAST_PLACE, LENGTH, NUM_FIELDS, SEQUENCE

TILE_ROWS = 128  # (token, query head) pairs
_HALVES = gl.constexpr(2)  # groups of warps
_ROWS = gl.constexpr(64)  # of a group: what a product of four warps takes
_WARPS = gl.constexpr(4)  # of a group
_SLAB = gl.constexpr(64)  # columns that lie together in shared memory: 128 bytes
_REGISTERS = 168  # of each thread at the start: all that 12 warps can have. The loader gives the groups of its own


class HopperTiles(NamedTuple):
    """How the work is cut. The defaults come from `_tiles`; others are for measuring and testing."""

    keys: int
    stages: int  # tiles of keys, and as many of values, that are loaded ahead
    loader_registers: int  # the more pages a tile has, the more


def _tiles(is_paged: bool) -> HopperTiles:
    """Measured on an H200 with heads of 128 (docs/performance/gpu.md, section 18)."""
    return HopperTiles(128, 3, 40) if is_paged else HopperTiles(128, 2, 24)


@gluon.constexpr_function
def _product_layout(columns):
    """How the sums of a product [_ROWS, columns] lie in the registers of a group."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _turn(turn):
    """Which place of the list a program takes in its turn: forwards and backwards in turn, so that lengths add up."""
    program = gl.program_id(0)
    place = program
    if turn % 2 == 1:
        place = gl.num_programs(0) - 1 - program
    return turn * gl.num_programs(0) + place


@gluon.jit
def _page_rows(table, first_page, last_page, page_rows, PAGES: gl.constexpr):
    """Where each page of a tile begins in the store. Behind the last, that one again: every page is some page."""
    rows = ()
    for page in gl.static_range(PAGES):
        number = gl.minimum(first_page + page, last_page)
        if table is not None:
            number = gl.load(table + number)
        rows += (number * page_rows,)  # type: ignore[assignment]
    return rows


@gluon.jit
def _load_tile(
    store, rows, further, column, ready, empty, pages, count,
    TILE: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Keys or values, as soon as their buffer is free: `further` rows behind those at which the pages begin."""
    PAGES: gl.constexpr = TILE // PAGE
    SLABS: gl.constexpr = DIM // _SLAB
    slot = count % STAGES
    mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(slot), TILE * DIM * 2)
    for page in gl.static_range(PAGES):
        for slab in gl.static_range(SLABS):
            target = pages.index((slot * SLABS + slab) * PAGES + page)
            source = [rows[page] + further, column + slab * _SLAB]
            load_block(store, source, ready.index(slot), target)


@gluon.jit
def _load(
    query, store, tables, items, buffers, barriers, total, kv_heads, table_stride, page_rows, side_rows, side_columns,
    TOKENS: gl.constexpr, TILE: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    PAGE: gl.constexpr,
):  # fmt: skip
    """The warp that loads: for each tile of rows its queries, and its tiles of keys and values."""
    PAGES: gl.constexpr = TILE // PAGE
    q_bufs, _, _, k_pages, v_pages = buffers
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty = barriers
    count = 0  # tiles of keys so far
    done = 0  # tiles of rows so far
    for turn in range(gl.cdiv(total, gl.num_programs(0))):
        number = _turn(turn)
        kv_head = number % kv_heads
        item = items + number // kv_heads * NUM_FIELDS
        last_place = gl.load(item + LAST_PLACE, mask=number < total, other=-1)
        if last_place >= 0:
            first_row = gl.load(item + FIRST_ROW)
            last_page = (gl.load(item + LENGTH) - 1) // PAGE
            table = tables
            if tables is not None:
                table = tables + gl.load(item + SEQUENCE) * table_stride
            num_tiles = last_place // TILE + 1
            for i in range(num_tiles):
                rows = _page_rows(table, (num_tiles - 1 - i) * PAGES, last_page, page_rows, PAGES)
                column = kv_head * DIM
                _load_tile(store, rows, 0, column, k_ready, k_empty, k_pages, count, TILE, DIM, STAGES, PAGE)
                if i == 0:
                    for half in gl.static_range(_HALVES):
                        mbarrier.wait(q_empty.index(half), (done & 1) ^ 1)
                        mbarrier.expect(q_ready.index(half), query.block_type.nbytes)
                        load_block(
                            query, [first_row + half * (TOKENS // _HALVES), kv_head * GROUP, 0],
                            q_ready.index(half), q_bufs.index(half),
                        )  # fmt: skip
                column += side_columns
                _load_tile(store, rows, side_rows, column, v_ready, v_empty, v_pages, count, TILE, DIM, STAGES, PAGE)
                count += 1
            done += 1


@gluon.jit
def _hide(scores, at, places, TILE: gl.constexpr):
    """Keys that come after a query are not seen by it."""
    positions = at + gl.arange(0, TILE, layout=gl.SliceLayout(0, _product_layout(TILE)))
    return gl.where(gl.expand_dims(positions, 0) <= gl.expand_dims(places, 1), scores, float("-inf"))


@gluon.jit
def _soften(scores, rate, running_max, running_sum):
    """The weights of a tile's keys, what older sums fade by, and the new maximum and sum."""
    new_max = gl.maximum(running_max, gl.max(scores, 1) * rate)
    weights = gl.exp2(scores * rate - gl.expand_dims(new_max, 1))
    fade = gl.exp2(running_max - new_max)
    return weights, fade, new_max, running_sum * fade + gl.sum(weights, 1)


@gluon.jit
def _zero_behind(
    v_pages, v_ready, count, last, length,
    TILE: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """What a page holds behind the last key may be anything, even not a number, and no weight would make it nothing.

    Both groups write the same zeros: neither waits for the other.
    """
    PAGES: gl.constexpr = TILE // PAGE
    SLABS: gl.constexpr = DIM // _SLAB
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [_WARPS, 1], [1, 0])
    if last + TILE > length:
        slot = count % STAGES
        mbarrier.wait(v_ready.index(slot), (count // STAGES) & 1)
        in_page = gl.arange(0, PAGE, layout=gl.SliceLayout(1, layout))
        for page in range((length - last) // PAGE, PAGES):
            present = gl.expand_dims(last + page * PAGE + in_page < length, 1)
            for slab in gl.static_range(SLABS):
                there = v_pages.index((slot * SLABS + slab) * PAGES + page)
                values = there.load(layout)
                there.store(gl.where(present, values, gl.full_like(values, 0.0)))
        fence_async_shared()
        group_barrier()


@gluon.jit
def _over_tiles(
    queries, buffers, barriers, weights, gathered, running_max, running_sum, places, rate, count, begin, end,
    MASKED: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles from begin down to end: the scores of each, and the values of the one before it meanwhile."""
    _, k_bufs, v_bufs, _, _ = buffers
    _, _, k_ready, k_empty, v_ready, v_empty = barriers
    for at in range(begin, end, -TILE):
        slot = count % STAGES
        slot_before = (count - 1) % STAGES
        phase_before = ((count - 1) // STAGES) & 1
        mbarrier.wait(k_ready.index(slot), (count // STAGES) & 1)
        zeros = gl.zeros([_ROWS, TILE], gl.float32, _product_layout(TILE))
        asked = warpgroup_mma(queries, k_bufs.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(slot_before), phase_before)
        adding = warpgroup_mma(weights, v_bufs.index(slot_before), gathered, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[asked])
        mbarrier.arrive(k_empty.index(slot), count=1)
        if MASKED:
            scores = _hide(scores, at, places, TILE)
        heavy, fade, running_max, running_sum = _soften(scores, rate, running_max, running_sum)
        fade = gl.convert_layout(fade, gl.SliceLayout(1, gathered.type.layout))
        next_weights = gl.convert_layout(heavy.to(weights.dtype), weights.type.layout)
        # Came true long since: nothing moves past it, so the softmax stays before the wait for the products.
        mbarrier.wait(v_ready.index(slot_before), phase_before)
        gathered, weights, fade, running_sum = warpgroup_mma_wait(0, deps=[adding, next_weights, fade, running_sum])
        mbarrier.arrive(v_empty.index(slot_before), count=1)
        gathered = gathered * gl.expand_dims(fade, 1)
        count += 1
    return weights, gathered, running_max, running_sum, count


@gluon.jit
def _attend_item(
    item, buffers, barriers, queries, places, rate, count,
    TILE: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """The first tile by itself, then the masked ones, then the others. The weights of the last tile, whose values are
    still to be added; what was gathered until then; the sums of all weights; and the count of tiles after it."""
    _, k_bufs, _, _, v_pages = buffers
    _, _, k_ready, k_empty, v_ready, _ = barriers
    row_layout: gl.constexpr = gl.SliceLayout(1, _product_layout(TILE))
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, _product_layout(DIM), 2)
    first_place = gl.load(item + FIRST_PLACE)
    last = gl.load(item + LAST_PLACE) // TILE * TILE
    edge = (first_place + 1) // TILE * TILE  # before it no query meets a key later than itself
    slot = count % STAGES
    mbarrier.wait(k_ready.index(slot), (count // STAGES) & 1)
    zeros = gl.zeros([_ROWS, TILE], gl.float32, _product_layout(TILE))
    asked = warpgroup_mma(queries, k_bufs.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[asked])
    mbarrier.arrive(k_empty.index(slot), count=1)
    if PAGED:  # values that were gathered end in zeros
        _zero_behind(v_pages, v_ready, count, last, gl.load(item + LENGTH), TILE, DIM, STAGES, PAGE)
    running_max = gl.full([_ROWS], LOWEST, gl.float32, row_layout)
    running_sum = gl.zeros([_ROWS], gl.float32, row_layout)
    heavy, _, running_max, running_sum = _soften(_hide(scores, last, places, TILE), rate, running_max, running_sum)
    weights = gl.convert_layout(heavy.to(k_bufs.dtype), weights_layout)
    gathered = gl.zeros([_ROWS, DIM], gl.float32, _product_layout(DIM))
    weights, gathered, running_max, running_sum, count = _over_tiles(
        queries, buffers, barriers, weights, gathered, running_max, running_sum, places, rate, count + 1,
        last - TILE, edge - TILE, True, TILE, STAGES,
    )  # fmt: skip
    weights, gathered, running_max, running_sum, count = _over_tiles(
        queries, buffers, barriers, weights, gathered, running_max, running_sum, places, rate, count,
        gl.minimum(edge, last) - TILE, -TILE, False, TILE, STAGES,
    )  # fmt: skip
    return weights, gathered, running_sum, count


@gluon.jit
def _attend(
    output, items, buffers, barriers, total, kv_heads, output_stride, rate,
    HALF: gl.constexpr, TOKENS: gl.constexpr, TILE: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
    STAGES: gl.constexpr, PAGE: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """A group of warps: half of the rows of each tile."""
    out_layout: gl.constexpr = _product_layout(DIM)
    q_bufs, _, v_bufs, _, _ = buffers
    q_ready, q_empty, _, _, v_ready, v_empty = barriers
    queries = q_bufs.index(HALF).reshape([_ROWS, DIM])
    tokens = HALF * (TOKENS // _HALVES) + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _product_layout(TILE))) // GROUP
    rows = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, out_layout))
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, out_layout))
    count = 0
    done = 0
    for turn in range(gl.cdiv(total, gl.num_programs(0))):
        number = _turn(turn)
        item = items + number // kv_heads * NUM_FIELDS
        last_place = gl.load(item + LAST_PLACE, mask=number < total, other=-1)
        if last_place >= 0:
            first_place = gl.load(item + FIRST_PLACE)
            places = gl.minimum(first_place + tokens, last_place)  # rows left over see what the last does
            mbarrier.wait(q_ready.index(HALF), done & 1)
            weights, gathered, running_sum, count = _attend_item(
                item, buffers, barriers, queries, places, rate, count, TILE, DIM, STAGES, PAGE, PAGED
            )
            mbarrier.arrive(q_empty.index(HALF), count=1)
            slot = (count - 1) % STAGES
            mbarrier.wait(v_ready.index(slot), ((count - 1) // STAGES) & 1)
            adding = warpgroup_mma(weights, v_bufs.index(slot), gathered, is_async=True)
            gathered = warpgroup_mma_wait(0, deps=[adding])
            mbarrier.arrive(v_empty.index(slot), count=1)
            done += 1
            running_sum = gl.convert_layout(running_sum, gl.SliceLayout(1, out_layout))
            answer = (gathered / gl.expand_dims(running_sum, 1)).to(v_bufs.dtype)
            answered = HALF * (TOKENS // _HALVES) + rows // GROUP
            columns = (number % kv_heads * GROUP + rows % GROUP) * DIM
            offsets = (gl.load(item + FIRST_ROW) + answered).to(gl.int64) * output_stride + columns
            gl.store(
                output + gl.expand_dims(offsets, 1) + gl.expand_dims(dims, 0), answer,
                mask=gl.expand_dims(answered <= last_place - first_place, 1),
            )  # fmt: skip


@gluon.jit
def _new_barriers(NUMBER: gl.constexpr, READY: gl.constexpr, EMPTY: gl.constexpr):
    """For so many buffers: one that waits for what is loaded, and one for those who are done with it."""
    ready = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(ready.index(i), count=READY)
        mbarrier.init(empty.index(i), count=EMPTY)
    return ready, empty


@gluon.jit(do_not_specialize=["total", "table_stride"], do_not_specialize_on_alignment=["tables"])
def _hopper_kernel(
    query, store, tables, items, output, total, kv_heads, table_stride, page_rows, side_rows, side_columns,
    output_stride, rate,
    TOKENS: gl.constexpr, TILE: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    PAGE: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: places of the list, as its turns come. total: places times key heads."""
    PAGES: gl.constexpr = STAGES * TILE // PAGE * (DIM // _SLAB)
    PAGED: gl.constexpr = tables is not None
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, DIM], store.dtype)
    page_layout: gl.constexpr = store.layout
    q_bufs = gl.allocate_shared_memory(query.dtype, [_HALVES, TOKENS // _HALVES, GROUP, DIM], query.layout)
    k_bufs = gl.allocate_shared_memory(store.dtype, [STAGES, TILE, DIM], tile_layout)
    v_bufs = gl.allocate_shared_memory(store.dtype, [STAGES, TILE, DIM], tile_layout)
    k_pages = reinterpreted(k_bufs, [PAGES, PAGE, _SLAB], page_layout)
    v_pages = reinterpreted(v_bufs, [PAGES, PAGE, _SLAB], page_layout)
    buffers = (q_bufs, k_bufs, v_bufs, k_pages, v_pages)
    q_ready, q_empty = _new_barriers(_HALVES, 1, 1)
    k_ready, k_empty = _new_barriers(STAGES, 1, _HALVES)
    v_ready, v_empty = _new_barriers(STAGES, 1, _HALVES)
    barriers = (q_ready, q_empty, k_ready, k_empty, v_ready, v_empty)
    fence_async_shared()
    gl.warp_specialize([
        (_attend, (output, items, buffers, barriers, total, kv_heads, output_stride, rate,
                   0, TOKENS, TILE, GROUP, DIM, STAGES, PAGE, PAGED)),
        (_attend, (output, items, buffers, barriers, total, kv_heads, output_stride, rate,
                   1, TOKENS, TILE, GROUP, DIM, STAGES, PAGE, PAGED)),
        (_load, (query, store, tables, items, buffers, barriers, total, kv_heads, table_stride, page_rows, side_rows,
                 side_columns, TOKENS, TILE, GROUP, DIM, STAGES, PAGE)),
    ], [_WARPS, 1], [REGISTERS, LOADER_REGISTERS])  # fmt: skip


def gathered_pages(workspace: Tensor) -> Tensor:
    """[keys, 2, kv_heads, dim] as pages of a tile each: [tiles, 2, keys of a tile, kv_heads, dim], strided."""
    pages: Tensor = workspace.unflatten(0, (-1, _tiles(is_paged=False).keys)).transpose(1, 2)
    return pages


def hopper_attention(
    query: Tensor,  # [tokens, heads, dim], strided
    pages: Tensor,  # [pages, 2, page_size, kv_heads, dim], strided: a layer of the store, or gathered_pages
    tables: Tensor | None,  # [sequences, width] int32; None: one sequence, pages in order, zeros behind its last key
    items: Tensor,  # what work_list says, with 128 rows to a tile
    rule: AttentionRule,  # without window and soft cap
    output: Tensor,  # [tokens, heads * dim]; tokens of no sequence are left as they are
    num_programs: int,  # as many as run at once
    tiles: HopperTiles | None = None,
) -> None:
    """The queries of each sequence over its keys, up to each one's own, into output."""
    _, heads, dim = query.shape
    num_pages, _, page_size, kv_heads, _ = pages.shape
    page_stride, side_stride, slot_stride = pages.stride()[:3]
    tiles = tiles or _tiles(tables is not None)
    group = heads // kv_heads
    tokens = TILE_ROWS // group
    assert not rule.window and not rule.softcap, rule
    assert pages.stride(3) == dim and pages.stride(4) == output.stride(1) == query.stride(2) == 1
    # Values lie whole rows behind their keys, as in the store, or in the same rows, as gathered ones do.
    side_rows, side_columns = divmod(side_stride, slot_stride)
    page_rows = page_stride // slot_stride
    num_rows = (num_pages - 1) * page_rows + side_rows + page_size
    flat = pages.as_strided((num_rows, side_columns + kv_heads * dim), (slot_stride, 1))
    registers = (3 * _REGISTERS - tiles.loader_registers) // 2 // 8 * 8
    total = len(items) * kv_heads
    launch(
        _hopper_kernel, (min(total, num_programs),),
        described(query, tokens // _HALVES.value, group, dim), described(flat, page_size, _SLAB.value),
        tables, items, output, total, kv_heads, 0 if tables is None else tables.stride(0),
        page_rows, side_rows, side_columns, output.stride(0), Rates.of(rule).rate,
        TOKENS=tokens, TILE=tiles.keys, GROUP=group, DIM=dim, STAGES=tiles.stages, PAGE=page_size,
        REGISTERS=registers, LOADER_REGISTERS=tiles.loader_registers, num_warps=_WARPS.value, maxnreg=_REGISTERS,
    )  # fmt: skip

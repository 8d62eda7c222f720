"""Prefill attention on Hopper, in Gluon: one persistent, warp-specialised kernel. Bound by tensor cores.

A program takes tiles of 128 rows from a work list, one after another: tokens of a sequence with the query heads of one
key head (`work_list`). One loader warp loads keys and values by TMA, page by page, some tiles ahead, as soon as the
consumers release a buffer; queries too, where the query heads per key head divide half a tile. Two consumer warpgroups
of four warps have half of the rows each: while the tensor cores multiply the values of one tile of keys (WGMMA), a
consumer computes the online softmax of the next tile's scores. Keys go from the last to the first, so that masked tiles
come first. Gathered keys are a store whose pages are as large as a tile. Heads are padded to a power of two: the
queries end in zeros, so the padding of keys does not count. No split-KV: it is for chunks with work for every SM.

`buffers` = (q_bufs, k_bufs, v_bufs, k_pages, v_pages); `barriers` = (q_ready, q_empty, k_ready, k_empty, v_ready,
v_empty).
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

from quire.kernels.gpu.attention.prefill_schedule import (
    FIRST_HEAD,
    FIRST_PLACE,
    FIRST_TOKEN,
    LAST_PLACE,
    LENGTH,
    NUM_FIELDS,
    SEQUENCE,
)
from quire.kernels.gpu.attention.softmax_tile import LOWEST, TWICE_LOG2E, SoftmaxScale
from quire.kernels.gpu.gluon_compat import (
    rcp_approx,
    reinterpret_shared,
    tanh_approx,
    tensor_descriptor,
    tma_load,
    warps_barrier,
)
from quire.kernels.gpu.launch import launch, next_power_of_2
from quire.kernels.interface import AttentionRule

HALVES = gl.constexpr(2)  # of a tile of rows: one warpgroup (four warps) each
HALF_ROWS = gl.constexpr(64)  # of a half: M of one WGMMA
SLAB = gl.constexpr(64)  # contiguous columns in shared memory: 128 bytes


@gluon.jit
def take_tile(items, turn, total, kv_heads):
    """The tile of rows and the key head of a program's next turn, and the tile's last position; -1: nothing.

    Programs go through the list alternately forwards and backwards, which balances their work.
    """
    program = gl.program_id(0)
    place = program
    if turn % 2 == 1:
        place = gl.num_programs(0) - 1 - program
    number = turn * gl.num_programs(0) + place
    item = items + number // kv_heads * NUM_FIELDS
    return item, number % kv_heads, gl.load(item + LAST_PLACE, mask=number < total, other=-1)


@gluon.jit
def first_key(item, window, WINDOWED: gl.constexpr):
    """The first key visible to any query of a tile of rows."""
    key = 0
    if WINDOWED:
        key = gl.maximum(gl.load(item + FIRST_PLACE) - window + 1, 0)
    return key


@gluon.jit
def _page_rows(table, number, first_page, last_page, page_rows, PAGES: gl.constexpr, WINDOWED: gl.constexpr):
    """First rows in the store of a tile's pages, from page `number` on. Pages before the first and behind the last may
    be freed: the first or last page is loaded in their place."""
    rows = ()
    for page in gl.static_range(PAGES):
        wanted = gl.minimum(number + page, last_page)
        if WINDOWED:
            wanted = gl.maximum(wanted, first_page)
        if table is not None:
            wanted = gl.load(table + wanted)
        rows += (wanted * page_rows,)  # type: ignore[assignment]
    return rows


@gluon.jit
def _load_tile(
    store, rows, further, column, ready, empty, pages, count,
    TILE: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """TMA loads of keys or values, as soon as their buffer is free. `further`: row offset from the pages' first."""
    PAGES: gl.constexpr = TILE // PAGE
    SLABS: gl.constexpr = DIM // SLAB
    slot = count % STAGES
    mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(slot), TILE * DIM * 2)
    for page in gl.static_range(PAGES):
        for slab in gl.static_range(SLABS):
            target = pages.index((slot * SLABS + slab) * PAGES + page)
            source = [rows[page] + further, column + slab * SLAB]
            tma_load(store, source, ready.index(slot), target)


@gluon.jit
def _load_queries(query, first_token, kv_head, q_bufs, q_ready, q_empty, done, GROUP: gl.constexpr):
    """TMA loads of a tile's queries, as soon as the previous ones are released."""
    for half in gl.static_range(HALVES):
        mbarrier.wait(q_empty.index(half), (done & 1) ^ 1)
        mbarrier.expect(q_ready.index(half), query.block_type.nbytes)
        source = [first_token + half * (HALF_ROWS // GROUP), kv_head * GROUP, 0]
        tma_load(query, source, q_ready.index(half), q_bufs.index(half))


@gluon.jit
def _loader(
    query, store, tables, items, buffers, barriers, total, kv_heads, window, table_stride, page_rows, side_rows,
    side_columns,
    TILE: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    PAGE: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The loader warp: for each tile of rows its queries, if they are packed, and its tiles of keys and values."""
    PAGES: gl.constexpr = TILE // PAGE
    q_bufs, _, _, k_pages, v_pages = buffers
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty = barriers
    count = 0  # tiles of keys so far
    done = 0  # tiles of rows so far
    for turn in range(gl.cdiv(total, gl.num_programs(0))):
        item, kv_head, last_place = take_tile(items, turn, total, kv_heads)
        if last_place >= 0:
            first_token = gl.load(item + FIRST_TOKEN)
            first = first_key(item, window, WINDOWED)
            last_page = (gl.load(item + LENGTH) - 1) // PAGE
            table = tables
            if tables is not None:
                table = tables + gl.load(item + SEQUENCE) * table_stride
            num_tiles = last_place // TILE + 1
            for i in range(num_tiles - first // TILE):
                page = (num_tiles - 1 - i) * PAGES
                rows = _page_rows(table, page, first // PAGE, last_page, page_rows, PAGES, WINDOWED)
                column = kv_head * WIDTH
                _load_tile(store, rows, 0, column, k_ready, k_empty, k_pages, count, TILE, DIM, STAGES, PAGE)
                if PACKED and i == 0:
                    _load_queries(query, first_token, kv_head, q_bufs, q_ready, q_empty, done, GROUP)
                column += side_columns
                _load_tile(store, rows, side_rows, column, v_ready, v_empty, v_pages, count, TILE, DIM, STAGES, PAGE)
                count += 1
            done += 1


_WARPS = gl.constexpr(4)  # per half
TILE_ROWS: int = HALVES.value * HALF_ROWS.value
_SHORT_WINDOW = 512  # keys
_REGISTERS = 168  # per thread at the start: the limit for 12 warps. The loader gives some of its own to the consumers


class _HopperTiles(NamedTuple):
    """Tile sizes."""

    keys: int
    stages: int  # buffers for tiles of keys, and as many for values
    loader_registers: int  # grows with the pages per tile


def _tiles(is_paged: bool, dim: int, window: int = 0) -> _HopperTiles:
    """Measured on an H200 (docs/performance/ledger, sections 18 and 24)."""
    if dim > 128:  # as much as fits in shared memory
        return _HopperTiles(64, 2, 40 if is_paged else 24)
    if 0 < window <= _SHORT_WINDOW:  # smaller tiles load fewer invisible keys
        return _HopperTiles(64, 4, 40)
    return _HopperTiles(128, 3, 40) if is_paged else _HopperTiles(128, 2, 24)


@gluon.constexpr_function
def _mma_layout(columns):
    """Register layout of a WGMMA accumulator [HALF_ROWS, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _mask_scores(scores, at, places, window, TILE: gl.constexpr, WINDOWED: gl.constexpr):
    """Causal mask, and window if there is one."""
    positions = gl.expand_dims(at + gl.arange(0, TILE, layout=gl.SliceLayout(0, _mma_layout(TILE))), 0)
    places = gl.expand_dims(places, 1)
    seen = positions <= places
    if WINDOWED:
        seen = seen & (positions > places - window)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _capped(scores, cap_rate, weighted: gl.constexpr, CAPPED: gl.constexpr):
    """tanh of the scores, if they are soft-capped. weighted: the dtype of the weights.

    tanh.approx has an error of 2**-11 of a score, and so has a weight: for scores up to 4 less than the rounding of
    bfloat16. In float16, which rounds less, tanh is computed from an exponential.
    """
    if CAPPED:
        if weighted == gl.bfloat16:
            scores = tanh_approx(scores * cap_rate)
        else:
            scores = 1.0 - 2.0 * rcp_approx(1.0 + gl.exp2(scores * (cap_rate * TWICE_LOG2E)))
    return scores


@gluon.jit
def _softmax(scores, rate, running_max, running_sum):
    """Online softmax: the weights of a tile's keys, the factor on older sums, and the new maximum and sum."""
    new_max = gl.maximum(running_max, gl.max(scores, 1) * rate)
    weights = gl.exp2(scores * rate - gl.expand_dims(new_max, 1))
    rescale = gl.exp2(running_max - new_max)
    return weights, rescale, new_max, running_sum * rescale + gl.sum(weights, 1)


@gluon.jit
def _zero_invalid_values(
    v_pages, v_ready, count, at, first, length,
    TILE: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """A page may hold anything behind the last key, even NaN, which a weight of 0 does not cancel. The same page may
    stand in for pages before the first key.

    Both halves write the same zeros: neither waits for the other.
    """
    PAGES: gl.constexpr = TILE // PAGE
    SLABS: gl.constexpr = DIM // SLAB
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [_WARPS, 1], [1, 0])
    if at + TILE > length:
        slot = count % STAGES
        mbarrier.wait(v_ready.index(slot), (count // STAGES) & 1)
        in_page = gl.arange(0, PAGE, layout=gl.SliceLayout(1, layout))
        for page in range(gl.where(first > at, 0, (length - at) // PAGE), PAGES):
            positions = at + page * PAGE + in_page
            present = gl.expand_dims((positions >= first) & (positions < length), 1)
            for slab in gl.static_range(SLABS):
                there = v_pages.index((slot * SLABS + slab) * PAGES + page)
                values = there.load(layout)
                there.store(gl.where(present, values, gl.full_like(values, 0.0)))
        fence_async_shared()
        warps_barrier()


@gluon.jit
def _attend_tiles(
    queries, buffers, barriers, weights, acc, running_max, running_sum, places, rates, window, count, begin, end,
    MASKED: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    """Tiles from begin down to end: the scores of each overlap the value matmul of the one before it."""
    _, k_bufs, v_bufs, _, _ = buffers
    _, _, k_ready, k_empty, v_ready, v_empty = barriers
    rate, cap_rate = rates
    for at in range(begin, end, -TILE):
        slot = count % STAGES
        slot_before = (count - 1) % STAGES
        phase_before = ((count - 1) // STAGES) & 1
        mbarrier.wait(k_ready.index(slot), (count // STAGES) & 1)
        zeros = gl.zeros([HALF_ROWS, TILE], gl.float32, _mma_layout(TILE))
        qk = warpgroup_mma(queries, k_bufs.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(slot_before), phase_before)
        adding = warpgroup_mma(weights, v_bufs.index(slot_before), acc, is_async=True)
        scores = _capped(warpgroup_mma_wait(1, deps=[qk]), cap_rate, weights.dtype, CAPPED)
        mbarrier.arrive(k_empty.index(slot), count=1)
        if MASKED:
            scores = _mask_scores(scores, at, places, window, TILE, WINDOWED)
        exp_scores, rescale, running_max, running_sum = _softmax(scores, rate, running_max, running_sum)
        rescale = gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))
        next_weights = gl.convert_layout(exp_scores.to(weights.dtype), weights.type.layout)
        # Already complete: it keeps the compiler from moving the softmax behind the wait for the matmuls.
        mbarrier.wait(v_ready.index(slot_before), phase_before)
        acc, weights, rescale, running_sum = warpgroup_mma_wait(0, deps=[adding, next_weights, rescale, running_sum])
        mbarrier.arrive(v_empty.index(slot_before), count=1)
        acc = acc * gl.expand_dims(rescale, 1)
        count += 1
    return weights, acc, running_max, running_sum, count


@gluon.jit
def _attend_item(
    item, buffers, barriers, queries, places, rates, window, count,
    TILE: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr, PAGED: gl.constexpr,
    WINDOWED: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    """The first tile by itself, then masked tiles at the diagonal, unmasked tiles, and masked tiles at the start of the
    window. Returns the weights of the last tile, whose values are still to be added, acc until then, the sums of all
    weights, and the tile count."""
    _, k_bufs, _, _, v_pages = buffers
    _, _, k_ready, k_empty, v_ready, _ = barriers
    rate, cap_rate = rates
    row_layout: gl.constexpr = gl.SliceLayout(1, _mma_layout(TILE))
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, _mma_layout(DIM), 2)
    last_place = gl.load(item + LAST_PLACE)
    last = last_place // TILE * TILE
    seen_first = first_key(item, window, WINDOWED)
    first = seen_first // TILE * TILE
    edge = gl.maximum((gl.load(item + FIRST_PLACE) + 1) // TILE * TILE, first)  # before it no causal mask
    seen = first  # from it on no window mask
    if WINDOWED:
        seen = gl.maximum(gl.maximum(last_place - window + TILE, 0) // TILE * TILE, first)
    slot = count % STAGES
    mbarrier.wait(k_ready.index(slot), (count // STAGES) & 1)
    zeros = gl.zeros([HALF_ROWS, TILE], gl.float32, _mma_layout(TILE))
    qk = warpgroup_mma(queries, k_bufs.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = _capped(warpgroup_mma_wait(0, deps=[qk]), cap_rate, k_bufs.dtype, CAPPED)
    mbarrier.arrive(k_empty.index(slot), count=1)
    if PAGED:  # gathered values are padded with zeros
        _zero_invalid_values(v_pages, v_ready, count, last, seen_first, gl.load(item + LENGTH), TILE, DIM, STAGES, PAGE)
    running_max = gl.full([HALF_ROWS], LOWEST, gl.float32, row_layout)
    running_sum = gl.zeros([HALF_ROWS], gl.float32, row_layout)
    scores = _mask_scores(scores, last, places, window, TILE, WINDOWED)
    exp_scores, _, running_max, running_sum = _softmax(scores, rate, running_max, running_sum)
    weights = gl.convert_layout(exp_scores.to(k_bufs.dtype), weights_layout)
    acc = gl.zeros([HALF_ROWS, DIM], gl.float32, _mma_layout(DIM))
    weights, acc, running_max, running_sum, count = _attend_tiles(
        queries, buffers, barriers, weights, acc, running_max, running_sum, places, rates, window, count + 1,
        last - TILE, edge - TILE, True, TILE, STAGES, WINDOWED, CAPPED,
    )  # fmt: skip
    behind = gl.minimum(edge, last)
    weights, acc, running_max, running_sum, count = _attend_tiles(
        queries, buffers, barriers, weights, acc, running_max, running_sum, places, rates, window, count,
        behind - TILE, seen - TILE, False, TILE, STAGES, WINDOWED, CAPPED,
    )  # fmt: skip
    if WINDOWED:
        weights, acc, running_max, running_sum, count = _attend_tiles(
            queries, buffers, barriers, weights, acc, running_max, running_sum, places, rates, window, count,
            gl.minimum(behind, seen) - TILE, first - TILE, True, TILE, STAGES, WINDOWED, CAPPED,
        )  # fmt: skip
    return weights, acc, running_sum, count


@gluon.jit
def _fetch_queries(
    query, target, first_token, first_row, kv_head, tokens_left, strides,
    GROUP: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Query loads by the consumer itself: TMA loads only whole tokens, powers of two. Surplus rows repeat the last."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [_WARPS, 1], [1, 0])
    rows = first_row + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    row_stride, head_stride = strides
    tokens = first_token + gl.minimum(rows // GROUP, tokens_left)
    places = tokens.to(gl.int64) * row_stride + (kv_head * GROUP + rows % GROUP) * head_stride
    wanted = query + gl.expand_dims(places, 1) + gl.expand_dims(dims, 0)
    fetched = gl.load(wanted, mask=gl.expand_dims(dims < WIDTH, 0), other=0.0)
    warps_barrier()  # all warps are done with the previous queries
    target.store(fetched)
    fence_async_shared()
    warps_barrier()


@gluon.jit
def _consumer(
    query, output, items, buffers, barriers, total, kv_heads, window, query_strides, output_stride, rates,
    HALF: gl.constexpr, TILE: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr, PAGE: gl.constexpr, PAGED: gl.constexpr, WINDOWED: gl.constexpr, CAPPED: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: half of the rows of each tile."""
    out_layout: gl.constexpr = _mma_layout(DIM)
    q_bufs, _, v_bufs, _, _ = buffers
    q_ready, q_empty, _, _, v_ready, v_empty = barriers
    queries = q_bufs.index(HALF)
    if PACKED:
        queries = queries.reshape([HALF_ROWS, DIM])
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, out_layout))
    count = 0
    done = 0
    for turn in range(gl.cdiv(total, gl.num_programs(0))):
        item, kv_head, last_place = take_tile(items, turn, total, kv_heads)
        if last_place >= 0:
            first_token, first_place = gl.load(item + FIRST_TOKEN), gl.load(item + FIRST_PLACE)
            tokens_left = last_place - first_place
            first_row = HALF * HALF_ROWS  # counted from the first head of the first token
            if PACKED:
                mbarrier.wait(q_ready.index(HALF), done & 1)
            else:
                first_row += gl.load(item + FIRST_HEAD)
                _fetch_queries(
                    query, queries, first_token, first_row, kv_head, tokens_left, query_strides, GROUP, DIM, WIDTH
                )
            rows = first_row + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, _mma_layout(TILE)))
            places = gl.minimum(first_place + rows // GROUP, last_place)  # surplus rows repeat the last position
            weights, acc, running_sum, count = _attend_item(
                item, buffers, barriers, queries, places, rates, window, count,
                TILE, DIM, STAGES, PAGE, PAGED, WINDOWED, CAPPED,
            )  # fmt: skip
            if PACKED:
                mbarrier.arrive(q_empty.index(HALF), count=1)
            slot = (count - 1) % STAGES
            mbarrier.wait(v_ready.index(slot), ((count - 1) // STAGES) & 1)
            adding = warpgroup_mma(weights, v_bufs.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[adding])
            mbarrier.arrive(v_empty.index(slot), count=1)
            done += 1
            running_sum = gl.convert_layout(running_sum, gl.SliceLayout(1, out_layout))
            answer = (acc / gl.expand_dims(running_sum, 1)).to(v_bufs.dtype)
            answered = first_row + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, out_layout))
            columns = (kv_head * GROUP + answered % GROUP) * WIDTH
            offsets = (first_token + answered // GROUP).to(gl.int64) * output_stride + columns
            targets = output + gl.expand_dims(offsets, 1) + gl.expand_dims(dims, 0)
            present = gl.expand_dims(answered // GROUP <= tokens_left, 1) & gl.expand_dims(dims < WIDTH, 0)
            gl.store(targets, answer, mask=present)


@gluon.jit
def _new_barriers(NUMBER: gl.constexpr, READY: gl.constexpr, EMPTY: gl.constexpr):
    """mbarriers of NUMBER buffers: `ready` (loaded) and `empty` (released by the consumers)."""
    ready = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(ready.index(i), count=READY)
        mbarrier.init(empty.index(i), count=EMPTY)
    return ready, empty


@gluon.jit(do_not_specialize=["total", "window", "table_stride"], do_not_specialize_on_alignment=["tables"])
def _hopper_kernel(
    query, store, tables, items, output, total, kv_heads, window, table_stride, page_rows, side_rows, side_columns,
    query_row_stride, query_head_stride, output_stride, rate, cap_rate,
    TILE: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    PAGE: gl.constexpr, WINDOWED: gl.constexpr, CAPPED: gl.constexpr, PACKED: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One persistent program: its turns through the work list. total: items times key heads."""
    PAGES: gl.constexpr = STAGES * TILE // PAGE * (DIM // SLAB)
    PAGED: gl.constexpr = tables is not None
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, DIM], store.dtype)
    page_layout: gl.constexpr = store.layout
    if PACKED:
        q_bufs = gl.allocate_shared_memory(store.dtype, [HALVES, HALF_ROWS // GROUP, GROUP, DIM], query.layout)
    else:
        q_bufs = gl.allocate_shared_memory(store.dtype, [HALVES, HALF_ROWS, DIM], tile_layout)
    k_bufs = gl.allocate_shared_memory(store.dtype, [STAGES, TILE, DIM], tile_layout)
    v_bufs = gl.allocate_shared_memory(store.dtype, [STAGES, TILE, DIM], tile_layout)
    k_pages = reinterpret_shared(k_bufs, [PAGES, PAGE, SLAB], page_layout)
    v_pages = reinterpret_shared(v_bufs, [PAGES, PAGE, SLAB], page_layout)
    buffers = (q_bufs, k_bufs, v_bufs, k_pages, v_pages)
    q_ready, q_empty = _new_barriers(HALVES, 1, 1)
    k_ready, k_empty = _new_barriers(STAGES, 1, HALVES)
    v_ready, v_empty = _new_barriers(STAGES, 1, HALVES)
    barriers = (q_ready, q_empty, k_ready, k_empty, v_ready, v_empty)
    strides, rates = (query_row_stride, query_head_stride), (rate, cap_rate)
    fence_async_shared()
    gl.warp_specialize([
        (_consumer, (query, output, items, buffers, barriers, total, kv_heads, window, strides, output_stride, rates,
                   0, TILE, GROUP, DIM, WIDTH, STAGES, PAGE, PAGED, WINDOWED, CAPPED, PACKED)),
        (_consumer, (query, output, items, buffers, barriers, total, kv_heads, window, strides, output_stride, rates,
                   1, TILE, GROUP, DIM, WIDTH, STAGES, PAGE, PAGED, WINDOWED, CAPPED, PACKED)),
        (_loader, (query, store, tables, items, buffers, barriers, total, kv_heads, window, table_stride, page_rows,
                      side_rows, side_columns, TILE, GROUP, DIM, WIDTH, STAGES, PAGE, WINDOWED, PACKED)),
    ], [_WARPS, 1], [REGISTERS, LOADER_REGISTERS])  # fmt: skip


def largest_page(dim: int, window: int) -> int:
    """The largest page: one tile of keys."""
    return _tiles(True, dim, window).keys


def gathered_pages(workspace: Tensor) -> Tensor:
    """[keys, 2, kv_heads, dim] as pages of one tile each: [tiles, 2, tile keys, kv_heads, dim], strided."""
    pages: Tensor = workspace.unflatten(0, (-1, _tiles(False, workspace.shape[3]).keys)).transpose(1, 2)
    return pages


def hopper_attention(
    query: Tensor,  # [tokens, heads, dim], strided
    pages: Tensor,  # [pages, 2, page_size, kv_heads, dim], strided: a layer of the store, or gathered_pages
    tables: Tensor | None,  # [sequences, width] int32; None: one sequence, pages in order, zeros behind its last key
    items: Tensor,  # of work_list, with tiles of TILE_ROWS rows
    rule: AttentionRule,
    output: Tensor,  # [tokens, heads * dim]; tokens of no sequence are left as they are
    num_programs: int,  # as many as run at once (persistent)
) -> None:
    """Causal attention of each sequence's queries over its keys, into output."""
    _, heads, width = query.shape
    num_pages, _, page_size, kv_heads, _ = pages.shape
    page_stride, side_stride, slot_stride = pages.stride()[:3]
    dim = next_power_of_2(width)
    tiles = _tiles(tables is not None, dim, rule.window)
    group = heads // kv_heads
    is_packed = HALF_ROWS.value % group == 0
    assert tiles.keys % page_size == 0, (tiles, page_size)
    assert pages.stride(3) == width and pages.stride(4) == output.stride(1) == query.stride(2) == 1
    # Values are whole rows behind their keys (in the store), or in the same rows (gathered).
    side_rows, side_columns = divmod(side_stride, slot_stride)
    page_rows = page_stride // slot_stride
    num_rows = (num_pages - 1) * page_rows + side_rows + page_size
    flat = pages.as_strided((num_rows, side_columns + kv_heads * width), (slot_stride, 1))
    registers = (3 * _REGISTERS - tiles.loader_registers) // 2 // 8 * 8
    total = items.shape[0] * kv_heads
    launch(
        _hopper_kernel, (min(total, num_programs),),
        tensor_descriptor(query, HALF_ROWS.value // group, group, dim) if is_packed else query,
        tensor_descriptor(flat, page_size, SLAB.value),
        tables, items, output, total, kv_heads, rule.window, 0 if tables is None else tables.stride(0),
        page_rows, side_rows, side_columns, query.stride(0), query.stride(1), output.stride(0),
        *SoftmaxScale.of(rule),
        TILE=tiles.keys, GROUP=group, DIM=dim, WIDTH=width, STAGES=tiles.stages, PAGE=page_size,
        WINDOWED=rule.window > 0, CAPPED=rule.softcap > 0, PACKED=is_packed,
        REGISTERS=registers, LOADER_REGISTERS=tiles.loader_registers, num_warps=_WARPS.value, maxnreg=_REGISTERS,
    )  # fmt: skip

"""Which tiles the programs of Hopper's attention take in their turns, and the warp of each that loads them, in Gluon.

Keys and values come through the copy engine, page by page, as soon as those who compute with them have left room; so do
queries, where a key head has as many as make whole tokens of half a tile. Knows nothing of what is computed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quire.kernels.gpu.gluon_names import load_block
from quire.kernels.gpu.work_list import FIRST_PLACE, FIRST_TOKEN, LAST_PLACE, LENGTH, NUM_FIELDS, SEQUENCE

HALVES = gl.constexpr(2)  # of a tile of rows: four warps compute with each
HALF_ROWS = gl.constexpr(64)  # of a half: what a product of four warps takes
SLAB = gl.constexpr(64)  # columns that lie together in shared memory: 128 bytes


@gluon.jit
def taken(items, turn, total, kv_heads):
    """The tile of rows and the key head that a program takes in its turn, and the last place of the tile; -1: nothing.

    Forwards and backwards through the list in turn, so that lengths add up.
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
    """The first that any query of a tile of rows sees."""
    key = 0
    if WINDOWED:
        key = gl.maximum(gl.load(item + FIRST_PLACE) - window + 1, 0)
    return key


@gluon.jit
def _page_rows(table, number, first_page, last_page, page_rows, PAGES: gl.constexpr, WINDOWED: gl.constexpr):
    """Where the pages of a tile begin in the store, from this number on. Before the first and behind the last, where
    they may be freed, that one again: every page is some page."""
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
    """Keys or values, as soon as their buffer is free: `further` rows behind those at which the pages begin."""
    PAGES: gl.constexpr = TILE // PAGE
    SLABS: gl.constexpr = DIM // SLAB
    slot = count % STAGES
    mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(slot), TILE * DIM * 2)
    for page in gl.static_range(PAGES):
        for slab in gl.static_range(SLABS):
            target = pages.index((slot * SLABS + slab) * PAGES + page)
            source = [rows[page] + further, column + slab * SLAB]
            load_block(store, source, ready.index(slot), target)


@gluon.jit
def _load_queries(query, first_token, kv_head, q_bufs, q_ready, q_empty, done, GROUP: gl.constexpr):
    """The queries of a tile of rows, as soon as those before are done with."""
    for half in gl.static_range(HALVES):
        mbarrier.wait(q_empty.index(half), (done & 1) ^ 1)
        mbarrier.expect(q_ready.index(half), query.block_type.nbytes)
        source = [first_token + half * (HALF_ROWS // GROUP), kv_head * GROUP, 0]
        load_block(query, source, q_ready.index(half), q_bufs.index(half))


@gluon.jit
def load_tiles(
    query, store, tables, items, buffers, barriers, total, kv_heads, window, table_stride, page_rows, side_rows,
    side_columns,
    TILE: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    PAGE: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The warp that loads: for each tile of rows its queries, if they are packed, and its tiles of keys and values."""
    PAGES: gl.constexpr = TILE // PAGE
    q_bufs, _, _, k_pages, v_pages = buffers
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty = barriers
    count = 0  # tiles of keys so far
    done = 0  # tiles of rows so far
    for turn in range(gl.cdiv(total, gl.num_programs(0))):
        item, kv_head, last_place = taken(items, turn, total, kv_heads)
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

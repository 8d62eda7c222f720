"""Decode attention on the CPU: query by query over block tables, compiled by numba.

Reads keys and values in place and gathers nothing. Does not depend on torch. It is bound by instructions, so a key is
converted to float once for several query heads, a `tile`: a tuple of zeros, because the compiler knows a tuple's length
and keeps its values in registers. Indices are unsigned, which tells the compiler that none is negative: only then does
it vectorize.
"""

from typing import Any

import numba
import numpy as np
from numba.cpython.unsafe.tuple import tuple_setitem
from numpy import float32, uintp
from numpy.typing import NDArray

from quire.core.ids import FloatArray, IntArray
from quire.kernels.cpu.bits import OPTIONS, Words, narrow, power_of_two, widen

Indices = NDArray[np.uintp]
Tile = tuple[np.float32, ...]

_AT_ONCE = 4  # keys; rows are padded to a multiple of it
_WIDEST_TILE = 8

_1, _2, _3, _4 = uintp(1), uintp(2), uintp(3), uintp(_AT_ONCE)


def tile_of(group: int) -> Tile:
    """As many zeros as query heads are computed together: the group of a key head, if not too large."""
    width = max(width for width in range(1, _WIDEST_TILE + 1) if group % width == 0)
    return (float32(0),) * width


def _find(places: Indices, table: IntArray, strides: Indices, block_size: int, first: int, num_keys: int) -> None:
    """Offset of each key's first head; padding repeats the last one."""
    block, token = first // block_size, first % block_size
    for i in range(num_keys):
        places[i] = uintp(table[block]) * strides[0] + uintp(token) * strides[2]
        token += 1
        if token == block_size:
            block, token = block + 1, 0
    places[num_keys:] = places[num_keys - 1]


def _score(
    words: Words,
    places: Indices,
    offset: np.uintp,  # from a key's place to what is read
    head_stride: np.uintp,
    queries: FloatArray,
    group: np.uintp,
    tile: Tile,
    out: FloatArray,
) -> None:
    """Two keys and a tile of heads at a time. queries: [heads, dim]; out: [heads, keys]."""
    for i in range(uintp(0), uintp(len(places)), _2):
        for k in range(uintp(queries.shape[0]) // group):
            at = offset + k * head_stride
            key, other_key = places[i] + at, places[i + _1] + at
            for h in range(k * group, (k + _1) * group, uintp(len(tile))):
                score, other_score = tile, tile
                for d in range(uintp(queries.shape[1])):
                    x, y = widen(words[key + d]), widen(words[other_key + d])
                    for t in range(len(tile)):
                        q = queries[h + uintp(t), d]
                        score = tuple_setitem(score, t, score[t] + q * x)
                        other_score = tuple_setitem(other_score, t, other_score[t] + q * y)
                for t in range(len(tile)):
                    out[h + uintp(t), i] = score[t]
                    out[h + uintp(t), i + _1] = other_score[t]


def _add(
    words: Words,
    places: Indices,
    offset: np.uintp,  # from a key's place to what is read
    head_stride: np.uintp,
    weights: FloatArray,
    group: np.uintp,
    tile: Tile,
    out: FloatArray,
) -> None:
    """Four values and a tile of heads at a time. weights: [heads, keys]; out: [heads, dim]."""
    for i in range(uintp(0), uintp(len(places)), _4):
        for k in range(uintp(out.shape[0]) // group):
            at = offset + k * head_stride
            a, b, c, d = places[i] + at, places[i + _1] + at, places[i + _2] + at, places[i + _3] + at
            for h in range(k * group, (k + _1) * group, uintp(len(tile))):
                wa, wb, wc, wd = tile, tile, tile, tile
                for t in range(len(tile)):
                    wa = tuple_setitem(wa, t, weights[h + uintp(t), i])
                    wb = tuple_setitem(wb, t, weights[h + uintp(t), i + _1])
                    wc = tuple_setitem(wc, t, weights[h + uintp(t), i + _2])
                    wd = tuple_setitem(wd, t, weights[h + uintp(t), i + _3])
                for j in range(uintp(out.shape[1])):
                    va, vb, vc, vd = widen(words[a + j]), widen(words[b + j]), widen(words[c + j]), widen(words[d + j])
                    total = tile
                    for t in range(len(tile)):
                        more = wa[t] * va + wb[t] * vb + wc[t] * vc + wd[t] * vd
                        total = tuple_setitem(total, t, out[h + uintp(t), j] + more)
                    for t in range(len(tile)):
                        out[h + uintp(t), j] = total[t]


def _exponential(x: Any) -> Any:
    """e to x, for x <= 0, in float32; NaN stays NaN. The library's is not vectorized."""
    twos = x * float32(1.44269504)
    if twos < float32(-126):
        twos = float32(-126)
    whole = np.floor(twos + float32(0.5))
    rest = twos - whole
    series = float32(1.5403530e-4)  # of 2 to the rest: powers of log(2) over factorials
    series = series * rest + float32(1.3333558e-3)
    series = series * rest + float32(9.6181291e-3)
    series = series * rest + float32(5.5504109e-2)
    series = series * rest + float32(2.4022651e-1)
    series = series * rest + float32(6.9314718e-1)
    series = series * rest + float32(1)
    return series * power_of_two(whole)


def _weigh(scores: FloatArray, num_keys: np.uintp, softcap: np.float32) -> np.float32:
    """Softmax numerators of one head, in place, 0 for padding; returns their sum. scores: [keys]."""
    highest = float32(-np.inf)
    for i in range(num_keys):
        if softcap > 0:
            scores[i] = softcap * np.tanh(scores[i] / softcap)
        highest = max(highest, scores[i])
    total = float32(0)
    for i in range(num_keys):
        weight = _exponential(scores[i] - highest)
        scores[i] = weight
        total += weight
    for i in range(num_keys, uintp(len(scores))):
        scores[i] = float32(0)
    return total


def _attend_row(
    queries: FloatArray,  # [heads, dim], scaled: all heads of a row, or some of them
    store: Words,
    strides: Indices,
    first_kv_head: np.uintp,
    block_size: int,
    group: np.uintp,
    tile: Tile,
    table: IntArray,  # [width]
    length: int,
    window: int,
    softcap: np.float32,
    output: Words,  # [heads, dim]
) -> None:
    first = max(0, length - window) if window > 0 else 0
    num_keys = length - first
    places = np.empty((num_keys + _AT_ONCE - 1) // _AT_ONCE * _AT_ONCE, uintp)
    _find(places, table, strides, block_size, first, num_keys)
    weights = np.empty((queries.shape[0], len(places)), float32)
    _score(store, places, first_kv_head * strides[3], strides[3], queries, group, tile, weights)
    totals = np.empty(queries.shape[0], float32)
    for h in range(queries.shape[0]):
        totals[h] = _weigh(weights[h], uintp(num_keys), softcap)
    result = np.zeros(queries.shape, float32)
    _add(store, places, first_kv_head * strides[3] + strides[1], strides[3], weights, group, tile, result)
    for h in range(queries.shape[0]):
        for d in range(queries.shape[1]):
            output[h, d] = narrow(result[h, d] / totals[h], output[h, d])


def _attend_rows(
    query: Words,  # flat, from the first number on
    query_strides: Indices,  # of row, head
    store: Words,  # flat, from the layer's first number on
    strides: Indices,  # of block, key-or-value, token, head
    block_size: int,
    group: int,  # query heads for each key head
    tile: Tile,
    parts: int,  # threads per row: each takes some of its heads
    tables: IntArray,  # [rows, width]
    lengths: IntArray,  # [rows]: keys each query sees, before the window is applied
    window: int,
    scale: np.float32,
    softcap: np.float32,
    output: Words,  # [rows, heads, dim]
) -> None:
    rows, heads, dim = output.shape
    share = heads // parts
    for unit in numba.prange(rows * parts):
        row, head = unit // parts, unit % parts * share
        queries = np.empty((share, dim), float32)
        for h in range(share):
            at = uintp(row) * query_strides[0] + uintp(head + h) * query_strides[1]
            for d in range(dim):
                queries[h, d] = widen(query[at + uintp(d)]) * scale
        _attend_row(
            queries,
            store,
            strides,
            uintp(head // group),
            block_size,
            uintp(group),
            tile,
            tables[row],
            int(lengths[row]),
            window,
            softcap,
            output[row, head : head + share],
        )


_find = numba.njit(**OPTIONS)(_find)
_score = numba.njit(**OPTIONS)(_score)
_add = numba.njit(**OPTIONS)(_add)
_exponential = numba.njit(**OPTIONS)(_exponential)
_weigh = numba.njit(**OPTIONS)(_weigh)
_attend_row = numba.njit(**OPTIONS)(_attend_row)
attend_rows = numba.njit(parallel=True, **OPTIONS)(_attend_rows)


def use_threads(count: int) -> None:
    """As many threads as torch uses: numba may have a pool of its own beside torch's."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))

"""Work list of prefill tiles, those with most keys first. One launch per step, for every layer.

A row is a (token, query head) pair of one key head; the rows of a sequence are ordered by token, and a tile may start
and end between the heads of a token. For persistent kernels whose programs take one tile after another: with the
longest first, all programs end at about the same time. The capacity follows from host integers: every sequence has one
tile more than its rows could need; unused entries are last. Depends on lengths only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.launch import cdiv, launch, new_index_tensor

# Fields of an item, int32 each:
FIRST_TOKEN = tl.constexpr(0)  # index in the step
FIRST_PLACE = tl.constexpr(1)  # position of its first token in the sequence
LAST_PLACE = tl.constexpr(2)  # position of its last token; -1: unused entry
SEQUENCE = tl.constexpr(3)
LENGTH = tl.constexpr(4)  # keys of the sequence
FIRST_HEAD = tl.constexpr(5)  # of its first token: earlier heads belong to another tile
NUM_FIELDS = tl.constexpr(6)

_TILES = 16  # per program
_AT_ONCE = 64  # tiles they are compared with
_SEARCHED_AT_ONCE = 64  # sequences
_NUM_WARPS = 4


@triton.jit
def _sequences_of(
    tiles, query_starts, first_token, num_sequences, ROWS: tl.constexpr, GROUP: tl.constexpr, AT_ONCE: tl.constexpr
):
    """The last sequence whose tiles start at or before each tile. They start at its first row // ROWS + sequence."""
    found = tl.full([tiles.shape[0]], -1, tl.int32)
    for start in range(0, num_sequences, AT_ONCE):
        sequences = start + tl.arange(0, AT_ONCE)
        starts = tl.load(query_starts + sequences, mask=sequences < num_sequences, other=0) - first_token
        firsts = starts * GROUP // ROWS + sequences
        begun = (firsts[None, :] <= tiles[:, None]) & (sequences < num_sequences)[None, :]
        found += tl.sum(begun.to(tl.int32), 1)
    return found


@triton.jit
def _extents(
    tiles, query_starts, context_lengths, first_token, num_sequences,
    ROWS: tl.constexpr, GROUP: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The item fields of each tile."""
    sequences = _sequences_of(tiles, query_starts, first_token, num_sequences, ROWS, GROUP, AT_ONCE)
    starts = tl.load(query_starts + sequences)
    num_queries = tl.load(query_starts + sequences + 1) - starts
    lengths = tl.load(context_lengths + sequences)
    first_rows = (tiles - (starts - first_token) * GROUP // ROWS - sequences) * ROWS
    first_queries = first_rows // GROUP
    num_before = lengths - num_queries
    last_places = num_before + tl.minimum((first_rows + ROWS - 1) // GROUP, num_queries - 1)
    nothing = (first_queries >= num_queries) | (lengths == 0)
    last_places = tl.where(nothing, -1, last_places)
    return starts + first_queries, num_before + first_queries, last_places, sequences, lengths, first_rows % GROUP


@triton.jit(
    do_not_specialize=["first_token", "num_sequences", "num_items"],
    do_not_specialize_on_alignment=["query_starts", "context_lengths"],
)
def _list_kernel(
    query_starts, context_lengths, items, first_token, num_sequences, num_items,
    ROWS: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr, AT_ONCE: tl.constexpr, SEARCHED: tl.constexpr,
):  # fmt: skip
    """A tile's rank is the number of tiles that end later, or as late and come before it."""
    tiles = tl.program_id(0) * TILES + tl.arange(0, TILES)
    first_tokens, first_places, last_places, sequences, lengths, first_heads = _extents(
        tiles, query_starts, context_lengths, first_token, num_sequences, ROWS, GROUP, SEARCHED
    )
    places = tl.zeros([TILES], tl.int32)
    for start in range(0, num_items, AT_ONCE):
        others = start + tl.arange(0, AT_ONCE)
        _, _, theirs, _, _, _ = _extents(
            others, query_starts, context_lengths, first_token, num_sequences, ROWS, GROUP, SEARCHED
        )
        tied = (theirs[None, :] == last_places[:, None]) & (others[None, :] < tiles[:, None])
        before = (theirs[None, :] > last_places[:, None]) | tied
        places += tl.sum((before & (others < num_items)[None, :]).to(tl.int32), 1)
    inside = tiles < num_items
    targets = items + places * NUM_FIELDS
    tl.store(targets + FIRST_TOKEN, first_tokens, mask=inside)
    tl.store(targets + FIRST_PLACE, first_places, mask=inside)
    tl.store(targets + LAST_PLACE, last_places, mask=inside)
    tl.store(targets + SEQUENCE, sequences, mask=inside)
    tl.store(targets + LENGTH, lengths, mask=inside)
    tl.store(targets + FIRST_HEAD, first_heads, mask=inside)


def work_list(
    query_starts: Tensor,  # [sequences + 1] int32: sequence s has tokens query_starts[s] to query_starts[s + 1]
    context_lengths: Tensor,  # [sequences] int32; 0: padding
    num_tokens: int,  # of all sequences, upper bound
    first_token: int,  # query_starts[0], as the host knows it
    tile_rows: int,
    group: int,  # query heads per key head
) -> Tensor:
    """[items, NUM_FIELDS] int32: tiles of tile_rows rows, or the rest of a sequence."""
    num_sequences = len(context_lengths)
    num_items = num_tokens * group // tile_rows + num_sequences
    items = new_index_tensor((num_items, NUM_FIELDS.value), torch.int32, query_starts.device)
    launch(
        _list_kernel, (cdiv(num_items, _TILES),),
        query_starts, context_lengths, items, first_token, num_sequences, num_items,
        ROWS=tile_rows, GROUP=group, TILES=_TILES, AT_ONCE=_AT_ONCE, SEARCHED=_SEARCHED_AT_ONCE, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return items

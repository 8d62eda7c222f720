"""Which tiles of rows the chunks of a step make, those with most keys first. One launch a step, for every layer.

A row is a token with one query head of a key head; the rows of a sequence lie token by token, and a tile may begin and
end between the heads of one. For kernels whose programs take one tile after the other: dealt out from the longest on,
all programs end at about the same time. Knows lengths and nothing of what is done with a tile. Every sequence has room
for one tile more than its rows could need, so that the room follows from host integers alone; places that nobody needs
lie at the end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.launch import cdiv, launch, to_be_filled

# Of an item, int32 each:
FIRST_TOKEN = tl.constexpr(0)  # among the step's tokens
FIRST_PLACE = tl.constexpr(1)  # position of its first token in the sequence
LAST_PLACE = tl.constexpr(2)  # of its last token; -1: no tile
SEQUENCE = tl.constexpr(3)
LENGTH = tl.constexpr(4)  # keys of the sequence
FIRST_HEAD = tl.constexpr(5)  # of its first token: heads before it are another tile's
NUM_FIELDS = tl.constexpr(6)

_TILES = 16  # of a program
_AT_ONCE = 64  # that they are compared with
_SEARCHED_AT_ONCE = 64  # sequences
_NUM_WARPS = 4


@triton.jit
def _sequences_of(
    tiles, query_starts, first_token, num_sequences, ROWS: tl.constexpr, GROUP: tl.constexpr, AT_ONCE: tl.constexpr
):
    """The last sequence whose tiles begin at or before each. They begin at its first row // ROWS + sequence."""
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
    """Of each tile: the fields of an item."""
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
    """A tile's place is how many end later, or as late and come before it."""
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
    context_lengths: Tensor,  # [sequences] int32; 0: nobody
    num_tokens: int,  # of all sequences, at the most
    first_token: int,  # query_starts[0], as the host knows it
    tile_rows: int,
    group: int,  # query heads of a key head
) -> Tensor:
    """[items, NUM_FIELDS] int32: the tiles, of tile_rows rows each or the rest of a sequence."""
    num_sequences = len(context_lengths)
    num_items = num_tokens * group // tile_rows + num_sequences
    items = to_be_filled((num_items, NUM_FIELDS.value), torch.int32, query_starts.device)
    launch(
        _list_kernel, (cdiv(num_items, _TILES),),
        query_starts, context_lengths, items, first_token, num_sequences, num_items,
        ROWS=tile_rows, GROUP=group, TILES=_TILES, AT_ONCE=_AT_ONCE, SEARCHED=_SEARCHED_AT_ONCE, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return items

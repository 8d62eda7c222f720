"""Which stored tensors a rank needs, and which part of one fills which rows of its weight.

Queries, keys, values, gate, up and the vocabulary are divided by rows, which lie together in a file; the output and the
down projection by columns. Norms and the biases of these two are whole on every rank. Of pipeline stages, each has its
layers, the first the embedding, and the last the norm and the head, which may be the embedding once more.
"""

from typing import NamedTuple

from quire.core.model import ModelSpec
from quire.core.sharding import Shard
from quire.weights.names import FusedPart, RowRange, WeightTarget

_BY_COLUMNS = ("output", "down")


class ShardSlice(NamedTuple):
    """Rows of a stored tensor, some or all of their columns, and where they go."""

    stored: RowRange  # of the stored tensor
    target: RowRange  # of the rank's weight
    columns: RowRange | None = None  # of the stored tensor; None: all


def stage_targets(spec: ModelSpec, shard: Shard, targets: dict[str, WeightTarget]) -> dict[str, WeightTarget]:
    """The tensors that a rank's stage has, with the numbers of its own layers; `spec` is the whole model's."""
    if shard.num_stages == 1:
        return targets
    layers, held = shard.layers(spec), dict[str, WeightTarget]()
    for name, target in targets.items():
        if target.layer is not None:
            if target.layer in layers:
                held[name] = target._replace(layer=target.layer - layers.start)
        elif target.field == "embedding":
            if shard.is_first:
                held[name] = target
            elif shard.is_last and spec.tied_embeddings:
                held[name] = target._replace(field="head")
        elif shard.is_last:
            held[name] = target
    return held


def shard_pieces(spec: ModelSpec, shard: Shard, field: str, part: FusedPart, num_rows: int) -> list[ShardSlice]:
    """The pieces of a stored tensor of `num_rows` rows that a rank needs; `spec` is the whole model's."""
    if field in _BY_COLUMNS:
        columns = _in_heads(spec, shard.heads(spec)) if field == "output" else _as_rows(shard.ffn(spec))
        return [ShardSlice(RowRange(0, num_rows), RowRange(0, num_rows), columns if shard.size > 1 else None)]
    if field in ("embedding", "head"):
        return _placed([_as_rows(shard.vocabulary(spec))])
    heads, kv_heads, ffn = shard.heads(spec), shard.kv_heads(spec), shard.ffn(spec)
    if field in ("qkv", "qkv_bias"):
        wanted = [_in_heads(spec, heads), _in_heads(spec, kv_heads), _in_heads(spec, kv_heads)]
        starts = [0, spec.num_heads * spec.head_dim, (spec.num_heads + spec.num_kv_heads) * spec.head_dim]
        parts = [FusedPart.QUERY, FusedPart.KEY, FusedPart.VALUE]
    elif field in ("gate_up", "gate_up_bias"):
        wanted, starts = [_as_rows(ffn), _as_rows(ffn)], [0, spec.ffn_size]
        parts = [FusedPart.GATE, FusedPart.UP]
    else:
        return _placed([RowRange(0, num_rows)])
    if part is FusedPart.WHOLE:  # all parts in one tensor, one behind the other
        wanted = [RowRange(rows.start + start, rows.stop + start) for rows, start in zip(wanted, starts, strict=True)]
        return _placed(wanted)
    return [_placed(wanted)[parts.index(part)]]


def _placed(wanted: list[RowRange]) -> list[ShardSlice]:
    """Each piece behind the one before."""
    pieces, first = [], 0
    for rows in wanted:
        pieces.append(ShardSlice(rows, RowRange(first, first + rows.stop - rows.start)))
        first = pieces[-1].target.stop
    return pieces


def _in_heads(spec: ModelSpec, heads: range) -> RowRange:
    return RowRange(heads.start * spec.head_dim, heads.stop * spec.head_dim)


def _as_rows(rows: range) -> RowRange:
    return RowRange(rows.start, rows.stop)

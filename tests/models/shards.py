"""A rank's part of a decoder's weights, cut by hand from the whole, and ranks as threads of one process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from quire.core.model import ModelSpec
from quire.core.sharding import Shard
from quire.dist.process_group import ProcessGroup, new_rendezvous
from quire.models.parameters import DecoderWeights, LayerWeights

Result = TypeVar("Result")


def cut(weights: DecoderWeights, spec: ModelSpec, shard: Shard) -> DecoderWeights:
    """Written with other arithmetic than the loader: every matrix is seen as heads, and cut by `chunk`."""

    def part(x: Tensor) -> Tensor:
        return x.chunk(shard.size)[shard.rank]

    def key_part(x: Tensor) -> Tensor:
        heads = x.view(spec.num_kv_heads, spec.head_dim, *x.shape[1:])
        copies = max(1, shard.size // spec.num_kv_heads)
        return part(heads.repeat_interleave(copies, 0)).flatten(0, 1)

    def joint(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        query, key, value = x.split([n * spec.head_dim for n in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)])
        return torch.cat([part(query), key_part(key), key_part(value)])

    def gated(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.cat([part(half) for half in x.chunk(2)])

    def vocabulary(x: Tensor) -> Tensor:
        width = -(-len(x) // shard.size)
        return x[shard.rank * width : (shard.rank + 1) * width]

    layers, held = [], shard.layers(spec)
    for layer in weights.layers[held.start : held.stop]:
        fields = {name: getattr(layer, name) for name in LayerWeights.__slots__}
        fields |= {name: joint(fields[name]) for name in ("qkv", "qkv_bias")}
        fields |= {name: gated(fields[name]) for name in ("gate_up", "gate_up_bias")}
        fields |= {name: part(fields[name].T).T for name in ("output", "down")}
        layers.append(LayerWeights(**fields))
    embedding, head = vocabulary(weights.embedding), vocabulary(weights.head)
    if weights.head is weights.embedding and shard.num_stages == 1:
        head = embedding
    return DecoderWeights(
        embedding if shard.is_first else embedding[:0],
        tuple(layers),
        weights.final_norm if shard.is_last else weights.final_norm[:0],
        head if shard.is_last else head[:0],
    )


def on_ranks(size: int, work: Callable[[ProcessGroup], Result]) -> list[Result]:
    """What each rank of a group returns."""
    rendezvous = new_rendezvous()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(ProcessGroup(Shard(rank, size), rendezvous)), range(size)))


def on_stages(
    size: int, num_stages: int, work: Callable[[Shard, ProcessGroup | None, ProcessGroup], Result]
) -> list[Result]:
    """What each rank of a pipeline returns; it gets its own group, and that of all ranks."""
    rendezvous = new_rendezvous()
    ranks = [Shard.of(number, size, num_stages) for number in range(size * num_stages)]
    kept: list[ProcessGroup] = []  # the last tensor may arrive after its sender has returned

    def each(shard: Shard) -> Result:
        everyone = ProcessGroup(Shard(shard.number, len(ranks)), rendezvous, "pipeline")
        kept.append(everyone)
        group = ProcessGroup(shard, rendezvous, f"stage {shard.stage}") if size > 1 else None
        return work(shard, group, everyone)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(each, ranks))

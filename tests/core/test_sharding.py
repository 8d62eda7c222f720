"""The parts of all ranks are the whole; a number of ranks that does not divide it is refused with those that do."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import ConfigError
from quire.core.sharding import Shard, check_divisible, check_stages
from quire.formats.presets import SHAPES

SPEC = SHAPES["qwen3-0.6b"]  # 16 heads, 8 key heads


@given(st.sampled_from([1, 2, 4, 8, 16]), st.integers(241, 440))
def test_the_parts_are_the_whole(size: int, vocab_size: int) -> None:
    spec = replace(SPEC, vocab_size=vocab_size)
    check_divisible(spec, size)
    shards = [Shard(rank, size) for rank in range(size)]
    assert [head for shard in shards for head in shard.heads(spec)] == list(range(16))
    assert [column for shard in shards for column in shard.ffn(spec)] == list(range(spec.ffn_size))
    assert [token for shard in shards for token in shard.vocabulary(spec)] == list(range(vocab_size))
    for shard in shards:
        key_heads = {head // 2 for head in shard.heads(spec)}  # two query heads read one key head
        assert key_heads == set(shard.kv_heads(spec))
        part = shard.spec(spec)
        assert (part.num_heads, part.num_kv_heads, part.vocab_size) == (16 // size, max(1, 8 // size), vocab_size)


@pytest.mark.parametrize(
    ("changes", "size", "possible"),
    [
        ({}, 3, "1, 2, 4, 8 or 16"),
        ({"num_heads": 9, "num_kv_heads": 3}, 2, "1 or 3"),
        ({"ffn_size": 3071}, 2, "1"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, "1, 2, 3, 6 or 12"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes: dict[str, int], size: int, possible: str) -> None:
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size is {size}, .*--tensor-parallel-size {possible}\b"):
        check_divisible(replace(SPEC, **changes), size)


@pytest.mark.parametrize(("vocab_size", "possible"), [(9, "1 or 2"), (13, "1, 2 or 4")])
def test_every_rank_has_tokens(vocab_size: int, possible: str) -> None:
    """Nine in parts of two: the fifth part is the last one."""
    spec = replace(SPEC, vocab_size=vocab_size)
    message = f"tensor_parallel_size is 8, but the model has {vocab_size} tokens, of which the last of 8 ranks would "
    with pytest.raises(ConfigError, match=f"{message}have none. Use --tensor-parallel-size {possible}[.]"):
        check_divisible(spec, 8)


@given(st.integers(1, 28), st.integers(1, 4))
def test_the_stages_are_the_whole(num_stages: int, size: int) -> None:
    check_stages(SPEC, num_stages)
    spec = replace(SPEC, windows=tuple(range(28)))
    shards = [Shard.of(number, size, num_stages) for number in range(size * num_stages)]
    assert [shard.number for shard in shards] == list(range(size * num_stages))
    stages = shards[::size]
    assert [layer for shard in stages for layer in shard.layers(spec)] == list(range(28))
    assert [window for shard in stages for window in shard.spec(spec).windows] == list(range(28))
    sizes = [shard.spec(spec).num_layers for shard in stages]
    assert sizes == sorted(sizes, reverse=True), "rank 0 has the most: KV caches are sized by it"
    assert sizes[0] - sizes[-1] <= 1
    assert [shard.is_first for shard in stages].count(True) == [shard.is_last for shard in stages].count(True) == 1


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size is 29, .* Use --pipeline-parallel-size 28 or less"):
        check_stages(SPEC, 29)

"""Tensor parallelism in numbers: which heads, feed-forward columns and vocabulary entries belong to a rank.

Query heads and the feed-forward width are divided evenly. Key heads are divided evenly, or, where there are fewer of
them than ranks, each is held by several ranks. The vocabulary is divided in order, and the last part may be shorter.
"""

from dataclasses import replace
from typing import NamedTuple

from quire.core.errors import ConfigError
from quire.core.model import ModelSpec


class Shard(NamedTuple):
    """The part of a model that one rank of a tensor-parallel group holds."""

    rank: int = 0
    size: int = 1

    def spec(self, whole: ModelSpec) -> ModelSpec:
        """The model as a rank computes it. The vocabulary stays whole: every rank gets all logits."""
        return replace(
            whole,
            num_heads=len(self.heads(whole)),
            num_kv_heads=len(self.kv_heads(whole)),
            ffn_size=len(self.ffn(whole)),
        )

    def heads(self, whole: ModelSpec) -> range:
        return self._part(whole.num_heads)

    def kv_heads(self, whole: ModelSpec) -> range:
        if whole.num_kv_heads >= self.size:
            return self._part(whole.num_kv_heads)
        first = self.rank * whole.num_kv_heads // self.size
        return range(first, first + 1)

    def ffn(self, whole: ModelSpec) -> range:
        return self._part(whole.ffn_size)

    def vocabulary(self, whole: ModelSpec) -> range:
        width = self.vocabulary_width(whole.vocab_size)
        return range(min(self.rank * width, whole.vocab_size), min((self.rank + 1) * width, whole.vocab_size))

    def vocabulary_width(self, vocab_size: int) -> int:
        """Of every part but the last ones."""
        return -(-vocab_size // self.size)

    def _part(self, count: int) -> range:
        width = count // self.size
        return range(self.rank * width, (self.rank + 1) * width)


WHOLE = Shard()


def check_divisible(spec: ModelSpec, size: int) -> None:
    """Refuse a number of ranks that the model cannot be divided into."""
    if _divides(spec, size):
        return
    possible = [str(each) for each in range(1, spec.num_heads + 1) if _divides(spec, each)]
    raise ConfigError(
        f"tensor_parallel_size is {size}, but the model has {spec.num_heads} attention heads, {spec.num_kv_heads} key "
        f"heads and a feed-forward width of {spec.ffn_size}, which {size} ranks cannot share evenly. Use "
        f"--tensor-parallel-size {' or '.join(filter(None, (', '.join(possible[:-1]), possible[-1])))}.",
        param="tensor_parallel_size",
    )


def _divides(spec: ModelSpec, size: int) -> bool:
    shares_keys = spec.num_kv_heads % size == 0 or size % spec.num_kv_heads == 0
    return spec.num_heads % size == 0 and spec.ffn_size % size == 0 and shares_keys

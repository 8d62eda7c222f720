"""Parallelism in numbers: which heads, feed-forward columns, vocabulary entries and layers belong to a rank.

Query heads and the feed-forward width are divided evenly. Key heads are divided evenly, or, where there are fewer of
them than ranks, each is held by several ranks. The vocabulary is divided in order, and the last part may be shorter.
Pipeline stages divide the layers in order; where they cannot be divided evenly, the first stages have one more.
"""

from dataclasses import replace
from typing import NamedTuple

from quire.core.errors import ConfigError
from quire.core.model import ModelSpec


class Shard(NamedTuple):
    """The part of a model that one rank holds: of every layer of its pipeline stage, its part."""

    rank: int = 0  # in the tensor-parallel group of its stage
    size: int = 1
    stage: int = 0
    num_stages: int = 1

    @staticmethod
    def of(number: int, size: int, num_stages: int) -> "Shard":
        """Of a rank, by its number: the ranks of a stage come one after the other."""
        return Shard(number % size, size, number // size, num_stages)

    @property
    def number(self) -> int:
        """Among the ranks of all stages."""
        return self.stage * self.size + self.rank

    @property
    def num_ranks(self) -> int:
        return self.size * self.num_stages

    @property
    def is_first(self) -> bool:
        """Whether it is in the stage that holds the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it is in the stage that holds the last norm and the head."""
        return self.stage == self.num_stages - 1

    def spec(self, whole: ModelSpec) -> ModelSpec:
        """The model as a rank computes it. The vocabulary stays whole: every rank of the last stage gets all logits."""
        layers = self.layers(whole)
        return replace(
            whole,
            num_layers=len(layers),
            windows=whole.windows[layers.start : layers.stop],
            num_heads=len(self.heads(whole)),
            num_kv_heads=len(self.kv_heads(whole)),
            ffn_size=len(self.ffn(whole)),
        )

    def layers(self, whole: ModelSpec) -> range:
        fewest, more = divmod(whole.num_layers, self.num_stages)
        first = self.stage * fewest + min(self.stage, more)
        return range(first, first + fewest + (self.stage < more))

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
    parts = (
        f"{spec.num_heads} attention heads, {spec.num_kv_heads} key heads and a feed-forward width of {spec.ffn_size}, "
        f"which {size} ranks cannot share evenly"
    )
    if _divides_layers(spec, size):
        parts = f"{spec.vocab_size} tokens, of which the last of {size} ranks would have none"
    raise ConfigError(
        f"tensor_parallel_size is {size}, but the model has {parts}. Use "
        f"--tensor-parallel-size {' or '.join(filter(None, (', '.join(possible[:-1]), possible[-1])))}.",
        param="tensor_parallel_size",
    )


def _divides(spec: ModelSpec, size: int) -> bool:
    return _divides_layers(spec, size) and len(Shard(size - 1, size).vocabulary(spec)) > 0


def _divides_layers(spec: ModelSpec, size: int) -> bool:
    shares_keys = spec.num_kv_heads % size == 0 or size % spec.num_kv_heads == 0
    return spec.num_heads % size == 0 and spec.ffn_size % size == 0 and shares_keys


def check_stages(spec: ModelSpec, num_stages: int) -> None:
    """Refuse more stages than there are layers."""
    if num_stages > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {num_stages}, but the model has {spec.num_layers} layers, and each stage needs "
            f"one. Use --pipeline-parallel-size {spec.num_layers} or less.",
            param="pipeline_parallel_size",
        )

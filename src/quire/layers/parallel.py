"""Layers of a group of ranks: a projection and a vocabulary that are divided, and the ends of a pipeline stage.

Each rank multiplies by its part of the weights. The sums and the parts of the logits meet in the process group, so that
every rank has the same hidden states and the same logits. Between two pipeline stages, each rank sends hidden states to
the one that has the same place in the next stage.
"""

import torch
from torch import Tensor

from quire.core.sharding import Shard
from quire.dist.process_group import ProcessGroup
from quire.kernels.interface import Kernels, PackedMatrix
from quire.layers.linear import Linear


class RowParallelLinear:
    """x @ weight.T, summed over the ranks: each has some of the columns of the weight, and of x."""

    __slots__ = ("_group", "_linear")

    def __init__(self, linear: Linear, group: ProcessGroup) -> None:
        """`linear`: with a bias on rank 0 only."""
        self._linear = linear
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, a rank's part of the inputs]. Returns [tokens, out]."""
        return self._group.all_reduce(self._linear(x))


class ParallelVocabulary:
    """Embedding and head of which each rank has some rows."""

    __slots__ = ("_first", "_group", "_num_rows", "_vocab_size", "_width")

    def __init__(self, vocab_size: int, num_rows: int, group: ProcessGroup) -> None:
        """num_rows: of this rank's part."""
        self._group = group
        self._vocab_size = vocab_size
        self._width = group.shard.vocabulary_width(vocab_size)
        self._first = group.shard.rank * self._width
        self._num_rows = num_rows

    def embed(self, kernels: Kernels, tokens: Tensor, table: PackedMatrix) -> Tensor:
        """tokens: [tokens] int64. [tokens, hidden]: each row comes from one rank, and the others add zeros."""
        places = tokens - self._first
        elsewhere = (places < 0) | (places >= self._num_rows)
        embedded = kernels.embed(places.masked_fill(elsewhere, 0), table)
        return self._group.all_reduce(embedded.masked_fill_(elsewhere[:, None], 0.0))

    def gather(self, logits: Tensor) -> Tensor:
        """logits: [rows, a rank's part] float32. Returns [rows, vocab]."""
        padded = torch.nn.functional.pad(logits, (0, self._width - logits.shape[1]))
        gathered = self._group.all_gather(padded)
        return gathered.transpose(0, 1).flatten(1)[:, : self._vocab_size].contiguous()


class StageEnds:
    """Hidden states come from the stage before, and go to the next one."""

    __slots__ = ("_group", "_hidden_size", "shard")

    def __init__(self, shard: Shard, hidden_size: int, group: ProcessGroup) -> None:
        """group: of the ranks of all stages."""
        self.shard = shard
        self._hidden_size = hidden_size
        self._group = group

    def receive(self, num_tokens: int) -> Tensor:
        """[tokens, hidden] float32: the sums of embeddings and layers, not normed."""
        hidden = torch.empty(num_tokens, self._hidden_size, dtype=torch.float32)
        return self._group.receive(hidden, self._group.shard.rank - self.shard.size)

    def send(self, hidden: Tensor) -> None:
        """hidden: [tokens, hidden] float32, which the caller does not change any more."""
        self._group.send(hidden, self._group.shard.rank + self.shard.size)

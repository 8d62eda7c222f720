"""Interface of an attention backend: its input sequences and its methods. Does not depend on a library."""

from typing import NamedTuple, Protocol

from torch import Tensor

from quire.kernels.interface import AttentionRule


class BackendSequences(NamedTuple):
    """Consecutive sequences of one step. A backend sees only their tokens, counted from 0."""

    tables: Tensor  # [sequences, width] int32: only the blocks that hold keys may be read
    query_starts: Tensor  # [sequences + 1] int32: tokens behind the last are padding
    context_lengths: Tensor  # [sequences] int32, on the device: 0 for padding
    max_queries: int  # of one sequence, as far as the host knows


class BackendAttention(Protocol):
    """Attention of some sequences of a step, prepared once and used by every layer."""

    def takes(self, kv_layer: Tensor) -> bool:
        """Whether it can compute over this store; if not, quire's own kernels do."""

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule, output: Tensor) -> None:
        """Each query over the keys of its own sequence, at or before its own position, into output.

        query: [tokens, heads, dim], strided; kv_layer: [blocks, 2, block_size, kv_heads, dim], strided; output:
        [tokens, heads * dim].
        """


class AttentionBackend(Protocol):
    """One library's attention."""

    capturable: bool  # whether a CUDA graph can hold it: it reads no lengths on the host

    def prepare(self, sequences: BackendSequences) -> BackendAttention:
        """Prepare the attention of some sequences of a step."""


class AttentionBackends(NamedTuple):
    """The backend of each part of a step. None: quire's own kernels."""

    decodes: AttentionBackend | None = None
    chunks: AttentionBackend | None = None  # several, or a short one
    long_chunk: AttentionBackend | None = None  # one alone

    @property
    def capturable(self) -> bool:
        return all(backend is None or backend.capturable for backend in self)


OWN = AttentionBackends()


def window_left(rule: AttentionRule) -> int:
    """A window as libraries count it: keys before its own that a query sees; -1: all."""
    return rule.window - 1 if rule.window else -1

"""What a backend is given of a step, and what it must offer. Knows no library and no kernel."""

from typing import NamedTuple, Protocol

from torch import Tensor

from quire.kernels.interface import AttentionRule


class BackendSequences(NamedTuple):
    """Sequences of one step that lie together. A backend sees their tokens alone, counted from 0."""

    tables: Tensor  # [sequences, width] int32: only the blocks that hold keys may be read
    query_starts: Tensor  # [sequences + 1] int32: tokens behind the last are nobody's
    context_lengths: Tensor  # [sequences] int32, on the device: 0 for padding
    max_queries: int  # of one sequence, as far as the host knows


class BackendAttention(Protocol):
    """Attention of one share, prepared once a step and used by every layer."""

    def takes(self, kv_layer: Tensor) -> bool:
        """Whether this share is for it; if not, our own kernels do it."""

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule, output: Tensor) -> None:
        """Each query over the keys of its own sequence, at or before its own position, into output.

        query: [tokens, heads, dim], strided; kv_layer: [blocks, 2, block_size, kv_heads, dim], strided; output:
        [tokens, heads * dim].
        """


class AttentionBackend(Protocol):
    """One library's attention."""

    capturable: bool  # whether it launches alone: reads no length on the host, so that a graph may hold it

    def share(self, share: BackendSequences) -> BackendAttention:
        """Prepare one share of a step."""


class AttentionBackends(NamedTuple):
    """Who attends to what. None: our own kernels."""

    decodes: AttentionBackend | None = None
    chunks: AttentionBackend | None = None  # several, or a short one
    long_chunk: AttentionBackend | None = None  # one alone

    @property
    def capturable(self) -> bool:
        return all(backend is None or backend.capturable for backend in self)


OWN = AttentionBackends()


def window_left(rule: AttentionRule) -> int:
    """How libraries name a window: the keys before its own that a query sees; -1: all."""
    return rule.window - 1 if rule.window else -1

"""torch's varlen attention for one long chunk: its keys are gathered into one contiguous run first.

Its paged form needs blocks of 256 keys, and a torch later than 2.11. Selection is in attention_backends.py.
"""

from collections.abc import Callable
from inspect import signature

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from quire.kernels.gpu.attention.prefill_contiguous import ContextCopy
from quire.kernels.gpu.backends.interface import BackendSequences, window_left
from quire.kernels.interface import AttentionRule

Attend = Callable[..., Tensor | tuple[Tensor, Tensor]]


class TorchVarlen:
    """For one sequence at a time."""

    __slots__ = ("_attend", "_options")

    capturable = True

    def __init__(self, attend: Attend = varlen_attn) -> None:
        self._attend = attend
        grouped = "enable_gqa" in signature(attend).parameters  # earlier versions always group heads
        self._options = {"enable_gqa": True} if grouped else {}

    def prepare(self, sequences: BackendSequences) -> "GatheredChunk":
        assert len(sequences.tables) == 1, sequences.tables.shape
        return GatheredChunk(sequences, self._attend, self._options)


class GatheredChunk:
    """One chunk of a step; the workspace and the starts serve every layer."""

    __slots__ = ("_attend", "_copy", "_key_starts", "_options", "_sequences")

    def __init__(self, sequences: BackendSequences, attend: Attend, options: dict[str, bool]) -> None:
        self._sequences = sequences
        self._attend = attend
        self._options = options
        lengths = sequences.context_lengths
        self._key_starts = torch.cat([lengths.new_zeros(1), lengths])
        self._copy = ContextCopy()

    def takes(self, kv_layer: Tensor) -> bool:
        return ContextCopy.fits(kv_layer, self._sequences.tables[0])

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule, output: Tensor) -> None:
        assert not rule.softcap, "torch has no soft cap, so it is not chosen for one"
        run = self._copy.gather(kv_layer, self._sequences.tables[0], self._sequences.context_lengths)
        keys, values = run.unbind(1)
        result = self._attend(
            query,
            keys,
            values,
            self._sequences.query_starts,
            self._key_starts,
            self._sequences.max_queries,
            len(run),
            scale=rule.scale,
            window_size=(window_left(rule), 0),  # causal
            **self._options,
        )
        assert isinstance(result, Tensor), "only the output was requested"
        output.view(query.shape).copy_(result)

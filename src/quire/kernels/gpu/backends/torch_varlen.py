"""torch's own attention over ragged sequences, for one long chunk: its keys are gathered into one run first.

Its form for pages wants blocks of 256 keys, and a torch later than 2.11. Knows nothing of when it is used.
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

    __slots__ = ("_attend", "_told")

    capturable = True

    def __init__(self, attend: Attend = varlen_attn) -> None:
        self._attend = attend
        grouped = "enable_gqa" in signature(attend).parameters  # earlier ones group heads without being told
        self._told = {"enable_gqa": True} if grouped else {}

    def share(self, share: BackendSequences) -> "GatheredChunk":
        assert len(share.tables) == 1, share.tables.shape
        return GatheredChunk(share, self._attend, self._told)


class GatheredChunk:
    """One chunk of a step; the workspace and the starts serve every layer."""

    __slots__ = ("_attend", "_copy", "_key_starts", "_share", "_told")

    def __init__(self, share: BackendSequences, attend: Attend, told: dict[str, bool]) -> None:
        self._share = share
        self._attend = attend
        self._told = told
        lengths = share.context_lengths
        self._key_starts = torch.cat([lengths.new_zeros(1), lengths])
        self._copy = ContextCopy()

    def takes(self, kv_layer: Tensor) -> bool:
        return ContextCopy.fits(kv_layer, self._share.tables[0])

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule, output: Tensor) -> None:
        assert not rule.softcap, "torch has no soft cap: whoever chooses knows"
        run = self._copy.gather(kv_layer, self._share.tables[0], self._share.context_lengths)
        keys, values = run.unbind(1)
        answer = self._attend(
            query,
            keys,
            values,
            self._share.query_starts,
            self._key_starts,
            self._share.max_queries,
            len(run),
            scale=rule.scale,
            window_size=(window_left(rule), 0),  # nothing behind the query is seen
            **self._told,
        )
        assert isinstance(answer, Tensor), "nothing beside the answer was asked for"
        output.view(query.shape).copy_(answer)

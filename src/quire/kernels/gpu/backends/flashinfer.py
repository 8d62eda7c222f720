"""Decodes by FlashInfer. It plans a step on the host, which waits for the lengths, so no CUDA graph holds it.

Its prefill kernels would be compiled at run time, by a compiler that is often not installed: chunks are not supported.
Selection is in attention_backends.py.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.gpu.backends.interface import BackendSequences, window_left
from quire.kernels.interface import AttentionRule
from quire.kernels.transfers import upload_integers

_WORKSPACE_BYTES = 128 << 20  # its documented recommendation


class FlashInfer:
    """Its wrappers, one for each rule of the layers: creating one takes far longer than planning with it."""

    __slots__ = ("_make", "_wrappers")

    capturable = False

    def __init__(self, make: Callable[[], Any]) -> None:
        """`make`: a new BatchDecodeWithPagedKVCacheWrapper."""
        self._make = make
        self._wrappers: dict[AttentionRule, Any] = {}

    @staticmethod
    def load(device: torch.device) -> "FlashInfer":
        wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)  # layers run in sequence
        return FlashInfer(lambda: wrapper(workspace, "NHD"))

    def wrapper(self, rule: AttentionRule) -> Any:
        if rule not in self._wrappers:
            self._wrappers[rule] = self._make()
        return self._wrappers[rule]

    def prepare(self, sequences: BackendSequences) -> "FlashInferDecodes":
        return FlashInferDecodes(self, sequences)


class Pages(NamedTuple):
    """The pages of all rows end to end."""

    starts: NDArray[np.int32]  # [rows + 1]: row r has pages starts[r] to starts[r + 1]
    places: NDArray[np.int64]  # [pages]: index of each into the flattened block tables
    last_lengths: NDArray[np.int32]  # [rows]: keys in the last page of each, at least one


def pages_of(lengths: NDArray[np.integer], block_size: int, width: int) -> Pages:
    """lengths: [rows], keys of each row; width: of the block tables."""
    counts = -(-lengths.astype(np.int64) // block_size)
    ends = counts.cumsum()
    columns = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
    places = np.repeat(np.arange(len(lengths)) * width, counts) + columns
    starts = np.concatenate([[0], ends]).astype(np.int32)
    return Pages(starts, places, ((lengths - 1) % block_size + 1).astype(np.int32))


class FlashInferDecodes:
    """The decodes of one step. Planned at the first layer of each rule, where the shape of heads becomes known."""

    __slots__ = ("_backend", "_indices", "_pages", "_planned", "_sequences")

    def __init__(self, backend: FlashInfer, sequences: BackendSequences) -> None:
        self._backend = backend
        self._sequences = sequences
        self._planned: set[AttentionRule] = set()
        self._pages: Pages | None = None
        self._indices: Tensor | None = None

    def takes(self, kv_layer: Tensor) -> bool:
        return True

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule, output: Tensor) -> None:
        wrapper = self._backend.wrapper(rule)
        if rule not in self._planned:
            self._plan(wrapper, query, kv_layer, rule)
            self._planned.add(rule)
        wrapper.run(query, tuple(kv_layer.unbind(1)), out=output.view(query.shape))

    def _plan(self, wrapper: Any, query: Tensor, kv_layer: Tensor, rule: AttentionRule) -> None:
        _, heads, dim = query.shape
        _, _, block_size, kv_heads, _ = kv_layer.shape
        tables = self._sequences.tables
        if self._pages is None or self._indices is None:
            lengths = self._sequences.context_lengths.cpu().numpy()  # waits for the step before
            self._pages = pages_of(lengths, block_size, tables.shape[1])
            (places,) = upload_integers(tables.device, self._pages.places)
            self._indices = tables.flatten()[places]
        wrapper.plan(
            torch.from_numpy(self._pages.starts),
            self._indices,
            torch.from_numpy(self._pages.last_lengths),
            heads,
            kv_heads,
            dim,
            block_size,
            window_left=window_left(rule),
            logits_soft_cap=rule.softcap or None,
            q_data_type=query.dtype,
            kv_data_type=kv_layer.dtype,
            sm_scale=rule.scale,
        )

"""What a head that drafts reads of the model: a hidden state of each token computed, in blocks of the KV cache's ids.
Of an EAGLE head it is fused of several.

So a head can compute the tokens of a row whenever it first drafts for it: prefix hits, forks, copies, preemptions and
swaps are those of the KV cache. Host side, as `draft_model`.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import IntArray
from quire.core.moves import Move
from quire.kernels.interface import LayerCapture
from quire.kernels.row_interface import RowColumns
from quire.models.interface import KvGeometry
from quire.runner.kv_store import KvStores

_MAX_WAITING = 64  # tokens; never tuned


def feature_geometry(hidden_size: int, dtype: torch.dtype) -> KvGeometry:
    """Of a store with a vector of this width for each token: halves of it in the places of a key and a value."""
    assert hidden_size % 2 == 0, hidden_size
    return KvGeometry(num_layers=1, kv_heads=1, head_dim=hidden_size // 2, dtype=dtype)


class DraftFeatures:
    """The fused hidden states of all tokens in the KV cache. Those of the latest steps wait and are fused together: in
    a step of one row, reading the weights for it would take longer than all else here."""

    __slots__ = ("_capture", "_fuse", "_num_waiting", "_stores", "_waiting")

    def __init__(self, capture: LayerCapture, fuse: Callable[[Tensor], Tensor], stores: KvStores) -> None:
        self._capture = capture  # filled by each step of the model
        self._fuse = fuse
        self._stores = stores
        self._waiting: list[tuple[NDArray[np.int64], Tensor]] = []  # slots, and the model's states of their tokens
        self._num_waiting = 0

    @property
    def stores(self) -> KvStores:
        return self._stores

    def carry(self, moves: Sequence[Move]) -> None:
        if moves:
            self._write()
            self._stores.carry(moves)

    def note(self, slots: NDArray[np.int64]) -> None:
        """The model has computed the tokens of these slots, in this order, in its latest step."""
        assert self._capture.states is not None, "no step was captured"
        self._waiting.append((slots, self._capture.states[: len(slots)].clone()))
        self._num_waiting += len(slots)
        if self._num_waiting >= _MAX_WAITING:
            self._write()

    def _write(self) -> None:
        if not self._waiting:
            return
        slots = np.concatenate([slots for slots, _ in self._waiting])
        _, last = np.unique(slots[::-1], return_index=True)  # of tokens in the same slot: rejected drafts, old rows
        kept = torch.from_numpy(len(slots) - 1 - last)
        fused = self._fuse(torch.cat([states for _, states in self._waiting])[kept])
        store = self._stores.device[:, 0, :, :, 0]  # [blocks, 2, block_size, hidden / 2]
        block, offset = self._places(torch.from_numpy(slots)[kept])
        store[block, :, offset] = fused.view(len(kept), 2, -1).to(store.dtype)
        self._waiting.clear()
        self._num_waiting = 0

    def read(self, slots: Tensor) -> Tensor:
        """slots: [n] int64. [n, hidden]."""
        self._write()
        block, offset = self._places(slots)
        return self._stores.device[:, 0, :, :, 0][block, :, offset].flatten(1)

    def _places(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return slots // self._stores.block_size, slots % self._stores.block_size

    def decode_slots(self, rows: IntArray, columns: RowColumns) -> NDArray[np.int64]:
        """Where the tokens of rows that decode are, without rows that are not alive. Call before the step."""
        alive = rows[columns.alive.numpy()[rows]]
        positions, size = columns.lengths.numpy()[alive] - 1, self._stores.block_size
        slots: NDArray[np.int64] = columns.tables.numpy()[alive, positions // size] * np.int64(size) + positions % size
        return slots

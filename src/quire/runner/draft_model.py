"""A draft model: a second, smaller model with the same tokens, which proposes what the model may say next.

Its keys and values lie in a store of their own, at the block ids of the model's: one block table serves both, and block
copies, forks, preemptions and prefix hits are the same. The draft model computes a row's tokens only when the row has
drafts, so it may lag behind. `DraftedBlocks` counts how much of each block it has, and a row begins where its blocks
end: at what another request with the same prefix had computed, or one token behind after all drafts were accepted.

An EAGLE head or a multi-token-prediction layer (`models/draft_head.py`) is such a model, too. It reads `DraftFeatures`
beside tokens: a hidden state of each token that the model computed, in blocks of the KV cache's ids, too; of an EAGLE
head fused of several. For drafts it reads its own output of the position before. Its keys and values of a token are in
the slot of the token before: the first token has none.

Host side: for runners that compute a step before `launch` returns. Wrong keys and values would cost time, and change no
output: a draft is only ever accepted if it is the token sampled.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import IntArray, Row
from quire.core.moves import Move, Tier
from quire.core.step import StepPlan
from quire.kernels.interface import LayerCapture, StepLayout
from quire.kernels.row_interface import RowColumns, slots_of
from quire.kernels.transfers import upload_integers
from quire.models.draft_head import DraftHead
from quire.models.interface import KvGeometry, Model
from quire.runner.kv_store import KvStores
from quire.runner.row_table import RowTable
from quire.sampling.row_params import SamplingBatch
from quire.sampling.sampler import Sampler

# Tokens in one step that rows lag behind and that are computed first; more in the next step. As a chunk of a prompt on
# a CPU has by default.
MAX_CATCH_UP = 512
_MAX_WAITING = 64  # tokens whose states wait to be fused together; never tuned


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

    def new_states(self, count: int) -> Tensor:
        """[count, hidden], as they are kept."""
        store = self._stores.device
        return torch.zeros(count, 2 * store.shape[-1], dtype=store.dtype, device=store.device)

    def write_at_once(self) -> None:
        """Each step writes the states of its tokens itself, and none is noted: steps are captured, or in flight."""
        self._capture.sink = self._put

    def carry(self, moves: Many[Move]) -> None:
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
        slots = np.concatenate([each for each, _ in self._waiting])
        _, last = np.unique(slots[::-1], return_index=True)  # of tokens in the same slot: rejected drafts, old rows
        kept = torch.from_numpy(len(slots) - 1 - last)
        self._put(torch.from_numpy(slots)[kept], torch.cat([states for _, states in self._waiting])[kept])
        self._waiting.clear()
        self._num_waiting = 0

    def _put(self, slots: Tensor, states: Tensor) -> None:
        store = self._stores.device[:, 0, :, :, 0]  # [blocks, 2, block_size, hidden / 2]
        block, offset = self._places(slots)
        store[block, :, offset] = self._fuse(states).view(len(slots), 2, -1).to(store.dtype)

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


class DraftModelConfig(NamedTuple):
    """A draft model and its store, which has the blocks of the model's own."""

    model: Model | DraftHead
    stores: KvStores
    max_positions: int  # that it was trained for: it drafts nothing behind them
    vocab_size: int  # of the model that it drafts for
    features: DraftFeatures | None = None  # what a head reads

    @property
    def all_stores(self) -> list[KvStores]:
        return [self.stores] if self.features is None else [self.stores, self.features.stores]


class DraftedBlocks:
    """How many positions of each block the draft model has computed, from the first on, for the tokens it holds now."""

    __slots__ = ("_block_size", "_counts", "_table")

    def __init__(self, stores: KvStores, table: RowTable) -> None:
        self._block_size = stores.block_size
        self._table = table
        self._counts: dict[Tier, NDArray[np.int64]] = {Tier.DEVICE: np.zeros(len(stores.device), dtype=np.int64)}
        if stores.host is not None:
            self._counts[Tier.HOST] = np.zeros(len(stores.host), dtype=np.int64)

    def carry(self, moves: Iterable[Move]) -> None:
        for move in moves:
            self._counts[move.dst.tier][move.dst.block] = self._counts[move.src.tier][move.src.block]

    def grant(self, plan: StepPlan) -> None:
        """Blocks are granted and chunks write to them. A row that starts may be granted blocks from the prefix tree:
        what is new begins at its first chunk. All later blocks are new."""
        if len(plan.grants):
            new = ~np.isin(plan.grants.rows, [start.row for start in plan.starts])
            self._counts[Tier.DEVICE][plan.grants.blocks[new]] = 0
        for chunk in plan.chunks:
            self.cut(chunk.row, chunk.start)

    def forget(self, blocks: IntArray) -> None:
        """Another engine has written the model's keys and values of these blocks."""
        self._counts[Tier.DEVICE][blocks] = 0

    def of_row(self, row: Row) -> int:
        """Positions of a row that are computed, from the first on."""
        counts = self._counts[Tier.DEVICE][self._blocks(row)]
        partial = np.flatnonzero(counts < self._block_size)
        if not len(partial):
            return len(counts) * self._block_size
        return int(partial[0]) * self._block_size + int(counts[partial[0]])

    def cut(self, row: Row, position: int) -> None:
        """The row holds other tokens from this position on."""
        counts, blocks = self._counts[Tier.DEVICE], self._blocks(row)[position // self._block_size :]
        counts[blocks[:1]] = np.minimum(counts[blocks[:1]], position % self._block_size)
        counts[blocks[1:]] = 0

    def extend(self, row: Row, start: int, stop: int) -> None:
        """The positions [start, stop) of a row are computed, and all before them."""
        first = start // self._block_size
        blocks = self._blocks(row)[first : -(-stop // self._block_size)]
        computed = stop - (first + np.arange(len(blocks))) * self._block_size
        self._counts[Tier.DEVICE][blocks] = np.minimum(computed, self._block_size)

    def _blocks(self, row: Row) -> IntArray:
        blocks: IntArray = self._table.tables[row, : int(self._table.num_blocks[row])].numpy()
        return blocks


class DraftModel:
    """Proposes tokens of many rows at once, one position after the other."""

    def __init__(self, config: DraftModelConfig, table: RowTable, sampler: Sampler) -> None:
        self._model, self._stores, self._max_positions, self._vocab_size, self.features = config
        self._table = table
        self._sampler = sampler
        self._blocks = DraftedBlocks(config.stores, table)
        self._unverified: dict[Row, int] = {}  # rows with drafts in the last step, and their tokens before it
        self.source = self._model.source if isinstance(self._model, DraftHead) else "draft"
        self._lag = 0 if self.features is None else 1  # slots by which keys and values are before their token

    def apply(self, plan: StepPlan) -> None:
        """Call when the row table has applied the plan."""
        self._blocks.grant(plan)

    def carry(self, moves: Many[Move]) -> None:
        """Copy blocks. Call before the row table applies the plan: the drafts of the last step are verified now, and
        rejected ones are not computed. A head computes accepted ones again, from the model's states of them."""
        for row, known in self._unverified.items():
            last = int(self._table.lengths[row]) - 1
            self._blocks.cut(row, last if self.features is None else min(last, known))
        self._unverified.clear()
        self._stores.carry(moves)
        if self.features is not None:
            self.features.carry(moves)
        self._blocks.carry(moves)

    def forget(self, blocks: IntArray) -> None:
        """These blocks have other tokens now, which the draft model has not computed."""
        assert self.features is None, "the hidden states of another engine's tokens are not known"
        self._blocks.forget(blocks)

    def propose(self, rows: Many[Row], counts: Many[int], texts: Many[IntArray]) -> list[IntArray]:
        """Drafts of each row, at most its number. `texts`: all tokens of each row. Sampled as the row samples, with
        the random numbers of the same positions: what is drawn from alike probabilities is mostly the same token."""
        known = [min(self._blocks.of_row(row), len(text) - 1) for row, text in zip(rows, texts, strict=True)]
        starts = [max(each, self._lag) for each in known]
        lags = np.array([len(text) - start for start, text in zip(starts, texts, strict=True)])
        order = np.argsort(lags, kind="stable")
        left = MAX_CATCH_UP + len(rows) - np.cumsum(lags[order]) + lags[order]
        computed = np.minimum(lags[order], left).clip(min=0)
        drafted: list[list[int]] = [[] for _ in rows]
        first: list[_Part] = []
        for place, length in zip(order.tolist(), computed.tolist(), strict=True):
            start, text = starts[place], texts[place]
            wanted = min(counts[place], self._max_positions - len(text)) if length == lags[place] else 0
            if length > 0:
                first.append(_Part(place, rows[place], start, text[start : start + length], wanted))
        parts, before = first, None
        while parts:
            tokens, hidden = self._compute(parts, before)
            for part, token in zip(parts, tokens, strict=True):
                if part.num_wanted > 0:
                    drafted[part.place].append(token)
            going_on = [index for index, part in enumerate(parts) if part.num_wanted > 1]
            parts, before = [parts[index].following(tokens[index]) for index in going_on], hidden[going_on]
        self._unverified = {part.row: len(texts[part.place]) for part in first}
        return [np.array(tokens, dtype=np.int32) for tokens in drafted]

    def _compute(self, parts: "list[_Part]", before: Tensor | None) -> tuple[list[int], Tensor]:
        """The next token of each part, and its last hidden state, with the keys and values of all of them. `before`:
        what a head gave for the position before each part, of one token; None: the model has computed it."""
        lengths = np.array([len(part.tokens) for part in parts])
        rows = np.array([part.row for part in parts], dtype=np.int32)
        ends = np.cumsum(lengths)
        table, device = self._table, self._table.device
        stops = np.array([part.stop for part in parts])
        tokens, token_rows, positions, query_starts, context_lengths, last, device_rows = upload_integers(
            device,
            np.concatenate([part.tokens for part in parts]),
            np.repeat(rows, lengths),
            np.arange(ends[-1]) - np.repeat(ends - stops, lengths) - self._lag,
            np.concatenate([[0], ends]),
            stops,
            ends - 1,
            rows,
        )
        layout = StepLayout(
            positions=positions,
            slots=slots_of(token_rows, positions, table.columns, table.block_size),
            tables=table.tables[device_rows, : int(table.num_blocks[rows].max())],
            query_starts=query_starts.int(),
            context_lengths=context_lengths.int() - self._lag,
            max_lengths=table.max_lengths[token_rows],
            num_decodes=int(np.count_nonzero(lengths == 1)),
        )
        known = tokens.clamp(max=self._model.vocab_size - 1)  # a model may have more tokens at the end than the other
        if self.features is None:
            hidden = self._model.forward(known, layout, self._stores.device, last)
        else:
            assert isinstance(self._model, DraftHead), "features are for heads"
            features = self.features.read(layout.slots) if before is None else before
            hidden = self._model.forward(known, layout, self._stores.device, last, features)
        for part in parts:
            self._blocks.extend(part.row, part.start, part.stop)
        logits = self._widened(self._model.logits(hidden))
        return self._sampler.sample(logits, SamplingBatch(device_rows, rows, context_lengths)).tokens.tolist(), hidden

    def _widened(self, logits: Tensor) -> Tensor:
        """[rows, vocab] of the model's own vocabulary."""
        missing = self._vocab_size - logits.shape[1]
        if missing <= 0:
            return logits[:, : self._vocab_size]
        return F.pad(logits, (0, missing), value=-torch.inf)


class _Part(NamedTuple):
    """Tokens of a row that the draft model computes in one pass, from a position on."""

    place: int  # of the row among those that propose
    row: Row
    start: int
    tokens: IntArray
    num_wanted: int  # drafts that are to follow

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def following(self, token: int) -> "_Part":
        """The draft behind these tokens."""
        return _Part(self.place, self.row, self.stop, np.array([token], dtype=np.int32), self.num_wanted - 1)

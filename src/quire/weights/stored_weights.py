"""A decoder's weights as a GGUF file stores them: matrices stay quantized, and are read when kernels pack them."""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.errors import BrokenModelFile
from quire.core.sharding import WHOLE, Shard
from quire.formats.checkpoint import Checkpoint, StoredTensor
from quire.kernels.interface import QuantizedWeight, StoredRows, Weight
from quire.models.parameters import DecoderWeights, LayerWeights
from quire.weights.allocate import LAYER_FIELDS
from quire.weights.dequantize import PLAIN, Bytes, Dequantizer
from quire.weights.load import LoadedBytes, Progress, is_interleaved, match_tensors
from quire.weights.names import FusedPart, RowRange, WeightTarget
from quire.weights.sharding import ShardSlice, shard_pieces, stage_targets
from quire.weights.tensor_reader import PLAIN_BYTES, read_exactly

Fields = dict[str, Weight]


def stored_weights(
    checkpoint: Checkpoint,
    dequantizer: Dequantizer,
    readable: frozenset[str],
    progress: Progress | None = None,
    shard: Shard = WHOLE,
) -> DecoderWeights:
    """`readable`: the encodings that the kernels read. A matrix in another one is dequantized to bfloat16, and so is
    one whose columns a rank cannot take without cutting a quantized group."""
    targets = stage_targets(checkpoint.spec, shard, match_tensors(checkpoint, dequantizer))
    reader = _Reader(dequantizer, readable, LoadedBytes(checkpoint.num_bytes, progress))
    fields: defaultdict[int | None, Fields] = defaultdict(dict)
    parts: defaultdict[tuple[int | None, str], list[tuple[WeightTarget, StoredTensor]]] = defaultdict(list)
    for name, target in targets.items():
        parts[target.layer, target.field].append((target, checkpoint.tensors[name]))
    for (layer, field), stored in parts.items():
        stored.sort(key=lambda each: each[0].rows.start)
        pieces = [
            _StoredPiece(tensor, target, piece)
            for target, tensor in stored
            for piece in shard_pieces(checkpoint.spec, shard, field, target.part, target.shape[0])
        ]
        if len(stored[0][0].shape) == 1:
            fields[layer][field] = torch.cat([_vector(reader, checkpoint, each) for each in pieces])
        else:
            rows = tuple(reader.rows(each, _order(checkpoint, each)) for each in pieces)
            fields[layer][field] = QuantizedWeight(rows, (sum(each.num_rows for each in rows), pieces[0].width))
    layers = tuple(
        LayerWeights(**(dict.fromkeys(LAYER_FIELDS) | fields[index]))  # type: ignore[arg-type]
        for index in range(len(shard.layers(checkpoint.spec)))
    )
    none = torch.empty(0, checkpoint.spec.hidden_size)  # of other pipeline stages
    embedding, final_norm = fields[None].get("embedding", none), fields[None].get("final_norm", none[:, 0])
    assert isinstance(final_norm, Tensor)
    head = fields[None].get("head", embedding if shard.is_last else none)
    return DecoderWeights(embedding, layers, final_norm, head)


class _StoredPiece(NamedTuple):
    """A stored tensor, and what is needed of it."""

    stored: StoredTensor
    target: WeightTarget
    piece: ShardSlice

    @property
    def num_rows(self) -> int:
        return self.piece.stored.stop - self.piece.stored.start

    @property
    def columns(self) -> RowRange:
        return self.piece.columns or RowRange(0, self.stored.shape[1])

    @property
    def width(self) -> int:
        return self.columns.stop - self.columns.start


def _vector(reader: "_Reader", checkpoint: Checkpoint, wanted: _StoredPiece) -> Tensor:
    rows = wanted.piece.stored
    values = reader.values(wanted.stored)[rows.start : rows.stop]
    order = _order(checkpoint, wanted)
    return values if order is None else values[torch.from_numpy(order).long()]


def _order(checkpoint: Checkpoint, wanted: _StoredPiece) -> NDArray[np.int32] | None:
    """llama.cpp interleaves the two halves of each head's queries and keys: row i of the model is row order[i]."""
    if not is_interleaved(checkpoint) or wanted.target.part not in (FusedPart.QUERY, FusedPart.KEY):
        return None
    rows = np.arange(wanted.num_rows, dtype=np.int32)
    return rows.reshape(-1, checkpoint.spec.head_dim // 2, 2).transpose(0, 2, 1).reshape(-1)


class _Reader:
    """Reads rows of tensors from files."""

    def __init__(self, dequantizer: Dequantizer, readable: frozenset[str], progress: LoadedBytes) -> None:
        self._dequantizer = dequantizer
        self._readable = readable
        self._progress = progress

    def rows(self, wanted: _StoredPiece, order: NDArray[np.int32] | None) -> StoredRows:
        stored, rows, columns = wanted.stored, wanted.piece.stored, wanted.columns
        width = stored.shape[1]
        group = self._dequantizer.group_size(stored.encoding)
        if stored.encoding in self._readable and columns.start % group == columns.stop % group == 0:
            row_bytes = stored.num_bytes // stored.shape[0]
            first, stop = (each * row_bytes // width for each in columns)
            read = self._bytes_of(stored, rows)
            return StoredRows(stored.encoding, wanted.num_rows, stop - first, lambda: read()[:, first:stop], order)

        def dequantized() -> Bytes:
            values = self.values(stored, rows).view(wanted.num_rows, width)[:, columns.start : columns.stop]
            return values.bfloat16().contiguous().view(torch.uint8).numpy()

        return StoredRows("BF16", wanted.num_rows, 2 * wanted.width, dequantized, order)

    def values(self, stored: StoredTensor, rows: RowRange | None = None) -> Tensor:
        """Of some rows, or all. Flat, float32."""
        data = self._bytes_of(stored, rows)().reshape(-1)
        if stored.encoding in PLAIN:
            return torch.from_numpy(data).view(PLAIN[stored.encoding]).float()
        return self._dequantizer.dequantize(data, stored.encoding)

    def _bytes_of(self, stored: StoredTensor, rows: RowRange | None) -> Callable[[], Bytes]:
        """[rows, bytes]; one row, if all are wanted together."""
        row_bytes = stored.num_bytes if rows is None else stored.num_bytes // stored.shape[0]
        first_row, stop_row = rows or RowRange(0, 1)

        def read() -> Bytes:
            data = np.empty((stop_row - first_row) * row_bytes, np.uint8)
            first = stored.offset + first_row * row_bytes
            try:
                with stored.path.open("rb", buffering=0) as file:
                    for start in range(0, len(data), PLAIN_BYTES):
                        piece = data[start : start + PLAIN_BYTES]
                        read_exactly(file, stored, first + start, piece)
                        self._progress(len(piece))
            except OSError as error:
                raise BrokenModelFile(f"{stored.path} cannot be read: {error}.") from error
            return data.reshape(-1, row_bytes)

        return read

"""A decoder's weights as a GGUF file stores them: matrices stay quantized, and are read when kernels pack them."""

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.errors import BrokenModelFile
from quire.formats.checkpoint import Checkpoint, StoredTensor
from quire.kernels.interface import QuantizedWeight, StoredRows, Weight
from quire.models.parameters import DecoderWeights, LayerWeights
from quire.weights.allocate import LAYER_FIELDS
from quire.weights.dequantize import PLAIN, Bytes, Dequantizer
from quire.weights.load import LoadedBytes, Progress, is_interleaved, match_tensors
from quire.weights.names import FusedPart, WeightTarget
from quire.weights.tensor_reader import PLAIN_BYTES, read_exactly

Fields = dict[str, Weight]


def stored_weights(
    checkpoint: Checkpoint, dequantizer: Dequantizer, readable: frozenset[str], progress: Progress | None = None
) -> DecoderWeights:
    """`readable`: the encodings that the kernels read. A matrix in another one is dequantized to bfloat16."""
    targets = match_tensors(checkpoint, dequantizer)
    reader = _Reader(dequantizer, readable, LoadedBytes(checkpoint.num_bytes, progress))
    fields: defaultdict[int | None, Fields] = defaultdict(dict)
    parts: defaultdict[tuple[int | None, str], list[tuple[WeightTarget, StoredTensor]]] = defaultdict(list)
    for name, target in targets.items():
        parts[target.layer, target.field].append((target, checkpoint.tensors[name]))
    for (layer, field), stored in parts.items():
        stored.sort(key=lambda each: each[0].rows.start)
        if len(stored[0][0].shape) == 1:
            fields[layer][field] = torch.cat([_vector(reader, checkpoint, *each) for each in stored])
        else:
            rows = tuple(reader.rows(tensor, _order(checkpoint, target)) for target, tensor in stored)
            shape = (sum(each.num_rows for each in rows), stored[0][0].shape[1])
            fields[layer][field] = QuantizedWeight(rows, shape)
    layers = tuple(
        LayerWeights(**(dict.fromkeys(LAYER_FIELDS) | fields[index]))  # type: ignore[arg-type]
        for index in range(checkpoint.spec.num_layers)
    )
    embedding, final_norm = fields[None]["embedding"], fields[None]["final_norm"]
    assert isinstance(final_norm, Tensor)
    return DecoderWeights(embedding, layers, final_norm, fields[None].get("head", embedding))


def _vector(reader: "_Reader", checkpoint: Checkpoint, target: WeightTarget, stored: StoredTensor) -> Tensor:
    values = reader.values(stored)
    order = _order(checkpoint, target)
    return values if order is None else values[torch.from_numpy(order).long()]


def _order(checkpoint: Checkpoint, target: WeightTarget) -> NDArray[np.int32] | None:
    """llama.cpp interleaves the two halves of each head's queries and keys: row i of the model is row order[i]."""
    if not is_interleaved(checkpoint) or target.part not in (FusedPart.QUERY, FusedPart.KEY):
        return None
    rows = np.arange(target.shape[0], dtype=np.int32)
    return rows.reshape(-1, checkpoint.spec.head_dim // 2, 2).transpose(0, 2, 1).reshape(-1)


class _Reader:
    """Reads whole tensors from files."""

    def __init__(self, dequantizer: Dequantizer, readable: frozenset[str], progress: LoadedBytes) -> None:
        self._dequantizer = dequantizer
        self._readable = readable
        self._progress = progress

    def rows(self, stored: StoredTensor, order: NDArray[np.int32] | None) -> StoredRows:
        num_rows, width = stored.shape
        if stored.encoding in self._readable:
            row_bytes = stored.num_bytes // num_rows
            return StoredRows(stored.encoding, num_rows, row_bytes, self._bytes_of(stored, row_bytes), order)

        def dequantized() -> Bytes:
            return self.values(stored).view(num_rows, width).bfloat16().view(torch.uint8).numpy()

        return StoredRows("BF16", num_rows, 2 * width, dequantized, order)

    def values(self, stored: StoredTensor) -> Tensor:
        """Flat, float32."""
        data = self._bytes_of(stored, stored.num_bytes)().reshape(-1)
        if stored.encoding in PLAIN:
            return torch.from_numpy(data).view(PLAIN[stored.encoding]).float()
        return self._dequantizer.dequantize(data, stored.encoding)

    def _bytes_of(self, stored: StoredTensor, row_bytes: int) -> Callable[[], Bytes]:
        def read() -> Bytes:
            data = np.empty(stored.num_bytes, np.uint8)
            try:
                with stored.path.open("rb", buffering=0) as file:
                    for start in range(0, len(data), PLAIN_BYTES):
                        piece = data[start : start + PLAIN_BYTES]
                        read_exactly(file, stored, stored.offset + start, piece)
                        self._progress(len(piece))
            except OSError as error:
                raise BrokenModelFile(f"{stored.path} cannot be read: {error}.") from error
            return data.reshape(-1, row_bytes)

        return read

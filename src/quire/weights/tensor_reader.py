"""Slices of stored tensors: some rows, read from the file and dequantized. Does not depend on a device."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.core.errors import BrokenModelFile
from quire.formats.checkpoint import StoredTensor
from quire.weights.dequantize import PLAIN, Bytes, Dequantizer

PLAIN_BYTES = 8 << 20  # per read: disks and PCIe reach full speed with less
# Values dequantized at a time. Their temporaries stay in cache: measured 2x to 3x as fast as 2**23.
SLICE_VALUES = 2**18


class TensorSlice(NamedTuple):
    """Some rows of a stored tensor, and their destination."""

    stored: StoredTensor
    offset: int  # in the file
    num_bytes: int
    destination: Tensor  # [rows, ...], contiguous, on any device and in any float dtype

    @property
    def dtype(self) -> torch.dtype | None:
        """The stored dtype; None if it is quantized."""
        return PLAIN.get(self.stored.encoding)


def slices_of(stored: StoredTensor, destination: Tensor) -> Iterator[TensorSlice]:
    """destination: [rows, ...], for the whole tensor."""
    num_rows = stored.shape[0]
    row_bytes = stored.num_bytes // num_rows
    row_values = int(np.prod(stored.shape[1:], dtype=np.int64))
    most = PLAIN_BYTES // row_bytes if stored.encoding in PLAIN else SLICE_VALUES // row_values
    for start in range(0, num_rows, max(1, most)):
        rows = destination[start : start + max(1, most)]
        yield TensorSlice(stored, stored.offset + start * row_bytes, len(rows) * row_bytes, rows)


class TensorReader:
    """Keeps files open between reads. For one thread."""

    __slots__ = ("_dequantizer", "_files", "_packed")

    def __init__(self, dequantizer: Dequantizer) -> None:
        self._dequantizer = dequantizer
        self._files: dict[Path, BinaryIO] = {}
        self._packed: Bytes = np.empty(0, np.uint8)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def read(self, tensor_slice: TensorSlice, into: Bytes) -> None:
        """Read the stored bytes. [num_bytes]"""
        path = tensor_slice.stored.path
        try:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = path.open("rb", buffering=0)
            read_exactly(file, tensor_slice.stored, tensor_slice.offset, into)
        except OSError as error:
            raise BrokenModelFile(f"{path} cannot be read: {error}.") from error

    def dequantize(self, tensor_slice: TensorSlice) -> Tensor:
        """The values of a quantized slice. Flat, float32."""
        if len(self._packed) < tensor_slice.num_bytes:
            self._packed = np.empty(tensor_slice.num_bytes, np.uint8)
        packed = self._packed[: tensor_slice.num_bytes]
        self.read(tensor_slice, packed)
        return self._dequantizer.dequantize(packed, tensor_slice.stored.encoding)


def read_exactly(file: BinaryIO, stored: StoredTensor, offset: int, into: Bytes) -> None:
    """Fill `into` with bytes of a tensor, from an offset in the file."""
    place = 0
    file.seek(offset)
    while place < len(into) and (count := file.readinto(into[place:])):  # type: ignore[attr-defined]
        place += count
    if place < len(into):
        raise BrokenModelFile(
            f"{stored.path} changed while it was read: tensor {stored.name} lacks {len(into) - place} bytes of "
            f"{stored.num_bytes}."
        )

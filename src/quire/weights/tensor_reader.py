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
    columns: tuple[int, int] | None = None  # first and last of those that are kept; None: all

    @property
    def dtype(self) -> torch.dtype | None:
        """The stored dtype; None if it is quantized."""
        return PLAIN.get(self.stored.encoding)

    @property
    def num_values(self) -> int:
        """That are read, all columns included."""
        return len(self.destination) * int(np.prod(self.stored.shape[1:], dtype=np.int64))

    def kept(self, values: Tensor) -> Tensor:
        """Of all values of the rows, flat, those of the columns that are kept, flat."""
        if self.columns is None:
            return values
        first, stop = self.columns
        return values.view(len(self.destination), -1)[:, first:stop].reshape(-1)


def slices_of(
    stored: StoredTensor, destination: Tensor, first_row: int = 0, columns: tuple[int, int] | None = None
) -> Iterator[TensorSlice]:
    """destination: [rows, ...], for this many rows of the tensor from the first on; of each row, for some columns."""
    row_bytes = stored.num_bytes // stored.shape[0]
    row_values = int(np.prod(stored.shape[1:], dtype=np.int64))
    most = max(1, PLAIN_BYTES // row_bytes if stored.encoding in PLAIN else SLICE_VALUES // row_values)
    for start in range(0, len(destination), most):
        rows = destination[start : start + most]
        offset = stored.offset + (first_row + start) * row_bytes
        yield TensorSlice(stored, offset, len(rows) * row_bytes, rows, columns)


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

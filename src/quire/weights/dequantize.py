"""From a stored tensor's bytes to numbers: floats as they lie, packed ones through whoever can unpack them.

Files are memory-mapped; packed tensors are unpacked in slices, so that no second copy of one ever exists.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.errors import BrokenModelFile, UnsupportedModel
from quire.formats.checkpoint import StoredTensor

PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Values unpacked at a time. Their temporaries stay in cache: measured two to three times as fast as 2**23.
SLICE_VALUES = 2**18

Bytes = NDArray[np.uint8]


class Unpacker(Protocol):
    """Knows packed encodings (`weights.packed.GgufUnpacker`)."""

    def knows(self, encoding: str) -> bool: ...

    def unpack(self, data: Bytes, encoding: str) -> Tensor:
        """Flat float32 values."""


class FloatsOnly:
    """The unpacker of checkpoints that hold nothing packed."""

    def knows(self, encoding: str) -> bool:
        return False

    def unpack(self, data: Bytes, encoding: str) -> Tensor:
        raise AssertionError(f"{encoding} was not refused")


class RowSlice(NamedTuple):
    start: int
    values: Tensor  # [rows, ...] in some float dtype, on the CPU


class TensorReader:
    """Keeps the files of a checkpoint mapped while it is read."""

    __slots__ = ("_files", "_unpacker")

    def __init__(self, unpacker: Unpacker) -> None:
        self._unpacker = unpacker
        self._files: dict[Path, Bytes] = {}

    def slices(self, stored: StoredTensor) -> Iterator[RowSlice]:
        """The tensor's values, a few rows at a time."""
        data = self._map(stored.path)[stored.offset : stored.offset + stored.num_bytes]
        num_rows = stored.shape[0]
        if len(data) != stored.num_bytes or num_rows == 0:
            raise BrokenModelFile(
                f"{stored.path} changed while it was read: tensor {stored.name} has {len(data)} bytes left "
                f"of {stored.num_bytes}."
            )
        row_bytes = stored.num_bytes // num_rows
        row_values = int(np.prod(stored.shape[1:], dtype=np.int64))
        step = num_rows if stored.encoding in PLAIN else max(1, SLICE_VALUES // max(1, row_values))
        for start in range(0, num_rows, step):
            stop = min(num_rows, start + step)
            values = self._decode(data[start * row_bytes : stop * row_bytes], stored.encoding)
            yield RowSlice(start, values.view(stop - start, *stored.shape[1:]))

    def _map(self, path: Path) -> Bytes:
        if path not in self._files:
            try:
                # Copy-on-write: torch warns about memory it may not write to, and nobody writes.
                self._files[path] = np.memmap(path, dtype=np.uint8, mode="c")
            except (OSError, ValueError) as error:
                raise BrokenModelFile(f"{path} cannot be mapped: {error}.") from error
        return self._files[path]

    def _decode(self, data: Bytes, encoding: str) -> Tensor:
        """Flat values in the narrowest float dtype that holds them exactly."""
        dtype = PLAIN.get(encoding)
        if dtype is None:
            return self._unpacker.unpack(data, encoding)
        aligned = data if data.ctypes.data % dtype.itemsize == 0 else data.copy()
        return torch.from_numpy(aligned).view(dtype)


def refuse_unreadable(tensors: Iterable[StoredTensor], unpacker: Unpacker) -> None:
    """Say before any memory is taken that a tensor's encoding cannot be decoded."""
    for stored in tensors:
        encoding = stored.encoding
        if encoding not in PLAIN and not unpacker.knows(encoding):
            raise UnsupportedModel(
                f"Tensor {stored.name} in {stored.path} is stored as {encoding}, which quire cannot decode. "
                f"Use another quantization of the model, or its F16 or BF16 weights."
            )

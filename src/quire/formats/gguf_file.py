"""Reads the header of a GGUF file: metadata and tensor locations. Does not depend on models.

The gguf package's own reader is not used: it makes an array object per token (seconds for a large vocabulary)
and follows damaged counts without end. This one checks every length against the size of the file.
"""

import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from quire.core.errors import BrokenModelFile, UnsupportedModel
from quire.formats.checkpoint import MetadataValue, StoredTensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4  # ggml's own limit
MIN_ENTRY_BYTES = 12  # of a metadata entry or a tensor's description

SCALARS: dict[int, np.dtype[np.generic]] = {
    GGUFValueType.UINT8: np.dtype("u1"),
    GGUFValueType.INT8: np.dtype("i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("?"),
}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of one file. The tensors' extents lie inside the file."""

    path: Path
    metadata: dict[str, MetadataValue]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GgufFile:
    """Parse the header; the error names the place of damage."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise BrokenModelFile(f"{path} ({size} bytes) is not a GGUF file: it does not begin with GGUF.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(path, data))


class _Cursor:
    """A position in the file that only moves forward, never past the end."""

    __slots__ = ("data", "path", "place", "size")

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.place = len(MAGIC)

    def broken(self, what: str) -> BrokenModelFile:
        return BrokenModelFile(
            f"{self.path} is damaged at byte {self.place} of {self.size}: {what}. Fetch the file again."
        )

    def take(self, count: int) -> bytes:
        end = self.place + count
        if end > self.size:
            raise self.broken(f"{count} more bytes should follow, but the file ends")
        taken = self.data[self.place : end]
        self.place = end
        return taken

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def count(self, min_entry_bytes: int, what: str) -> int:
        """A number of entries, each of at least `min_entry_bytes`."""
        number = self.u64()
        if number * min_entry_bytes > self.size - self.place:
            raise self.broken(f"it declares {number} {what}, which do not fit in the file")
        return number

    def text(self) -> str:
        try:
            return self.take(self.u64()).decode()
        except UnicodeDecodeError as error:
            raise self.broken("a string is not valid UTF-8") from error

    def value(self) -> MetadataValue:
        kind = self.u32()
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            return self._array()
        dtype = self._scalar(kind)
        scalar: int | float | bool = np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()
        return scalar

    def _array(self) -> MetadataValue:
        kind = self.u32()
        if kind == GGUFValueType.STRING:
            return self._texts(self.count(8, "strings"))
        dtype = self._scalar(kind)
        number = self.count(dtype.itemsize, "values")
        values: list[int] | list[float] = np.frombuffer(self.take(number * dtype.itemsize), dtype).tolist()
        return values

    def _texts(self, number: int) -> list[str]:
        """A vocabulary has hundreds of thousands of strings: this loop is `text` without its calls."""
        data, place, size = self.data, self.place, self.size
        length_of = struct.Struct("<Q").unpack_from
        texts = []
        try:
            for _ in range(number):
                (length,) = length_of(data, place)
                self.place = place
                place += 8
                if length > size - place:
                    raise self.broken(f"a string of {length} bytes should follow, but the file ends")
                texts.append(data[place : place + length].decode())
                place += length
        except (struct.error, UnicodeDecodeError) as error:
            raise self.broken("a list of strings is truncated or not valid UTF-8") from error
        self.place = place
        return texts

    def _scalar(self, kind: int) -> np.dtype[np.generic]:
        dtype = SCALARS.get(kind)
        if dtype is None:
            raise self.broken(f"value type {kind} is not allowed here")
        return dtype


def _parse(cursor: _Cursor) -> GgufFile:
    version = cursor.u32()
    if version not in VERSIONS:
        big_endian = version & 0xFFFF == 0
        reason = "big-endian" if big_endian else f"GGUF version {version}"
        raise UnsupportedModel(f"{cursor.path} is {reason}; quire reads little-endian GGUF, versions 2 and 3.")
    num_tensors = cursor.count(MIN_ENTRY_BYTES, "tensors")
    num_entries = cursor.count(MIN_ENTRY_BYTES, "metadata entries")
    metadata: dict[str, MetadataValue] = {}
    for _ in range(num_entries):
        key = cursor.text()
        if key in metadata:
            raise cursor.broken(f"duplicate metadata key {key}")
        metadata[key] = cursor.value()
    tensors = [_tensor_info(cursor) for _ in range(num_tensors)]
    return GgufFile(cursor.path, metadata, _place_tensors(cursor, tensors, metadata))


def _tensor_info(cursor: _Cursor) -> StoredTensor:
    """A tensor's description; its offset still counts from the start of the data."""
    name = cursor.text()
    num_dimensions = cursor.u32()
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.broken(f"tensor {name} has {num_dimensions} dimensions")
    shape = tuple(cursor.u64() for _ in range(num_dimensions))[::-1]  # ggml counts the innermost first
    kind, offset = cursor.u32(), cursor.u64()
    try:
        encoding = GGMLQuantizationType(kind)
    except ValueError as error:
        raise UnsupportedModel(
            f"Tensor {name} in {cursor.path} has the ggml type {kind}, unknown to this version of gguf."
        ) from error
    block_size, block_bytes = GGML_QUANT_SIZES[encoding]
    if shape[-1] % block_size:
        raise cursor.broken(f"tensor {name} has rows of {shape[-1]}, but {encoding.name} packs {block_size} together")
    num_bytes = block_bytes * (shape[-1] // block_size)
    for dimension in shape[:-1]:
        num_bytes *= dimension
    return StoredTensor(name, shape, encoding.name, cursor.path, offset, num_bytes)


def _place_tensors(
    cursor: _Cursor, tensors: list[StoredTensor], metadata: dict[str, MetadataValue]
) -> dict[str, StoredTensor]:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.broken(f"general.alignment must be a power of two, not {alignment!r}")
    data_start = -(-cursor.place // alignment) * alignment
    placed: dict[str, StoredTensor] = {}
    for tensor in tensors:
        offset = data_start + tensor.offset
        if offset + tensor.num_bytes > cursor.size:
            raise BrokenModelFile(
                f"{cursor.path} is truncated: it has {cursor.size} bytes, but tensor {tensor.name} ends at "
                f"byte {offset + tensor.num_bytes}. Fetch it again."
            )
        if tensor.name in placed:
            raise cursor.broken(f"duplicate tensor {tensor.name}")
        placed[tensor.name] = replace(tensor, offset=offset)
    return placed

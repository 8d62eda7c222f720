"""Reads the header of a safetensors file: which tensors it holds and where. Never touches their bytes.

The layout is eight bytes of length, a JSON header, then data. It is read here rather than through the
safetensors package because the loader wants offsets: with them, both formats become one `StoredTensor`.
"""

import json
import math
from pathlib import Path
from typing import TypeGuard

from quire.core.errors import BrokenModelFile
from quire.formats.checkpoint import StoredTensor

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSION = 2**48
LENGTH_BYTES = 8

ITEM_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8,
    "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
}  # fmt: skip


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, by name. Their extents lie inside the file."""
    try:
        file_size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(LENGTH_BYTES)
            header_size = int.from_bytes(prefix, "little")
            if len(prefix) < LENGTH_BYTES or header_size > min(file_size - LENGTH_BYTES, MAX_HEADER_BYTES):
                raise BrokenModelFile(
                    f"{path} is no complete safetensors file: it has {file_size} bytes, and its header "
                    f"claims {header_size}. Fetch it again."
                )
            header = json.loads(file.read(header_size))
    except (ValueError, RecursionError) as error:
        raise BrokenModelFile(
            f"The header of {path} ({header_size} of {file_size} bytes) is damaged: {error}. Fetch it again."
        ) from error
    if not isinstance(header, dict):
        raise BrokenModelFile(f"The header of {path} is no mapping of tensors. Fetch the file again.")
    header.pop("__metadata__", None)
    data_start = LENGTH_BYTES + header_size
    return {name: _stored(path, name, entry, data_start, file_size) for name, entry in header.items()}


def _stored(path: Path, name: str, entry: object, data_start: int, file_size: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise BrokenModelFile(f"The entry of tensor {name} in {path} is damaged. Fetch the file again.")
    encoding, shape, extent = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(encoding, str) or not _are_sizes(shape) or not _are_sizes(extent) or len(extent) != 2:
        raise BrokenModelFile(f"The entry of tensor {name} in {path} is damaged. Fetch the file again.")
    begin, end = extent
    if data_start + end > file_size or begin > end:
        raise BrokenModelFile(
            f"{path} is cut short: it has {file_size} bytes, but tensor {name} ends at byte "
            f"{data_start + end}. Fetch it again."
        )
    bits = ITEM_BITS.get(encoding)
    if bits is not None and math.prod(shape) * bits != (end - begin) * 8:
        raise BrokenModelFile(
            f"Tensor {name} in {path} is {encoding} of shape {tuple(shape)}, which is "
            f"{math.prod(shape) * bits // 8} bytes, but {end - begin} are set aside for it."
        )
    return StoredTensor(name, tuple(shape), encoding, path, data_start + begin, end - begin)


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_DIMENSION for value in values
    )

"""A weight in the layout of the native kernels: panels of sixteen rows, in one format for each run of rows."""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.cpu.native_library import (
    FORMAT_OF,
    NativeLibrary,
    NativeLinear,
    NativeSegment,
    PackedFormat,
    StoredEncoding,
)
from quire.kernels.cpu.weight_memory import WeightMemory
from quire.kernels.interface import StoredRows, Weight

_GROUP = 32  # inputs that share a scale
_PANEL = 16

_STORED = {
    torch.float32: StoredEncoding.F32,
    torch.float16: StoredEncoding.F16,
    torch.bfloat16: StoredEncoding.BF16,
}
_TARGETS = {"int8": StoredEncoding.TO_INT8, "int4": StoredEncoding.TO_INT4}
_SHOWN = {encoding: name for name, encoding in _TARGETS.items()}


class PackedWeight:
    """Keeps the memory that its `native` structure points to."""

    __slots__ = ("_buffers", "_segments", "encodings", "native", "shape")

    def __init__(
        self,
        shape: tuple[int, int],
        segments: list[tuple[PackedFormat, int, NDArray[np.uint8]]],
        encodings: tuple[StoredEncoding, ...] = (),
    ) -> None:
        """Each segment: its format, its number of rows, and its panels. `encodings`: what each was packed from."""
        self.shape = shape
        self.encodings = tuple(_SHOWN.get(each, each.name) for each in encodings)
        self._buffers = [buffer for _, _, buffer in segments]
        self._segments = (NativeSegment * len(segments))()
        first = 0
        for segment, (form, rows, buffer) in zip(self._segments, segments, strict=True):
            segment.format, segment.first_row, segment.num_rows, segment.data = form, first, rows, buffer.ctypes.data
            first += rows
        quantized = any(form.quantized for form, _, _ in segments)
        self.native = NativeLinear(shape[1], shape[0], len(segments), quantized, self._segments, None)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def formats(self) -> tuple[PackedFormat, ...]:
        return tuple(PackedFormat(segment.format) for segment in self._segments)


def pack_weight(
    library: NativeLibrary, workspace: int, weight: Weight, quantization: str | None, memory: WeightMemory
) -> PackedWeight:
    """`quantization`: "int8" or "int4", for parts that become smaller by it; others stay as stored, and so do widths
    that are not whole groups."""
    shape = (int(weight.shape[0]), int(weight.shape[1]))
    target = _TARGETS.get(quantization or "") if shape[1] % _GROUP == 0 else None
    segments, encodings = [], []
    for part in _parts(weight):
        encoding = StoredEncoding[part.encoding]
        if target is not None and part.row_bytes > _row_bytes(library, FORMAT_OF[target], shape[1]):
            encoding, part = target, _as_float32(library, workspace, part, shape[1])
        form = FORMAT_OF[encoding]
        segments.append((form, part.num_rows, _pack_rows(library, workspace, form, encoding, part, shape[1], memory)))
        encodings.append(encoding)
    return PackedWeight(shape, segments, tuple(encodings))


def _row_bytes(library: NativeLibrary, form: PackedFormat, width: int) -> int:
    return int(library.functions.quire_panel_bytes(form, width)) // _PANEL


def _parts(weight: Weight) -> Iterator[StoredRows]:
    if isinstance(weight, Tensor):
        words = weight.contiguous().view(torch.uint8).numpy()
        yield StoredRows(_STORED[weight.dtype].name, len(words), words.shape[1], lambda: words)
    else:
        yield from weight.parts


def _pack_rows(
    library: NativeLibrary,
    workspace: int,
    form: PackedFormat,
    encoding: StoredEncoding,
    part: StoredRows,
    width: int,
    memory: WeightMemory,
) -> NDArray[np.uint8]:
    num_panels = -(-part.num_rows // _PANEL)
    buffer = memory.take(num_panels * _PANEL * _row_bytes(library, form, width))
    order = None if part.order is None else np.ascontiguousarray(part.order, np.int32)
    stored = part.read()
    library.functions.quire_pack(
        workspace,
        form,
        encoding,
        stored.ctypes.data,
        stored.strides[0],
        None if order is None else order.ctypes.data,
        part.num_rows,
        width,
        buffer.ctypes.data,
    )
    return buffer


def _as_float32(library: NativeLibrary, workspace: int, part: StoredRows, width: int) -> StoredRows:
    """The rows' values: packed as they are stored, then unpacked."""
    encoding = StoredEncoding[part.encoding]
    form = FORMAT_OF[encoding]
    packed = PackedWeight(
        (part.num_rows, width),
        [(form, part.num_rows, _pack_rows(library, workspace, form, encoding, part, width, WeightMemory()))],
    )
    words = unpack_rows(library, packed, np.arange(part.num_rows), 1.0).view(torch.uint8).numpy()
    return StoredRows(StoredEncoding.F32.name, len(words), words.shape[1], lambda: words)


def unpack_rows(library: NativeLibrary, packed: PackedWeight, rows: NDArray[np.integer[Any]], factor: float) -> Tensor:
    """[rows, in] float32, times the factor."""
    rows = np.ascontiguousarray(rows, np.int64)
    out = torch.empty(len(rows), packed.shape[1])
    library.functions.quire_embed(ctypes.byref(packed.native), rows.ctypes.data, len(rows), factor, out.data_ptr())
    return out

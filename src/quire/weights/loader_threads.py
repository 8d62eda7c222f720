"""Loads slices of tensors with several threads: disk reads, dequantization and device copies overlap.

Does not depend on the model that the tensors belong to.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import cycle
from queue import SimpleQueue
from threading import Event
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.weights.dequantize import Dequantizer
from quire.weights.tensor_reader import TensorReader, TensorSlice

_MAX_THREADS = 8
_NUM_BUFFERS = 2  # per thread: it reads into one while the device copies from the other
_CAST_AT_ONCE = 2**14  # values: with twice as many torch starts its own threads for each of ours


def load_slices(
    slices: Iterable[TensorSlice], dequantizer: Dequantizer, device: torch.device, report: Callable[[int], None]
) -> None:
    """Load all slices, in order. `report` is called on this thread with the file bytes of each loaded slice."""
    left = deque(slices)
    stopped = Event()
    progress_queue: SimpleQueue[int | None] = SimpleQueue()  # None: a thread has ended

    def work() -> None:
        try:
            with closing(TensorReader(dequantizer)) as reader, torch.inference_mode():  # the caller may be in it
                loader = _ToDevice(reader, device) if device.type == "cuda" else _ToMemory(reader)
                _load_all(loader, left, stopped, progress_queue)
        except BaseException:
            stopped.set()  # the other threads stop too
            raise
        finally:
            progress_queue.put(None)

    num_threads = max(1, min(_MAX_THREADS, os.cpu_count() or 1, len(left)))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="quire-weights") as pool:
        working = [pool.submit(work) for _ in range(num_threads)]
        try:
            for _ in working:
                while (num_bytes := progress_queue.get()) is not None:
                    report(num_bytes)
        finally:
            stopped.set()  # the caller may have been interrupted
    for each in working:
        each.result()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # frees the casts that torch caches for the streams used here


def _load_all(
    loader: "_SliceLoader", left: deque[TensorSlice], stopped: Event, progress_queue: "SimpleQueue[int | None]"
) -> None:
    while not stopped.is_set():
        try:
            tensor_slice = left.popleft()
        except IndexError:
            break
        loader.load(tensor_slice)
        progress_queue.put(tensor_slice.num_bytes)
    loader.finish()


class _SliceLoader(Protocol):
    """Loads slices on one thread."""

    def load(self, tensor_slice: TensorSlice) -> None: ...

    def finish(self) -> None:
        """Wait until every slice is at its destination."""


class _ToMemory:
    """Loads into host memory. A slice that is stored in its final dtype is read straight into place."""

    __slots__ = ("_reader",)

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader

    def load(self, tensor_slice: TensorSlice) -> None:
        flat = tensor_slice.destination.view(-1)
        if tensor_slice.dtype is flat.dtype and tensor_slice.columns is None:
            self._reader.read(tensor_slice, flat.view(torch.uint8).numpy())
            return
        if tensor_slice.dtype is None:
            values = self._reader.dequantize(tensor_slice)
        else:
            values = torch.empty(tensor_slice.num_values, dtype=tensor_slice.dtype)
            self._reader.read(tensor_slice, values.view(torch.uint8).numpy())
        values = tensor_slice.kept(values)
        for start in range(0, len(flat), _CAST_AT_ONCE):
            flat[start : start + _CAST_AT_ONCE] = values[start : start + _CAST_AT_ONCE]

    def finish(self) -> None:
        """Nothing is pending."""


class _ToDevice:
    """Loads onto a GPU through pinned memory. Values are cast, and a rank's columns chosen, on the device."""

    __slots__ = ("_buffers", "_device", "_reader", "_stream")

    def __init__(self, reader: TensorReader, device: torch.device) -> None:
        self._reader = reader
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.default_stream(device))  # earlier users of this memory have finished
        self._buffers = cycle([_PinnedBuffer() for _ in range(_NUM_BUFFERS)])

    def load(self, tensor_slice: TensorSlice) -> None:
        pinned = next(self._buffers)
        pinned.copied.synchronize()
        if tensor_slice.dtype is None:
            unpacked = self._reader.dequantize(tensor_slice)
            values = pinned.view(unpacked.nbytes).view(unpacked.dtype)
            np.copyto(values.numpy(), unpacked.numpy())
        else:
            buffer = pinned.view(tensor_slice.num_bytes)
            self._reader.read(tensor_slice, buffer.numpy())
            values = buffer.view(tensor_slice.dtype)
        flat = tensor_slice.destination.view(-1)
        with torch.cuda.stream(self._stream):
            if values.dtype is not flat.dtype or tensor_slice.columns is not None:
                values = tensor_slice.kept(values.to(self._device, non_blocking=True))
            flat.copy_(values, non_blocking=True)
            pinned.copied.record(self._stream)

    def finish(self) -> None:
        self._stream.synchronize()


class _PinnedBuffer:
    """Pinned memory for one slice. It is free again after the `copied` event."""

    __slots__ = ("_pinned", "copied")

    def __init__(self) -> None:
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def view(self, num_bytes: int) -> Tensor:
        """[bytes] uint8. Earlier contents are lost."""
        if len(self._pinned) < num_bytes:
            self._pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return self._pinned[:num_bytes]

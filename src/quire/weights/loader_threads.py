"""Brings pieces of tensors to where they stay, by several threads: while one waits for a disk, another unpacks, and the
card copies what a third has read. Knows nothing of what the pieces are of.
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

_MOST_THREADS = 8
_SLOTS = 2  # of a thread: it reads into one while the card copies from the other
_CAST_AT_ONCE = 2**14  # values: with twice as many torch takes threads of its own for each of ours


def carry(
    pieces: Iterable[TensorSlice], unpacker: Dequantizer, device: torch.device, told: Callable[[int], None]
) -> None:
    """All of them, the first ones first. `told` is called here, with the bytes of files that were brought."""
    left = deque(pieces)
    stopped = Event()
    news: SimpleQueue[int | None] = SimpleQueue()  # None: a thread has ended

    def work() -> None:
        try:
            with closing(TensorReader(unpacker)) as reader, torch.inference_mode():  # as whoever asks may be in
                hand = _ToDevice(reader, device) if device.type == "cuda" else _ToMemory(reader)
                _bring_all(hand, left, stopped, news)
        except BaseException:
            stopped.set()  # for the others too
            raise
        finally:
            news.put(None)

    num_threads = max(1, min(_MOST_THREADS, os.cpu_count() or 1, len(left)))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="quire-weights") as crew:
        working = [crew.submit(work) for _ in range(num_threads)]
        try:
            for _ in working:
                while (num_bytes := news.get()) is not None:
                    told(num_bytes)
        finally:
            stopped.set()  # somebody may have had enough
    for each in working:
        each.result()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # torch keeps what was cast on the card for streams that nobody will use again


def _bring_all(
    hand: "_LoaderThread", left: deque[TensorSlice], stopped: Event, news: "SimpleQueue[int | None]"
) -> None:
    while not stopped.is_set():
        try:
            piece = left.popleft()
        except IndexError:
            break
        hand.bring(piece)
        news.put(piece.num_bytes)
    hand.finish()


class _LoaderThread(Protocol):
    """One thread's."""

    def bring(self, piece: TensorSlice) -> None: ...

    def finish(self) -> None:
        """Wait until all that was brought is there."""


class _ToMemory:
    """What is stored in the dtype that it has here is read into its place."""

    __slots__ = ("_reader",)

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader

    def bring(self, piece: TensorSlice) -> None:
        flat = piece.destination.view(-1)
        if piece.dtype is flat.dtype:
            self._reader.read(piece, flat.view(torch.uint8).numpy())
            return
        if piece.dtype is None:
            values = self._reader.unpack(piece)
        else:
            values = torch.empty(len(flat), dtype=piece.dtype)
            self._reader.read(piece, values.view(torch.uint8).numpy())
        for start in range(0, len(flat), _CAST_AT_ONCE):
            flat[start : start + _CAST_AT_ONCE] = values[start : start + _CAST_AT_ONCE]

    def finish(self) -> None:
        """It is."""


class _ToDevice:
    """Values change their dtype on the card."""

    __slots__ = ("_device", "_reader", "_slots", "_stream")

    def __init__(self, reader: TensorReader, device: torch.device) -> None:
        self._reader = reader
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.default_stream(device))  # whoever had this memory before is done with it
        self._slots = cycle([_Slot() for _ in range(_SLOTS)])

    def bring(self, piece: TensorSlice) -> None:
        slot = next(self._slots)
        slot.copied.synchronize()
        if piece.dtype is None:
            unpacked = self._reader.unpack(piece)
            values = slot.room(unpacked.nbytes).view(unpacked.dtype)
            np.copyto(values.numpy(), unpacked.numpy())
        else:
            room = slot.room(piece.num_bytes)
            self._reader.read(piece, room.numpy())
            values = room.view(piece.dtype)
        flat = piece.destination.view(-1)
        with torch.cuda.stream(self._stream):
            flat.copy_(values if values.dtype is flat.dtype else values.to(self._device, non_blocking=True),
                       non_blocking=True)  # fmt: skip
            slot.copied.record(self._stream)

    def finish(self) -> None:
        self._stream.synchronize()


class _Slot:
    """Room for a piece on its way: memory that the card reads by itself. It is free again when it is copied."""

    __slots__ = ("_pinned", "copied")

    def __init__(self) -> None:
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def room(self, num_bytes: int) -> Tensor:
        """[bytes] uint8. What it held is gone."""
        if len(self._pinned) < num_bytes:
            self._pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return self._pinned[:num_bytes]

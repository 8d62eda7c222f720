"""Asynchronous copies of small arrays between host and device. Does not depend on their meaning.

Copies use pinned memory: a copy from pageable memory, or a blocking one, waits for all work queued on the device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_PAD: NDArray[np.int64] = np.zeros(1, dtype=np.int64)


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on the device, of the same type. Where the device is the CPU the two share their memory."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def upload_integers(device: torch.device, *arrays: NDArray[np.integer]) -> tuple[Tensor, ...]:
    """Several 1-D arrays as int64 in a single copy. Each starts at a multiple of 16 bytes: Triton compiles a kernel
    again for unaligned pointers."""
    padded = [part for array in arrays for part in (array, _PAD[: len(array) % 2])]
    copied = upload(np.concatenate(padded, dtype=np.int64, casting="safe"), device)
    return torch.split(copied, [len(part) for part in padded])[::2]


class PinnedUpload:
    """Uploads the first lines of one buffer, again and again, while the device computes what was launched before: on a
    stream of its own, which waits only for what reads the buffer, or used its memory before."""

    __slots__ = ("_copied", "_device", "_host", "_read", "_stream")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.empty(shape, dtype=dtype, pin_memory=on_gpu)
        self._device = torch.empty(shape, dtype=dtype, device=device) if device.type != "cpu" else self._host
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None  # the last upload
        self._read = self._launched()  # what has read it, and now, what had this memory

    def __len__(self) -> int:
        return len(self._host)

    @property
    def lines(self) -> NDArray[Any]:
        """To be written, and then uploaded."""
        if self._copied is not None:
            self._copied.synchronize()  # it is over, unless the step before was given up
        lines: NDArray[Any] = self._host.numpy()
        return lines

    @contextmanager
    def uploaded(self, count: int) -> Iterator[Tensor]:
        """The first lines on the device, for what is launched within."""
        if self._stream is not None and self._read is not None:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._read)
                self._device[:count].copy_(self._host[:count], non_blocking=True)
                self._copied = self._stream.record_event()
            torch.cuda.current_stream(self._device.device).wait_event(self._copied)
        try:
            yield self._device[:count]
        finally:
            self._read = self._launched()

    def _launched(self) -> torch.cuda.Event | None:
        """All that was launched so far."""
        return None if self._stream is None else torch.cuda.current_stream(self._device.device).record_event()


class HostCopy:
    """Asynchronous device-to-host copy, ordered on the stream after earlier launches and before later ones."""

    __slots__ = ("_event", "_host")

    def __init__(self, values: Tensor | NDArray[Any]) -> None:
        """An array is on the host already."""
        self._event: torch.cuda.Event | None = None
        self._host = values
        if isinstance(values, Tensor) and values.is_cuda:
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host = pinned.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def __len__(self) -> int:
        return len(self._host)

    @property
    def ready(self) -> bool:
        """Whether `wait` would not wait."""
        return self._event is None or self._event.query()  # type: ignore[no-untyped-call]

    def wait(self) -> NDArray[Any]:
        """As numpy, of the tensor's type."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy() if isinstance(self._host, Tensor) else self._host

"""Small arrays between host and device without waiting: up before a step, down behind it. Knows not what they mean.

A copy from ordinary memory, or one that is asked to be complete, would wait for everything the device has still to do.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SPACE: NDArray[np.int64] = np.zeros(1, dtype=np.int64)


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on the device, of the same type. Where the device is the CPU the two share their memory."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def upload_integers(device: torch.device, *arrays: NDArray[np.integer]) -> tuple[Tensor, ...]:
    """Several of one dimension, as int64, in a single copy. Each begins at a multiple of 16 bytes: kernels are compiled
    for that, and a second time for what does not."""
    spaced = [part for array in arrays for part in (array, _SPACE[: len(array) % 2])]
    sent = upload(np.concatenate(spaced, dtype=np.int64, casting="safe"), device)
    return torch.split(sent, [len(part) for part in spaced])[::2]


class HostCopy:
    """A tensor on its way to the host, behind all that was launched before it, ahead of all that is launched later."""

    __slots__ = ("_event", "_host")

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def __len__(self) -> int:
        return len(self._host)

    def wait(self) -> NDArray[Any]:
        """As numpy, of the tensor's type."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()

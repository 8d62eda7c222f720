"""Marks in a device's stream of work, and the seconds between them by the device's own clock.

Marks go into the current stream: a runner that works in another one is not seen by them.
"""

from typing import Protocol

import torch


class Mark(Protocol):
    """A place in the stream."""

    def passed(self) -> bool:
        """Whether the device has come past it."""
        ...

    def seconds_since(self, earlier: "Mark") -> float:
        """Only of marks that were passed."""
        ...


class DeviceClock(Protocol):
    def mark(self) -> Mark: ...


class CudaMark:
    """A CUDA event."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def passed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark), earlier
        return float(earlier._event.elapsed_time(self._event)) / 1000


class CudaClock:
    """The GPU's own clock."""

    def mark(self) -> CudaMark:
        return CudaMark()


def device_clock(device: str) -> DeviceClock | None:
    """None on a CPU: it computes a step in the caller's own time, and there is nothing to overlap with."""
    return CudaClock() if device == "cuda" else None

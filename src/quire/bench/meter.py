"""CPU time and, where the processor lets us count them, instructions of this thread. Linux counts; others do not."""

import ctypes
import os
import platform
import struct
import time

_SYSCALLS = {"x86_64": 298, "aarch64": 241}  # perf_event_open
_ATTRIBUTE_BYTES = 128
_INSTRUCTIONS = 1  # PERF_COUNT_HW_INSTRUCTIONS, of the hardware's own events
_USER_ONLY = (1 << 5) | (1 << 6)  # neither the kernel nor the hypervisor


class Meter:
    """Adds up what lies between `start` and `stop`."""

    __slots__ = ("_counter", "_started_instructions", "_started_ns", "instructions", "ns")

    def __init__(self) -> None:
        self._counter = _open_counter()
        self._started_ns = 0
        self._started_instructions = 0
        self.ns = 0
        self.instructions = 0

    @property
    def counts(self) -> bool:
        """Whether instructions are counted."""
        return self._counter is not None

    def clear(self) -> None:
        self.ns = self.instructions = 0

    def start(self) -> None:
        if self._counter is not None:
            self._started_instructions = _read(self._counter)
        self._started_ns = time.thread_time_ns()

    def stop(self) -> None:
        self.ns += time.thread_time_ns() - self._started_ns
        if self._counter is not None:
            self.instructions += _read(self._counter) - self._started_instructions

    def close(self) -> None:
        if self._counter is not None:
            os.close(self._counter)
            self._counter = None


def _open_counter() -> int | None:
    """A file that counts this thread's instructions, or None where there is no such thing or no right to it."""
    number = _SYSCALLS.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return None
    attribute = struct.pack("=IIQ", 0, _ATTRIBUTE_BYTES, _INSTRUCTIONS).ljust(40, b"\0") + struct.pack("=Q", _USER_ONLY)
    buffer = ctypes.create_string_buffer(attribute, _ATTRIBUTE_BYTES)
    counter = ctypes.CDLL(None).syscall(number, buffer, 0, -1, -1, 0)
    return counter if counter >= 0 else None


def _read(counter: int) -> int:
    return int.from_bytes(os.read(counter, 8), "little")

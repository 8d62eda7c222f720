"""The environment of a measurement: machine, versions, settings and command, so that it can be repeated.

Also a counter of CPU time and, on Linux with access to hardware counters, of instructions of this thread.
"""

import ctypes
import os
import platform
import shlex
import struct
import time
from collections.abc import Sequence as Many
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from quire.engine.build import BuiltEngine
from quire.engine.machine import cpu_features, num_cores
from quire.kernels.cpu.usable_cores import usable_cores
from quire.version import __version__

_PACKAGES = ("torch", "triton", "numpy")  # those that change figures

Facts = dict[str, object]


def environment(arguments: Many[str], device: str) -> Facts:
    """Command, machine and versions: part of every report."""
    return {
        "command": shlex.join(["quire", *arguments]),
        "machine": machine(device),
        "versions": versions(),
    }


def settings(built: BuiltEngine) -> Facts:
    """The settings of the measured engine, derived numbers included."""
    resolved = asdict(built.resolved)
    del resolved["reasons"]
    return {
        **resolved,
        "dtype": built.dtype,
        "weights": built.weights.describe(),
        "kernels": built.kernels,
        "attention": list(built.attention),
        "memory": asdict(built.memory),
    }


def machine(device: str) -> Facts:
    found: Facts = {
        "device": device,
        "cpu": _cpu_name(),
        "cpu_features": cpu_features(),
        "cores": num_cores(),
        "usable_cores": usable_cores().num_threads,  # threads, where none are given
        "load": os.getloadavg()[0],
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_bytes": properties.total_memory}
    return found


def versions() -> Facts:
    found = {name: _version(name) for name in _PACKAGES}
    return {"quire": __version__, "python": platform.python_version(), **found, "cuda": torch.version.cuda}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


_SYSCALLS = {"x86_64": 298, "aarch64": 241}  # perf_event_open
_ATTRIBUTE_BYTES = 128
_INSTRUCTIONS = 1  # PERF_COUNT_HW_INSTRUCTIONS of PERF_TYPE_HARDWARE
_USER_ONLY = (1 << 5) | (1 << 6)  # exclude the kernel and the hypervisor


class InstructionCounter:
    """Sums CPU nanoseconds and instructions between `start` and `stop`."""

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
    """The descriptor of a perf event that counts this thread's instructions; None without access to it."""
    number = _SYSCALLS.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return None
    attribute = struct.pack("=IIQ", 0, _ATTRIBUTE_BYTES, _INSTRUCTIONS).ljust(40, b"\0") + struct.pack("=Q", _USER_ONLY)
    buffer = ctypes.create_string_buffer(attribute, _ATTRIBUTE_BYTES)
    counter = ctypes.CDLL(None).syscall(number, buffer, 0, -1, -1, 0)
    return counter if counter >= 0 else None


def _read(counter: int) -> int:
    return int.from_bytes(os.read(counter, 8), "little")

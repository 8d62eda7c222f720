"""The environment of a measurement: machine, versions, settings and command, so that it can be repeated."""

import os
import platform
import shlex
from collections.abc import Sequence as Many
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from quire.core.process import num_cores
from quire.engine.build import BuiltEngine
from quire.engine.machine import cpu_features
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

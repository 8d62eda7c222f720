"""`quire doctor`: the devices and packages of this machine, the choices that follow, and what is missing."""

import importlib.util
import json
import platform
import shutil
from importlib import metadata
from typing import NamedTuple

import torch
from rich.table import Table
from rich.text import Text

from quire.catalog.names import DEFAULT_MODEL
from quire.catalog.store import models_folder, present
from quire.cli.console import out, size
from quire.config import EngineConfig
from quire.engine.build_runner import DTYPES
from quire.engine.machine import cpu_features, inspect, pick_device
from quire.engine.resolved_config import resolve_dtype
from quire.kernels.attention_backends import USUAL_NEEDS
from quire.kernels.cpu.native_build import compiler
from quire.kernels.cpu.native_library import faster_variants, load_native, why_not_native
from quire.kernels.cpu.usable_cores import usable_cores
from quire.kernels.select import select_kernels
from quire.version import __version__

_MIN_CAPABILITY = (8, 0)  # the first with tensor cores for bfloat16


class Finding(NamedTuple):
    """One line: the item, its state, and advice if something is missing."""

    what: str
    found: str
    advice: str = ""


def doctor(as_json: bool) -> None:
    findings = examine()
    if as_json:
        print(json.dumps({finding.what: {"found": finding.found, "advice": finding.advice} for finding in findings}))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        mark = Text("!", "yellow") if finding.advice else Text("✓", "green")
        table.add_row(mark, finding.what, Text.assemble(finding.found, (_arrow(finding.advice), "yellow")))
    out.print(table)


def _arrow(advice: str) -> str:
    return f"  → {advice}" if advice else ""


def examine() -> list[Finding]:
    device = pick_device("auto")
    machine = inspect(device)
    dtype = resolve_dtype(EngineConfig(), machine)
    kernels = select_kernels(device.type, USUAL_NEEDS)
    cores = usable_cores()
    return [
        Finding("quire", f"{__version__} on Python {platform.python_version()}, {platform.system()}"),
        Finding("torch", str(torch.__version__)),
        _gpu(),
        Finding("device", f"{device.type}: {', '.join(cpu_features()) or 'no known instruction sets'}"),
        Finding("threads", f"{cores.num_threads} ({cores.reason}); --threads N for another number"),
        Finding("memory", f"{size(machine.free_bytes)} available"),
        Finding(
            "dtype",
            f"{dtype} for activations and weights that are not quantized "
            f"(bfloat16 is {'fast' if machine.fast_bfloat16 else 'slow'} here); quantized weights stay as their file "
            f"stores them",
        ),
        _kv_cache(kernels.kernels.kv_dtype(DTYPES[dtype]), load_native() is not None and device.type == "cpu"),
        Finding("kernels", kernels.reason),
        *([Finding("attention", " · ".join(kernels.attention))] if kernels.attention else []),
        _default_model(),
        _package("triton", "kernels for GPUs", 'pip install "quire[gpu]"'),
        _cpu_kernels(),
        _package("starlette", "quire serve", 'pip install "quire[serve]"'),
        _package("uvicorn", "quire serve", 'pip install "quire[serve]"'),
        _compiler(),
    ]


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("gpu", "none that torch can use")
    major, minor = torch.cuda.get_device_capability(0)
    name = f"{torch.cuda.get_device_name(0)} (compute capability {major}.{minor})"
    if (major, minor) < _MIN_CAPABILITY:
        return Finding("gpu", name, "its tensor cores do not multiply bfloat16: use --dtype float16 or --device cpu.")
    return Finding("gpu", name)


def _default_model() -> Finding:
    folder = models_folder()
    if present(DEFAULT_MODEL, folder):
        return Finding("default model", f"{DEFAULT_MODEL.name} in {folder}")
    return Finding("default model", "not here yet", "quire pull")


def _kv_cache(stored: torch.dtype, may_be_int8: bool) -> Finding:
    name = str(stored).removeprefix("torch.")
    other = "; --kv-cache-dtype int8 for about twice the tokens in the same memory" if may_be_int8 else ""
    return Finding("KV cache", f"{name}{other}")


def _package(name: str, purpose: str, remedy: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, f"missing ({purpose})", remedy)
    return Finding(name, f"{metadata.version(name)} ({purpose})")


def _cpu_kernels() -> Finding:
    """Which native kernels a CPU has, and which would be faster."""
    library = load_native()
    if library is None:
        advice = "" if compiler() else "install g++ or clang++: quire compiles its kernels at the next start."
        return Finding("CPU kernels", f"torch alone, slow; no native kernels: {why_not_native()}", advice)
    faster = faster_variants(library.name)
    why = f"faster ones cannot be used ({'; '.join(faster)})" if faster else "the fastest there are"
    return Finding("CPU kernels", f"native, for {library.name}: {why}")


def _compiler() -> Finding:
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found is None:
        return Finding("C compiler", "none", "Triton needs one on GPU machines: install gcc.")
    return Finding("C compiler", found)

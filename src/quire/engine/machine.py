"""Machine information from torch and the operating system: device, memory, fast dtypes."""

import os
from importlib.util import find_spec
from pathlib import Path

import torch

from quire.core.errors import ConfigError
from quire.core.process import num_cores
from quire.engine.resolved_config import MachineInfo
from quire.kernels.cpu.native_build import cpu_flags
from quire.kernels.cpu.native_library import load_native

# The instruction sets that decide how fast a CPU multiplies.
_RELEVANT_FEATURES = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve"),
)


def pick_device(wanted: str) -> torch.device:
    """`auto` is the GPU where there is one that torch can use and Triton to compile for it, else the CPU."""
    usable = torch.cuda.is_available()
    if wanted == "cuda" and not usable:
        raise ConfigError("device is cuda, but torch finds no GPU on this machine; use --device cpu.", param="device")
    fast = usable and find_spec("triton") is not None
    return torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and fast) else "cpu")


def check_gpus(num_ranks: int, num_gpus: int, visible: str | None) -> None:
    """Refuse more ranks than there are GPUs. `visible`: CUDA_VISIBLE_DEVICES."""
    if num_ranks <= num_gpus:
        return
    found = f"{num_gpus} GPU{'s' if num_gpus != 1 else ''}" + (f" (CUDA_VISIBLE_DEVICES={visible})" if visible else "")
    raise ConfigError(
        f"tensor_parallel_size is {num_ranks}, and torch finds {found}: each rank needs a GPU of its own. Use "
        f"--tensor-parallel-size {num_gpus} or less, or --device cpu.",
        param="tensor_parallel_size",
    )


def gpu_names(num_gpus: int, visible: str | None) -> list[str]:
    """What CUDA_VISIBLE_DEVICES must be for a process to see one of these GPUs, of each. `visible`: its value now."""
    names = visible.split(",") if visible else [str(number) for number in range(num_gpus)]
    return [name.strip() for name in names[:num_gpus]]


def inspect(device: torch.device) -> MachineInfo:
    """The current state: call it after the weights are loaded, to get the memory that is left."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return MachineInfo("cuda", free, fast_bfloat16=True, num_cores=num_cores(), total_bytes=total)
    fast_bfloat16 = load_native() is not None or "avx512_bf16" in cpu_features()
    return MachineInfo("cpu", available_bytes(), fast_bfloat16, num_cores())


def available_bytes() -> int:
    """Available memory, without swapping."""
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def cpu_features() -> tuple[str, ...]:
    """Relevant instruction sets of this CPU."""
    flags = cpu_flags()
    return tuple(name for name in _RELEVANT_FEATURES if name in flags)


def _lines(path: Path) -> list[str]:
    """Lines of a /proc file; empty if it does not exist."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []

"""Machine information from torch and the operating system: device, memory, fast dtypes.

And of processes that share a GPU through MPS, NVIDIA's multi-process service: its settings are variables of the
environment of each. A prefill engine lowers its own priority, so that steps that generate tokens come first; without
MPS that has no effect. A limited share of the GPU is checked: on an H200 (driver 580) matrix products were wrong, some
of them NaN, in a process with 70, 75 or 80 % of its multiprocessors.
"""

import os
from collections.abc import Mapping, MutableMapping
from importlib.util import find_spec
from itertools import product
from math import nan
from pathlib import Path

import torch

from quire.core.errors import ConfigError, shown
from quire.core.process import num_cores
from quire.engine.resolved_config import MachineInfo
from quire.kernels.cpu.native_build import cpu_flags
from quire.kernels.cpu.native_library import load_native

# The instruction sets that decide how fast a CPU multiplies.
_RELEVANT_FEATURES = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve"),
)

MPS_PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"  # 0 normal, 1 below
MPS_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_MPS_FOLDER = "CUDA_MPS_PIPE_DIRECTORY"  # of the daemon's sockets
_PRODUCT_ROWS, _PRODUCT_WIDTHS, _REPEATS = (1, 16, 64, 256, 1024, 4096), (1024, 4096), 3


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


def lower_mps_priority(environment: MutableMapping[str, str]) -> None:
    """What the environment says already stays. Before CUDA is initialized."""
    environment.setdefault(MPS_PRIORITY, "1")


def check_mps_share(environment: Mapping[str, str], device: torch.device) -> None:
    """Refuse a share of the GPU with which products are wrong. In about 0.1 s, where there is a share, or where MPS
    runs, whose daemon may have been given one."""
    share = environment.get(MPS_SHARE)
    runs = Path(environment.get(_MPS_FOLDER, "/tmp/nvidia-mps"), "control").exists()
    if device.type != "cuda" or (share is None and not runs):
        return
    wrong = wrong_products(device)
    torch.cuda.empty_cache()  # free memory is measured later
    if wrong:
        number = len(_PRODUCT_ROWS) * len(_PRODUCT_WIDTHS) * _REPEATS
        said = "not set here" if share is None else shown(share)
        raise ConfigError(
            f"{MPS_SHARE} is {said}, and with the share of the GPU that MPS leaves this process, matrix products are "
            f"wrong: {len(wrong)} of {number}, the first {wrong[0]}. Use the whole GPU, or another share, such as 50."
        )


def wrong_products(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """The shapes whose products of ones are wrong. All are as wide as the sums: powers of two, exact in any dtype."""
    wrong = []
    for rows, width in product(_PRODUCT_ROWS, _PRODUCT_WIDTHS):
        left = torch.ones((rows, width), dtype=dtype, device=device)
        right = torch.ones((width, width), dtype=dtype, device=device)
        for _ in range(_REPEATS):
            result = torch.full((rows, width), nan, dtype=dtype, device=device)
            torch.mm(left, right, out=result)
            if not torch.all(result == width).item():
                wrong.append(f"{rows} × {width} × {width}")
    return wrong


def _lines(path: Path) -> list[str]:
    """Lines of a /proc file; empty if it does not exist."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []

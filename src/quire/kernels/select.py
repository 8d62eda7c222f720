"""Chooses the kernels for a device, and says why. The only place that knows which sets exist."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels.attention_backends import (
    OWN_NAME,
    AttentionEnvironment,
    AttentionNeeds,
    choose_attention,
    find_backends,
)
from quire.kernels.cpu.kernels import CpuKernels
from quire.kernels.gpu.backends.interface import OWN, AttentionBackend, AttentionBackends
from quire.kernels.interface import Kernels, Precompiling
from quire.kernels.reference import ReferenceKernels
from quire.kernels.row_interface import RowKernels


class KernelChoice(NamedTuple):
    """A set of kernels, and the reason a person may read."""

    kernels: Kernels
    reason: str
    row_kernels: RowKernels | None = None  # None: tokens are chosen by tensor operations
    copy_blocks: Callable[[Tensor, Tensor, Tensor], None] | None = None  # None: block by block
    attention: tuple[str, ...] = ()  # reasons for who attends to what, where there is a choice
    capturable: bool = True  # whether a graph may hold a step of these kernels


def select_kernels(name: str, needs: AttentionNeeds | None = None, backend: str = "auto") -> KernelChoice:
    """By device ("cpu", "cuda") or, for tests, by name ("reference").

    `backend`: who attends on a GPU. Unless the needs of the model are known, only our own kernels do.
    """
    if name != "cuda" and backend not in ("auto", OWN_NAME):
        raise ConfigError(
            f"The attention backend {backend} needs a GPU, and the device is the CPU. Leave --attention-backend away, "
            f"or use --device cuda where there is one.",
            param="attention_backend",
        )
    if name == "cpu":
        kernels = CpuKernels()
        rows = "compiled by numba" if kernels.compiled else "by torch (install numba for faster ones)"
        products = "float32 times bfloat16 on its matrix unit" if kernels.exact else "packed bfloat16 weights"
        return KernelChoice(kernels, f"the device is the CPU: {products}, norms and decode attention {rows}")
    if name == "cuda":
        return _gpu_choice(needs, backend)
    if name == "reference":
        return KernelChoice(ReferenceKernels(), "asked for by name: slow, and right by reading")
    raise ConfigError(f'There are no kernels for "{name}": choose "cpu" or "cuda".', param="device")


def _gpu_choice(needs: AttentionNeeds | None, backend: str) -> KernelChoice:
    if find_spec("triton") is None:
        if backend not in ("auto", OWN_NAME):
            raise ConfigError(
                f'The attention backend {backend} needs Triton beside it: pip install "quire[gpu]".',
                param="attention_backend",
            )
        return KernelChoice(
            ReferenceKernels(), 'Triton is not installed (pip install "quire[gpu]"): the reference, slow'
        )
    from quire.kernels.gpu.attention.decode import most_query_heads
    from quire.kernels.gpu.copy_blocks import copy_blocks  # a CPU never waits for Triton to be loaded
    from quire.kernels.gpu.decode_inputs import decode_inputs
    from quire.kernels.gpu.kernels import GpuKernels
    from quire.kernels.gpu.sampling.finish import finish_rows
    from quire.kernels.gpu.sampling.logit_processors import count_tokens, process_logits
    from quire.kernels.gpu.sampling.logprobs import token_logprobs
    from quire.kernels.gpu.sampling.sample import sample_tokens

    backends, reasons, windows = OWN, tuple[str, ...](), tuple[int, ...]((0,))
    if needs is not None:
        most, group = most_query_heads(needs.dim, needs.dtype.itemsize), needs.heads // needs.kv_heads
        if group > most:
            raise ConfigError(
                f"Each key head of this model has {group} query heads of {needs.dim} numbers; as {needs.dtype} the GPU "
                f"holds {most} at a time. Use --dtype bfloat16 where that is narrower, or --device cpu.",
                param="device",
            )
        windows = tuple(dict.fromkeys(rule.window for rule in needs.rules))
        here = AttentionEnvironment(torch.cuda.get_device_capability(), find_backends())
        backends, reasons = select_attention(backend, needs, here, torch.device("cuda"))
    reason = "the device is a GPU: products of few rows, attention and all between by Triton, other products by torch"
    row_kernels = RowKernels(process_logits, sample_tokens, count_tokens, token_logprobs, finish_rows, decode_inputs)
    return KernelChoice(GpuKernels(backends, windows), reason, row_kernels, copy_blocks, reasons, backends.capturable)


def precompiling_for(device: str) -> Precompiling | None:
    """For the kernels of this device ("cpu", "cuda"); None: there is nothing to compile."""
    if device != "cuda" or find_spec("triton") is None:
        return None
    from quire.kernels.gpu.precompile import compile_first, compiling_launched

    return Precompiling(compile_first, compiling_launched)


def select_attention(
    wanted: str, needs: AttentionNeeds, here: AttentionEnvironment, device: torch.device
) -> tuple[AttentionBackends, tuple[str, ...]]:
    """Choose, try what was chosen, and choose again without what failed. Refuses only what was asked for by name."""
    from quire.kernels.gpu.backends.self_test import trial_fault

    loaded: dict[str, AttentionBackend] = {}
    good: set[tuple[str, str]] = set()
    while True:
        choice = choose_attention(wanted, needs, here)
        untried = [(part, name) for part, name in choice.others if (part, name) not in good]
        if not untried:
            return AttentionBackends(
                **{part: loaded.get(name) for part, name in choice.by_part.items()}
            ), choice.reasons
        part, name = untried[0]
        fault = trial_fault(partial(_loaded, name, device, loaded), part, needs, device)
        if fault:
            here = here.after_trial(name, fault)
        else:
            good.add((part, name))


def _loaded(name: str, device: torch.device, loaded: dict[str, AttentionBackend]) -> AttentionBackend:
    if name not in loaded:
        loaded[name] = _load(name, device)
    return loaded[name]


def _load(name: str, device: torch.device) -> AttentionBackend:
    """A library is imported here, and only when it was chosen."""
    if name == "torch":
        from quire.kernels.gpu.backends.torch_varlen import TorchVarlen

        return TorchVarlen()
    if name == "fa3":
        from quire.kernels.gpu.backends.fa3 import Fa3

        return Fa3.load()
    assert name == "flashinfer", name
    from quire.kernels.gpu.backends.flashinfer import FlashInfer

    return FlashInfer.load(device)

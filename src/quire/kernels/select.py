"""Selects the kernels for a device, with reasons. The only list of kernel sets."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels.attention_backends import (
    OWN_NAME,
    AttentionNeeds,
    AttentionPlatform,
    choose_attention,
    find_backends,
)
from quire.kernels.cpu.native_kernels import MAX_HEAD_DIM, NativeKernels
from quire.kernels.cpu.native_library import STORED_ENCODINGS, load_native, why_not_native
from quire.kernels.cpu.torch_kernels import TorchCpuKernels
from quire.kernels.cpu.usable_cores import UsableCores, usable_cores
from quire.kernels.draft_interface import DraftKernels
from quire.kernels.gpu.backends.interface import OWN, AttentionBackend, AttentionBackends
from quire.kernels.interface import Kernels, Precompiling
from quire.kernels.reference import ReferenceKernels
from quire.kernels.row_interface import DrawTokens, RowKernels


class KernelChoice(NamedTuple):
    """A set of kernels, with readable reasons."""

    kernels: Kernels
    reason: str
    row_kernels: RowKernels | None = None  # None: sampling by tensor operations
    draft_kernels: DraftKernels | None = None  # None: drafts are not verified on the device
    draw_tokens: DrawTokens | None = None  # for sampling by tensor operations
    copy_blocks: Callable[[Tensor, Tensor, Tensor, Tensor], None] | None = None  # None: block by block
    attention: tuple[str, ...] = ()  # reasons for the attention backends, on a GPU
    capturable: bool = True  # whether a step can be captured as a CUDA graph
    stored_encodings: frozenset[str] = frozenset()  # of weights that the kernels read as a file stores them


def select_kernels(
    name: str,
    needs: AttentionNeeds | None = None,
    backend: str = "auto",
    quantization: str | None = None,
    threads: int | None = None,
    *,
    batch_invariant: bool = False,
    num_ranks: int = 1,
    kv_dtype: torch.dtype | None = None,
) -> KernelChoice:
    """By device ("cpu", "cuda") or, for tests, by name ("reference").

    `backend`: attention backend on a GPU. Without the model's needs only quire's own kernels are used.
    `quantization`: "int8" or "int4", of weights that are stored wider. `threads`: on a CPU, of all ranks together;
    None: see `usable_cores`. `batch_invariant`: a row has the same bits in every batch. The native CPU kernels do that,
    unless they use a matrix unit, which is for models of 16 bits. `kv_dtype`: of the KV store; None: as the kernels
    choose for the model's dtype.
    """
    if name != "cuda" and backend not in ("auto", OWN_NAME):
        raise ConfigError(
            f"The attention backend {backend} needs a GPU, and the device is the CPU. Omit --attention-backend, "
            f"or use --device cuda where there is one.",
            param="attention_backend",
        )
    if name == "cpu":
        cores = usable_cores() if threads is None else UsableCores(threads, "--threads")
        cores = cores if num_ranks == 1 else cores.shared_by(num_ranks)
        return _cpu_choice(quantization, needs, cores, batch_invariant, kv_dtype)
    if quantization is not None:
        raise ConfigError(
            f"quantization={quantization} is for CPUs; on a GPU weights are bfloat16 or float16. Omit --quantization, "
            f"or use --device cpu.",
            param="quantization",
        )
    if name == "reference":
        return KernelChoice(ReferenceKernels(kv_dtype), "requested by name: the slow reference")
    if kv_dtype is not None and (needs is None or kv_dtype is not needs.dtype):
        raise ConfigError(
            f"kv_cache_dtype={_short(kv_dtype)} is for CPUs; on a GPU the KV cache has the format of the weights. Omit "
            f"--kv-cache-dtype, or use --device cpu.",
            param="kv_cache_dtype",
        )
    if name == "cuda":
        return _gpu_choice(needs, backend, batch_invariant)
    raise ConfigError(f'There are no kernels for "{name}": choose "cpu" or "cuda".', param="device")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cpu_choice(
    quantization: str | None,
    needs: AttentionNeeds | None,
    cores: UsableCores,
    batch_invariant: bool,
    kv_dtype: torch.dtype | None,
) -> KernelChoice:
    library = load_native()
    why_not = why_not_native() if library is None else ""
    if needs is not None and needs.dim > MAX_HEAD_DIM:
        library, why_not = None, f"heads of {needs.dim} numbers are wider than {MAX_HEAD_DIM}"
    if library is not None:
        sixteen_bits = needs is not None and needs.dtype is not torch.float32
        kernels = NativeKernels(
            library, cores.num_threads, quantization, kv_dtype, matrix_unit=sixteen_bits and not batch_invariant
        )
        # What is left to torch is small, and its own threads would spin while they wait.
        torch.set_num_threads(1)
        unit = ", many tokens on its matrix unit" if kernels.uses_matrix_unit else ""
        reason = f"the device is the CPU: native kernels for {library.name}{unit}, {_describe_threads(cores)}"
        return KernelChoice(kernels, reason, draw_tokens=kernels.draw_tokens, stored_encodings=STORED_ENCODINGS)
    if quantization is not None:
        raise ConfigError(
            f"quantization={quantization} needs the native CPU kernels, which cannot be used here: {why_not}. "
            f"Omit --quantization.",
            param="quantization",
        )
    if kv_dtype is not None and (needs is None or kv_dtype is not needs.dtype):
        raise ConfigError(
            f"kv_cache_dtype={_short(kv_dtype)} needs the native CPU kernels, which cannot be used here: {why_not}. "
            f"Omit --kv-cache-dtype.",
            param="kv_cache_dtype",
        )
    if batch_invariant:
        raise ConfigError(
            f"batch_invariant needs the native CPU kernels, which cannot be used here: {why_not}. "
            f"Omit --batch-invariant.",
            param="batch_invariant",
        )
    torch.set_num_threads(cores.num_threads)
    return KernelChoice(
        TorchCpuKernels(),
        f"the device is the CPU: torch alone, slow, {_describe_threads(cores)}; no native kernels: {why_not}",
    )


def _describe_threads(cores: UsableCores) -> str:
    return f"{cores.num_threads} thread{'s' if cores.num_threads > 1 else ''} ({cores.reason})"


def _gpu_choice(needs: AttentionNeeds | None, backend: str, batch_invariant: bool) -> KernelChoice:
    if batch_invariant:
        _check_batch_invariant(backend)
        backend = OWN_NAME
    if find_spec("triton") is None:
        if backend not in ("auto", OWN_NAME):
            raise ConfigError(
                f'The attention backend {backend} needs Triton beside it: pip install "quire[gpu]".',
                param="attention_backend",
            )
        return KernelChoice(
            ReferenceKernels(), 'Triton is not installed (pip install "quire[gpu]"): the reference, slow'
        )
    from quire.kernels.gpu.attention.decode import max_query_heads
    from quire.kernels.gpu.batch_invariant import BatchInvariantKernels
    from quire.kernels.gpu.copy_blocks import copy_blocks  # imported here: a CPU process does not load Triton
    from quire.kernels.gpu.decode_inputs import decode_inputs
    from quire.kernels.gpu.drafts import GPU_DRAFT_KERNELS
    from quire.kernels.gpu.kernels import GpuKernels
    from quire.kernels.gpu.sampling.finish import finish_rows
    from quire.kernels.gpu.sampling.logit_processors import count_tokens, mask_logits, process_logits
    from quire.kernels.gpu.sampling.logprobs import token_logprobs
    from quire.kernels.gpu.sampling.sample import sample_tokens

    backends, reasons, windows = OWN, tuple[str, ...](), tuple[int, ...]((0,))
    if needs is not None:
        most, group = max_query_heads(needs.dim, needs.dtype.itemsize), needs.heads // needs.kv_heads
        if group > most:
            raise ConfigError(
                f"Each key head of this model has {group} query heads of {needs.dim} numbers; as {needs.dtype} the GPU "
                f"holds {most} at a time. Use --dtype bfloat16 where that is narrower, or --device cpu.",
                param="device",
            )
        windows = tuple(dict.fromkeys(rule.window for rule in needs.rules))
        here = AttentionPlatform(torch.cuda.get_device_capability(), find_backends())
        backends, reasons = select_attention(backend, needs, here, torch.device("cuda"))
    gemms = "small-batch GEMMs, attention and elementwise kernels by Triton, other GEMMs by torch"
    if batch_invariant:
        gemms = "all kernels by Triton, with the same bits in every batch (--batch-invariant)"
        reasons = ("batch-invariant: one attention kernel of quire for decodes and chunks",) if reasons else ()
    row_kernels = RowKernels(
        process_logits, mask_logits, sample_tokens, count_tokens, token_logprobs, finish_rows, decode_inputs
    )
    return KernelChoice(
        BatchInvariantKernels(OWN, windows) if batch_invariant else GpuKernels(backends, windows),
        f"the device is a GPU: {gemms}",
        row_kernels,
        GPU_DRAFT_KERNELS,
        copy_blocks=copy_blocks,
        attention=reasons,
        capturable=backends.capturable,
    )


def _check_batch_invariant(backend: str) -> None:
    if backend not in ("auto", OWN_NAME):
        raise ConfigError(
            f"--batch-invariant uses quire's own attention kernels, and --attention-backend asks for {backend}. "
            f"Omit one of the two.",
            param="batch_invariant",
        )
    if find_spec("triton") is None:
        raise ConfigError(
            'batch_invariant needs Triton: pip install "quire[gpu]", or omit --batch-invariant.',
            param="batch_invariant",
        )


def precompiling_for(device: str) -> Precompiling | None:
    """For the kernels of this device ("cpu", "cuda"); None: nothing to compile."""
    if device != "cuda" or find_spec("triton") is None:
        return None
    from quire.kernels.gpu.precompile import compile_first, compiling_launched

    return Precompiling(compile_first, compiling_launched)


def select_attention(
    requested: str, needs: AttentionNeeds, here: AttentionPlatform, device: torch.device
) -> tuple[AttentionBackends, tuple[str, ...]]:
    """Choose backends, self-test them, and choose again without those that fail. Refuses only one requested by name."""
    from quire.kernels.gpu.backends.self_test import self_test

    loaded: dict[str, AttentionBackend] = {}
    passed: set[tuple[str, str]] = set()
    while True:
        choice = choose_attention(requested, needs, here)
        untested = [(part, name) for part, name in choice.backends if (part, name) not in passed]
        if not untested:
            return AttentionBackends(
                **{part: loaded.get(name) for part, name in choice.by_part.items()}
            ), choice.reasons
        part, name = untested[0]
        fault = self_test(partial(_loaded, name, device, loaded), part, needs, device)
        if fault:
            here = here.after_self_test(name, fault)
        else:
            passed.add((part, name))


def _loaded(name: str, device: torch.device, loaded: dict[str, AttentionBackend]) -> AttentionBackend:
    if name not in loaded:
        loaded[name] = _load(name, device)
    return loaded[name]


def _load(name: str, device: torch.device) -> AttentionBackend:
    """The only place that imports a library, after it was chosen."""
    if name == "torch":
        from quire.kernels.gpu.backends.torch_varlen import TorchVarlen

        return TorchVarlen()
    if name == "fa3":
        from quire.kernels.gpu.backends.fa3 import Fa3

        return Fa3.load()
    assert name == "flashinfer", name
    from quire.kernels.gpu.backends.flashinfer import FlashInfer

    return FlashInfer.load(device)

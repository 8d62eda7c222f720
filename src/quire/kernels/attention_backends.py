"""Selects the attention backend of each part of a step on a GPU: a pure function of request, model and machine.

Measured figures decide; a library without figures is used only when requested by name. Also finds which libraries are
installed. Does not depend on kernels and imports no library.
"""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import exp, log
from pathlib import Path
from typing import NamedTuple

import torch

from quire.core.errors import ConfigError
from quire.kernels.interface import AttentionRule

FA3_WHEEL = "flash_attn_interface"


class FoundBackend(NamedTuple):
    """A library that is installed, or what is missing."""

    what: str  # with its version, where it is known
    missing: str = ""  # what must be installed; empty if it is
    fault: str = ""  # error of its self-test


def find_backends() -> dict[str, FoundBackend]:
    torch_varlen = FoundBackend(f"torch {torch.__version__}")  # every supported torch has varlen attention
    return {"torch": torch_varlen, "fa3": _fa3(), "flashinfer": _flashinfer()}


def has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # a module without a spec is not a library
        return False


def vllm_fa3_library() -> Path | None:
    """Path of vLLM's build of FlashAttention-3, found without importing vLLM."""
    spec = find_spec("vllm") if has_module("vllm") else None
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        libraries = sorted(Path(folder, "vllm_flash_attn").glob("_vllm_fa3_C*.so"))
        if libraries:
            return libraries[0]
    return None


def _fa3() -> FoundBackend:
    if has_module(FA3_WHEEL):
        return FoundBackend(_named("flash-attn-3", FA3_WHEEL))
    if vllm_fa3_library() is not None:
        return FoundBackend(f"FlashAttention-3 of {_named('vllm', 'vLLM')}")
    return FoundBackend(
        "FlashAttention-3", f"the package {FA3_WHEEL} (FlashAttention-3's own wheel), or vLLM with its build of it"
    )


def _flashinfer() -> FoundBackend:
    if has_module("flashinfer"):
        return FoundBackend(_named("flashinfer-python", "flashinfer"))
    return FoundBackend("FlashInfer", "the package flashinfer (pip install flashinfer-python)")


def _named(distribution: str, name: str) -> str:
    try:
        return f"{name} {version(distribution)}"
    except PackageNotFoundError:
        return name


OWN_NAME = "quire"
PARTS = {"decodes": "decodes", "chunks": "chunks", "long_chunk": "one long chunk"}


class AttentionNeeds(NamedTuple):
    """Attention shapes of a model."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    block_size: int
    rules: tuple[AttentionRule, ...]  # of its layers


USUAL_NEEDS = AttentionNeeds(32, 8, 128, torch.bfloat16, 16, (AttentionRule(128**-0.5),))  # where no model is given


class AttentionPlatform(NamedTuple):
    """GPU and installed libraries."""

    capability: tuple[int, int]
    found: Mapping[str, FoundBackend]

    def after_self_test(self, name: str, fault: str) -> "AttentionPlatform":
        return self._replace(found={**self.found, name: self.found[name]._replace(fault=fault)})


class AttentionChoice(NamedTuple):
    """The backend of each part of a step's attention, with readable reasons."""

    decodes: str
    chunks: str
    long_chunk: str
    reasons: tuple[str, ...]

    @property
    def by_part(self) -> dict[str, str]:
        return {part: getattr(self, part) for part in PARTS}

    @property
    def backends(self) -> list[tuple[str, str]]:
        """(part, name) of each part that another library computes."""
        return [(part, name) for part, name in self.by_part.items() if name != OWN_NAME]


class _BackendLimits(NamedTuple):
    """What a library supports."""

    parts: tuple[str, ...]
    oldest: tuple[int, int]  # compute capability
    newest: tuple[int, int] | None  # first unsupported; None: no upper bound
    softcap: bool
    note: str = ""


_LIMITS = {
    "torch": _BackendLimits(("long_chunk",), (8, 0), None, softcap=False, note="it does not support this block size"),
    "fa3": _BackendLimits(("decodes", "chunks", "long_chunk"), (9, 0), (10, 0), softcap=True),
    "flashinfer": _BackendLimits(
        ("decodes",), (8, 0), None, softcap=True,
        note="it plans with lengths on the host, so steps are not CUDA graphs but launched kernel by kernel",
    ),
}  # fmt: skip
_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_DIM, _DIM_STEP = 256, 8


class _BackendFigures(NamedTuple):
    """µs of one launch."""

    shapes: tuple[str, ...]
    microseconds: Mapping[str, tuple[float, ...]]  # by name, for each shape


# One H200, 32 query and 8 key heads of 128, bfloat16, blocks of 16: docs/performance/ledger, section 11, and 18 for one
# long chunk by quire and FA3.
# A library needs a figure for every shape of a part; without figures it is used only when requested by name.
_MEASURED = {
    "decodes": _BackendFigures(
        ("64 × 1,024", "256 × 1,024"),
        {"quire": (78.7, 254.3), "fa3": (80.1, 277.2), "flashinfer": (108.1, 371.5)},
    ),
    "chunks": _BackendFigures((), {}),
    "long_chunk": _BackendFigures(
        ("2,048 tokens", "8,192 tokens"),
        {"quire": (78.4, 905.9), "fa3": (76.9, 951.0), "torch": (186.4, 1778.8)},
    ),
}


def choose_attention(requested: str, needs: AttentionNeeds, here: AttentionPlatform) -> AttentionChoice:
    """`requested`: auto, quire, or a library. Only a library that was requested by name can be refused."""
    if requested == OWN_NAME:
        return AttentionChoice(OWN_NAME, OWN_NAME, OWN_NAME, ("all by quire: requested by name",))
    if requested != "auto":
        return _by_name(requested, needs, here)
    refusals = {name: _refusal(name, needs, here) for name in _LIMITS}
    fit = [name for name, refusal in refusals.items() if not refusal]
    best = {part: _fastest(part, fit) for part in PARTS}
    reasons = _by_figures(best, fit, here)
    reasons += [f"{name} not: {refusal or _why_unused(name)}" for name, refusal in refusals.items()
                if name not in best.values()]  # fmt: skip
    return AttentionChoice(**best, reasons=tuple(reasons))


def _by_name(requested: str, needs: AttentionNeeds, here: AttentionPlatform) -> AttentionChoice:
    refusal = _refusal(requested, needs, here)
    if refusal:
        raise ConfigError(
            f"The attention backend {requested} cannot be used: {refusal}. Use --attention-backend auto or "
            f"--attention-backend quire.",
            param="attention_backend",
        )
    limits = _LIMITS[requested]
    names = {part: requested if part in limits.parts else OWN_NAME for part in PARTS}
    done = " and ".join(PARTS[part] for part in limits.parts)
    reasons = [f"{done} by {here.found[requested].what}: requested by name"]
    if len(limits.parts) < len(PARTS):
        reasons.append("the rest by quire")
    if limits.note:
        reasons.append(limits.note)
    return AttentionChoice(**names, reasons=tuple(reasons))


def _refusal(name: str, needs: AttentionNeeds, here: AttentionPlatform) -> str:
    """Why a library cannot serve this model on this GPU; empty if it can."""
    limits, found = _LIMITS[name], here.found[name]
    if found.missing:
        return f"it needs {found.missing}"
    if found.fault:
        return f"its self-test failed ({found.fault})"
    too_new = limits.newest is not None and here.capability >= limits.newest
    if too_new or here.capability < limits.oldest:
        (major, minor), (oldest, oldest_minor) = here.capability, limits.oldest
        span = f"{oldest}.{oldest_minor} and later" if limits.newest is None else f"{oldest}.x"
        return f"it is not for GPUs of compute capability {major}.{minor}, but for {span}"
    if needs.dtype not in _DTYPES:
        return f"it computes in bfloat16 and float16, not in {str(needs.dtype).removeprefix('torch.')}"
    if needs.dim > _LARGEST_DIM or needs.dim % _DIM_STEP:
        return f"its heads have up to {_LARGEST_DIM} dims in steps of {_DIM_STEP}, and the model's {needs.dim}"
    if not limits.softcap and any(rule.softcap for rule in needs.rules):
        return "it has no soft cap, and the model has one"
    return ""


def _fastest(part: str, fit: list[str]) -> str:
    figures = _MEASURED[part].microseconds
    return min([OWN_NAME, *(name for name in fit if name in figures)], key=lambda name: _relative_time(part, name))


def _relative_time(part: str, name: str) -> float:
    """Geometric mean over all shapes of its time relative to quire's kernels."""
    if name == OWN_NAME:
        return 1.0
    figures = _MEASURED[part].microseconds
    ratios = [log(theirs / ours) for theirs, ours in zip(figures[name], figures[OWN_NAME], strict=True)]
    return exp(sum(ratios) / len(ratios))


def _by_figures(best: Mapping[str, str], fit: list[str], here: AttentionPlatform) -> list[str]:
    """One reason for each part with another library to compare with, one for all the rest."""
    reasons, alone = [], []
    for part, name in best.items():
        shapes, figures = _MEASURED[part]
        compared_with = [library for library in (OWN_NAME, *fit) if library in figures and library != name]
        if compared_with:
            winner = name if name == OWN_NAME else here.found[name].what
            compared = ", ".join(f"{library} {figures[library][-1]:,.0f}" for library in compared_with)
            reasons.append(
                f"{PARTS[part]} by {winner}: {figures[name][-1]:,.0f} µs at {shapes[-1]} on an H200, {compared}"
            )
        else:
            alone.append(PARTS[part])
    if alone:
        reasons.append(f"{'all' if len(alone) == len(PARTS) else ' and '.join(alone)} by {OWN_NAME}")
    return reasons


def _why_unused(name: str) -> str:
    measured = [part for part in PARTS if name in _MEASURED[part].microseconds]
    return "slower where it was measured" if measured else "not measured; request it by name"

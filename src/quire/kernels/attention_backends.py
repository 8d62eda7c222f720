"""Who attends to what on a GPU, and why: from what the user said, the model's needs, and what is found here.

A pure function over facts. Figures decide, and only figures that were measured; knows no kernel and imports no library.

Which other libraries for attention are installed here, or what is missing. Imports none of them.
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
    """A library that is here, or what is missing."""

    what: str  # with its version, where that can be told
    missing: str = ""  # what would have to be there; empty if it is
    fault: str = ""  # what went wrong when it was tried


def find_backends() -> dict[str, FoundBackend]:
    return {"torch": _torch(), "fa3": _fa3(), "flashinfer": _flashinfer()}


def has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # a stand-in without a spec is no library
        return False


def vllm_fa3_library() -> Path | None:
    """Where vLLM keeps its build of FlashAttention-3, without running a line of vLLM."""
    spec = find_spec("vllm") if has_module("vllm") else None
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        libraries = sorted(Path(folder, "vllm_flash_attn").glob("_vllm_fa3_C*.so"))
        if libraries:
            return libraries[0]
    return None


def _torch() -> FoundBackend:
    return FoundBackend(f"torch {torch.__version__}")  # every torch that we run with has what we ask of it


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
    """What a model asks of attention."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    block_size: int
    rules: tuple[AttentionRule, ...]  # those that its layers have


USUAL_NEEDS = AttentionNeeds(32, 8, 128, torch.bfloat16, 16, (AttentionRule(128**-0.5),))  # where no model is named


class AttentionEnvironment(NamedTuple):
    """What the machine offers."""

    capability: tuple[int, int]
    found: Mapping[str, FoundBackend]

    def after_trial(self, name: str, fault: str) -> "AttentionEnvironment":
        return self._replace(found={**self.found, name: self.found[name]._replace(fault=fault)})


class AttentionChoice(NamedTuple):
    """The name of who does each part of a step's attention, and reasons that a person may read."""

    decodes: str
    chunks: str
    long_chunk: str
    reasons: tuple[str, ...]

    @property
    def by_part(self) -> dict[str, str]:
        return {part: getattr(self, part) for part in PARTS}

    @property
    def others(self) -> list[tuple[str, str]]:
        """Part and name, where it is not we who do it."""
        return [(part, name) for part, name in self.by_part.items() if name != OWN_NAME]


class _BackendLimits(NamedTuple):
    """What a library can do."""

    parts: tuple[str, ...]
    oldest: tuple[int, int]  # compute capability
    newest: tuple[int, int] | None  # the first that is too new; None: none is
    softcap: bool
    note: str = ""


_ABILITIES = {
    "torch": _BackendLimits(("long_chunk",), (8, 0), None, softcap=False, note="it has no pages of our size"),
    "fa3": _BackendLimits(("decodes", "chunks", "long_chunk"), (9, 0), (10, 0), softcap=True),
    "flashinfer": _BackendLimits(
        ("decodes",), (8, 0), None, softcap=True,
        note="it plans with lengths on the host, so steps are not recorded but built launch by launch",
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
# A library enters with a figure for every shape of a part; without figures nobody is chosen but by name.
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


def choose_attention(wanted: str, needs: AttentionNeeds, here: AttentionEnvironment) -> AttentionChoice:
    """`wanted`: auto, quire, or the name of a library. Only a library that was asked for by name can be refused."""
    if wanted == OWN_NAME:
        return AttentionChoice(OWN_NAME, OWN_NAME, OWN_NAME, ("all by quire: asked for by name",))
    if wanted != "auto":
        return _by_name(wanted, needs, here)
    refusals = {name: _refusal(name, needs, here) for name in _ABILITIES}
    fit = [name for name, refusal in refusals.items() if not refusal]
    best = {part: _fastest(part, fit) for part in PARTS}
    reasons = _by_figures(best, fit, here)
    reasons += [f"{name} not: {refusal or _why_idle(name, best)}" for name, refusal in refusals.items()
                if name not in best.values()]  # fmt: skip
    return AttentionChoice(**best, reasons=tuple(reasons))


def _by_name(wanted: str, needs: AttentionNeeds, here: AttentionEnvironment) -> AttentionChoice:
    refusal = _refusal(wanted, needs, here)
    if refusal:
        raise ConfigError(
            f"The attention backend {wanted} cannot be used: {refusal}. Use --attention-backend auto or "
            f"--attention-backend quire.",
            param="attention_backend",
        )
    ability = _ABILITIES[wanted]
    names = {part: wanted if part in ability.parts else OWN_NAME for part in PARTS}
    done = " and ".join(PARTS[part] for part in ability.parts)
    reasons = [f"{done} by {here.found[wanted].what}: asked for by name"]
    if len(ability.parts) < len(PARTS):
        reasons.append("the rest by quire")
    if ability.note:
        reasons.append(ability.note)
    return AttentionChoice(**names, reasons=tuple(reasons))


def _refusal(name: str, needs: AttentionNeeds, here: AttentionEnvironment) -> str:
    """Why a library cannot serve this model here; empty if it can."""
    ability, found = _ABILITIES[name], here.found[name]
    if found.missing:
        return f"it needs {found.missing}"
    if found.fault:
        return f"it was tried and failed ({found.fault})"
    too_new = ability.newest is not None and here.capability >= ability.newest
    if too_new or here.capability < ability.oldest:
        major, minor = here.capability
        return f"it is not for GPUs of compute capability {major}.{minor}, but for {_span(ability)}"
    if needs.dtype not in _DTYPES:
        return f"it computes in bfloat16 and float16, not in {str(needs.dtype).removeprefix('torch.')}"
    if needs.dim > _LARGEST_DIM or needs.dim % _DIM_STEP:
        return f"its heads have up to {_LARGEST_DIM} dims in steps of {_DIM_STEP}, and the model's {needs.dim}"
    if not ability.softcap and any(rule.softcap for rule in needs.rules):
        return "it has no soft cap, and the model has one"
    return ""


def _span(ability: _BackendLimits) -> str:
    major, minor = ability.oldest
    return f"{major}.{minor} and later" if ability.newest is None else f"{major}.x"


def _fastest(part: str, fit: list[str]) -> str:
    figures = _MEASURED[part].microseconds
    return min([OWN_NAME, *(name for name in fit if name in figures)], key=lambda name: _share_of_own(part, name))


def _share_of_own(part: str, name: str) -> float:
    """The geometric mean over all shapes of its time by that of our own kernels."""
    if name == OWN_NAME:
        return 1.0
    figures = _MEASURED[part].microseconds
    ratios = [log(theirs / ours) for theirs, ours in zip(figures[name], figures[OWN_NAME], strict=True)]
    return exp(sum(ratios) / len(ratios))


def _by_figures(best: Mapping[str, str], fit: list[str], here: AttentionEnvironment) -> list[str]:
    """A reason for each part in which there was somebody to compare with; the others in one."""
    reasons, alone = [], []
    for part, name in best.items():
        shapes, figures = _MEASURED[part]
        rivals = [rival for rival in (OWN_NAME, *fit) if rival in figures and rival != name]
        if rivals:
            who = name if name == OWN_NAME else here.found[name].what
            told = ", ".join(f"{rival} {figures[rival][-1]:,.0f}" for rival in rivals)
            reasons.append(f"{PARTS[part]} by {who}: {figures[name][-1]:,.0f} µs at {shapes[-1]} on an H200, {told}")
        else:
            alone.append(PARTS[part])
    if alone:
        reasons.append(f"{'all' if len(alone) == len(PARTS) else ' and '.join(alone)} by {OWN_NAME}")
    return reasons


def _why_idle(name: str, best: Mapping[str, str]) -> str:
    measured = [part for part in PARTS if name in _MEASURED[part].microseconds]
    return "slower where it was measured" if measured else "nothing was measured with it here; ask for it by name"

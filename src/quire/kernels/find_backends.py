"""Which other libraries for attention are installed here, or what is missing. Imports none of them."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

FA3_WHEEL = "flash_attn_interface"


class Found(NamedTuple):
    """A library that is here, or what is missing."""

    what: str  # with its version, where that can be told
    missing: str = ""  # what would have to be there; empty if it is
    fault: str = ""  # what went wrong when it was tried


def find_backends() -> dict[str, Found]:
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


def _torch() -> Found:
    return Found(f"torch {torch.__version__}")  # every torch that we run with has what we ask of it


def _fa3() -> Found:
    if has_module(FA3_WHEEL):
        return Found(_named("flash-attn-3", FA3_WHEEL))
    if vllm_fa3_library() is not None:
        return Found(f"FlashAttention-3 of {_named('vllm', 'vLLM')}")
    return Found(
        "FlashAttention-3", f"the package {FA3_WHEEL} (FlashAttention-3's own wheel), or vLLM with its build of it"
    )


def _flashinfer() -> Found:
    if has_module("flashinfer"):
        return Found(_named("flashinfer-python", "flashinfer"))
    return Found("FlashInfer", "the package flashinfer (pip install flashinfer-python)")


def _named(distribution: str, name: str) -> str:
    try:
        return f"{name} {version(distribution)}"
    except PackageNotFoundError:
        return name

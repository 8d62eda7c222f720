"""Kernels for CPUs divide their work among threads: here there are two to divide it among."""

import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _two_threads(request: pytest.FixtureRequest) -> None:
    """Those for GPUs use none, and two that wait for each other beside other tests take the time of both."""
    if not request.path.name.startswith("test_gpu_"):
        torch.set_num_threads(2)


@pytest.fixture(autouse=True, scope="session")
def _language_patched_once() -> Iterator[None]:
    """Triton's interpreter replaces the functions of its language at a launch and, which changes nothing more, at each
    call of a device function: a third of the time of an interpreted kernel."""
    if os.environ.get("TRITON_INTERPRET") != "1" or "triton" not in sys.modules:
        yield
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    if not hasattr(interpreter, "_patch_lang") or not hasattr(interpreter, "_LangPatchScope"):
        yield  # another Triton: its interpreter as it is
        return
    patch_language = interpreter._patch_lang

    def patch_once(function: Any) -> object:
        used = [value for value in function.__globals__.values() if value is language or value is language.core]
        if not used or any(language.core.is_builtin(each.load) for each in used):
            return patch_language(function)
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        yield

"""A module as it loads on a Hopper GPU whose Triton has no Gluon."""

import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from triton import knobs


def without_gluon(monkeypatch: pytest.MonkeyPatch, module: ModuleType, kernel: str) -> ModuleType:
    """`module` read anew; `kernel`: the module in Gluon that it tries to import."""
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    monkeypatch.delitem(sys.modules, kernel)
    spec = importlib.util.spec_from_file_location("without_gluon", str(module.__file__))
    assert spec is not None and spec.loader is not None
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    return without

"""Shared by the tests of benchmarks: the command line in this process, and a model of a few thousand weights."""

import gc
from dataclasses import replace

import pytest

from quire.core.model import ModelSpec, RopeSpec
from quire.engine import build_runner
from quire.formats.presets import SHAPES
from quire.kernels.select import KernelChoice, select_kernels
from tests.cli.commands import Shell

TINY = ModelSpec(
    family="llama",
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    ffn_size=48,
    vocab_size=97,
    max_positions=256,
    norm_eps=1e-5,
    rope=RopeSpec(10_000.0, 16),
    tied_embeddings=True,
)


@pytest.fixture
def quire(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """`quire` with a shape named "tiny", and "wordy" with more tokens, on the reference kernels: compiling others takes
    longer than the tests."""

    def reference(*arguments: object, **options: object) -> KernelChoice:
        return select_kernels("reference")

    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setitem(SHAPES, "wordy", replace(TINY, vocab_size=2_000))
    monkeypatch.setattr(build_runner, "select_kernels", reference)
    monkeypatch.setattr(gc, "unfreeze", lambda: None)  # after a measurement: the heap of all tests stays frozen
    return Shell(monkeypatch, capsys)

"""The attention backend is chosen by the model's needs, and the reasons are reported."""

from dataclasses import replace

import pytest
import torch

from quire.bench.environment import settings
from quire.config import EngineConfig
from quire.engine import build, build_runner
from quire.engine.startup import StartupPhase, StartupReporter
from quire.formats.presets import SHAPES
from quire.kernels.attention_backends import AttentionNeeds
from quire.kernels.interface import AttentionRule
from quire.kernels.reference import ReferenceKernels
from quire.kernels.select import KernelChoice
from tests.bench.conftest import TINY


def test_the_models_attention_needs_are_passed_and_the_reasons_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = ("decodes by quire", "one long chunk by another")
    asked: list[object] = []

    def select(*given: object, batch_invariant: bool, num_ranks: int, kv_dtype: torch.dtype | None) -> KernelChoice:
        asked.extend((*given, num_ranks, kv_dtype, batch_invariant))
        return KernelChoice(ReferenceKernels(), "for a test", attention=reasons)

    monkeypatch.setitem(SHAPES, "windowed", replace(TINY, windows=(0, 32), attention_softcap=5.0))
    monkeypatch.setattr(build_runner, "select_kernels", select)
    config = EngineConfig(
        "windowed", load_format="dummy", device="cpu", dtype="float32", block_size=8, kv_cache_memory=1 << 20,
        attention_backend="fa3", batch_invariant=True,
    )  # fmt: skip
    phases: list[StartupPhase] = []
    built = build.build(config, StartupReporter(finished=phases.append))
    rules = (AttentionRule(0.25, 0, 5.0), AttentionRule(0.25, 32, 5.0))
    assert asked[:3] == ["cpu", AttentionNeeds(2, 1, 16, torch.float32, 8, rules), "fa3"]
    assert asked[-1] is True
    assert [phase.detail for phase in phases if phase.name == "attention"] == [" · ".join(reasons)]
    assert built.attention == reasons and settings(built)["attention"] == list(reasons)

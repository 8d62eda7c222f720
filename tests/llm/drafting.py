"""Engines that draft, for tests."""

from pathlib import Path

import pytest

from quire import LLM
from quire.config import EngineConfig
from quire.core.step import Runner
from quire.engine import build_runner
from quire.engine.build import build
from quire.kernels.cpu.torch_kernels import TorchCpuKernels
from quire.kernels.draft_interface import REFERENCE_DRAFT_KERNELS
from quire.kernels.select import KernelChoice
from quire.runner.model_runner import ModelRunner
from quire.sched.speculation import DraftGovernor, SpeculationPolicy
from tests.runner.reference_row_kernels import REFERENCE_ROW_KERNELS
from tests.sched.inspection import state_of


def always(llm: LLM) -> LLM:
    """The same engine, with as many drafts as there are, whether they pay or not."""
    scheduler = llm._built.engine.scheduler
    policy = SpeculationPolicy(max_drafts=5, governed=False, tree=True)
    state_of(scheduler).governor = DraftGovernor(policy, scheduler.cost, scheduler.max_rows)
    return llm


def on_device(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> LLM:
    """An engine with the steps of a GPU, captured and in flight; on a CPU they are called again."""
    choice = KernelChoice(TorchCpuKernels(), "as on a GPU", REFERENCE_ROW_KERNELS, REFERENCE_DRAFT_KERNELS)
    monkeypatch.setattr(build_runner, "select_kernels", lambda *args, **options: choice)

    def prepare(runner: Runner) -> Runner:
        assert isinstance(runner, ModelRunner)
        while not runner.prepared:
            runner.prepare()
        return runner

    config = EngineConfig(model=str(folder), dtype="float32", max_num_seqs=4, max_num_batched_tokens=24, **settings)  # type: ignore[arg-type]
    return LLM.over(build(config, observe=prepare))

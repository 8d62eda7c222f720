"""Engines that draft, for tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.core.ids import IntArray
from quire.core.step import Runner
from quire.engine import build_runner
from quire.engine.build import build
from quire.kernels.cpu.torch_kernels import TorchCpuKernels
from quire.kernels.draft_interface import REFERENCE_DRAFT_KERNELS
from quire.kernels.select import KernelChoice
from quire.runner.device_draft_model import DeviceDraftModel
from quire.runner.draft_model import DraftModel
from quire.runner.model_runner import ModelRunner
from quire.sched.speculation import DraftGovernor, SpeculationPolicy
from tests.llm.tiny import byte_ids
from tests.runner.reference_row_kernels import REFERENCE_ROW_KERNELS
from tests.sched.inspection import state_of
from tests.tiers import examples


def always(llm: LLM) -> LLM:
    """The same engine, with as many drafts as there are, whether they pay or not."""
    scheduler = llm._built.engine.scheduler
    policy = SpeculationPolicy(max_drafts=5, governed=False, tree=True)
    state_of(scheduler).governor = DraftGovernor(policy, scheduler.cost, scheduler.max_rows)
    return llm


AS_ON_A_GPU = KernelChoice(TorchCpuKernels(), "as on a GPU", REFERENCE_ROW_KERNELS, REFERENCE_DRAFT_KERNELS)


def on_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch, choice: KernelChoice = AS_ON_A_GPU, **settings: object
) -> LLM:
    """An engine with the steps of a GPU, captured and in flight; on a CPU they are called again."""
    monkeypatch.setattr(build_runner, "select_kernels", lambda *args, **options: choice)

    def prepare(runner: Runner) -> Runner:
        assert isinstance(runner, ModelRunner)
        while not runner.prepared:
            runner.prepare()
        return runner

    few: dict[str, object] = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 24}
    config = EngineConfig(model=str(folder), **(few | settings))  # type: ignore[arg-type]
    return LLM.over(build(config, observe=prepare))


class ReferenceDrafter(Protocol):
    """A head in plain torch."""

    def drafts(self, text: list[int], count: int) -> list[int]:
        """The likeliest tokens behind a text."""


Proposal = tuple[list[int], list[int]]  # a text, and its drafts


def note_proposals(monkeypatch: pytest.MonkeyPatch) -> list[Proposal]:
    """What heads propose from now on, on the host and in the captured passes of a GPU."""
    found: list[Proposal] = []
    propose, draft = DraftModel.propose, DeviceDraftModel.draft

    def noting(self: DraftModel, rows: Sequence[int], counts: Sequence[int], texts: list[IntArray]) -> list[IntArray]:
        drafted = propose(self, rows, counts, texts)  # type: ignore[arg-type]
        found.extend((text.tolist(), drafts.tolist()) for text, drafts in zip(texts, drafted, strict=True))
        return drafted

    def noting_captured(self: DeviceDraftModel, rows: IntArray, counts: IntArray) -> IntArray:
        drafted = draft(self, rows, counts)
        table = self._table
        for row, count in zip(rows.tolist(), drafted.tolist(), strict=True):
            if table.alive[row]:
                text = self._history[row, : int(table.lengths[row])]
                found.append((text.tolist(), self._made[row, :count].tolist()))
        return drafted

    monkeypatch.setattr(DraftModel, "propose", noting)
    monkeypatch.setattr(DeviceDraftModel, "draft", noting_captured)
    return found


# Prompts in chunks, and a cache of 12 blocks, for two rows of five: preempted and swapped.
CROWDED: dict[str, object] = {"max_num_seqs": 5, "max_num_batched_tokens": 24, "max_model_len": 128}
NUM_BLOCKS, BLOCK_TOKENS = 12, 16
CROWDED |= {"host_kv_memory": "1MiB", "overcommit": "optimistic", "block_size": BLOCK_TOKENS}


def assert_drafts_are_those(
    reference: ReferenceDrafter,
    plain: LLM,
    drafting: LLM,
    texts: list[str],
    proposals: list[Proposal],
    num_ties: int = 0,
) -> None:
    """Of crowded engines, with prompts beside rows that draft, steps without drafts, and prefixes that are found again.
    Outputs are those of the plain engine. `num_ties`: texts of which another device may round two tokens otherwise."""
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    prompts = [text * 2 for text in texts]
    wanted = [each.outputs[0].token_ids for each in plain.generate(prompts, params)]
    (alone,) = drafting.generate(prompts[0], params)  # steps without drafts, most of them repeated
    assert alone.outputs[0].token_ids == wanted[0]
    known = byte_ids(prompts[0]) + list(alone.outputs[0].token_ids)
    always(drafting).generate([known], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    for _ in range(2):
        assert [each.outputs[0].token_ids for each in drafting.generate(prompts, params)] == wanted
    counters = drafting._built.engine.scheduler.counters
    assert counters.preemptions > 0 and counters.drafted_tokens > counters.accepted_tokens > 20
    found = [(text, drafts) for text, drafts in proposals if drafts]
    assert len(found) > 40 and max(len(drafts) for _, drafts in found) > 2
    tested = found[:: examples(6, 1)]
    wrong = [(text, drafts) for text, drafts in tested if reference.drafts(text, len(drafts)) != drafts]
    assert len(wrong) <= num_ties, wrong

"""A draft model behind the real runner, with integers: what it computes and when, and that its blocks are never stale.

The draft oracle reads keys and values of its own. Where it may not be wrong, every draft is right: one that is not was
computed from a slot that holds something else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.core.ids import IntArray, Row
from quire.core.step import Drafts, Masks, Pending, StepPlan, StepResult
from quire.engine.oracle_runner import DraftOracle, TorchOracleRunner, torch_oracle
from quire.kernels.interface import StepLayout
from quire.models.oracle import OracleModel
from quire.runner import draft_model
from quire.runner.draft_model import DraftModelConfig
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.sim.check.check import CheckReport, run_trial
from quire.sim.check.scenario import Scenario
from tests.runner.plans import DEVICE, HOST, grants, moves, row_start, sample

VOCAB, BLOCK, NUM_BLOCKS = 97, 4, 40
PROMPT = [3, 1, 4, 1, 5, 9]
CPU = torch.device("cpu")
TRIALS = (7, 12, 51)  # with drafts, and with all of the events


class Recording(DraftOracle):
    """Notes the positions of each pass."""

    def __init__(self, wrong_of: int, vocab_size: int) -> None:
        super().__init__(vocab_size, torch.zeros(NUM_BLOCKS + 1, dtype=torch.int64), wrong_of)
        self.passes: list[list[int]] = []

    def forward(self, tokens: Tensor, layout: StepLayout, kv: Tensor, selected: Tensor | None = None) -> Tensor:
        assert int(tokens.max()) < self.vocab_size
        self.passes.append(layout.positions.tolist())
        return super().forward(tokens, layout, kv, selected)


class Driven:
    """A runner with a draft model, step by step. The blocks of its draft store begin with any numbers."""

    def __init__(self, wrong_of: int = 0, *, max_positions: int = 99, vocab_size: int = VOCAB) -> None:
        model, self.draft = OracleModel(VOCAB), Recording(wrong_of, vocab_size)
        stores = [new_store(model.kv_geometry, NUM_BLOCKS, BLOCK, CPU, num_host_blocks=4) for _ in range(2)]
        for store in stores:
            store.device.fill_(11)
        config = DraftModelConfig(self.draft, stores[1], max_positions, VOCAB)
        self.runner = ModelRunner(model, stores[0], max_rows=4, max_length=60, draft_model=config)
        self.step = 0

    def run(self, *, drafts: Mapping[int, int] | None = None, num_decoding: int = 0, **plan: object) -> StepResult:
        """A step. The draft model's passes begin anew."""
        self.draft.passes.clear()
        counts = drafts or {}
        wanted = Drafts(np.array(list(counts), np.int32), np.array(list(counts.values()), np.int32))
        made = StepPlan(self.step, drafts=wanted, num_decoding=num_decoding, **plan)  # type: ignore[arg-type]
        self.step += 1
        return self.runner.launch(made).wait()

    def begin(self, row: int = 0, blocks: range = range(1, 11), num_decoding: int = 0) -> None:
        """A row with the prompt, beside rows that decode."""
        begun = {"starts": (row_start(row, PROMPT),), "grants": grants({row: blocks})}
        self.run(chunks=(sample(row, 0, len(PROMPT)),), num_decoding=num_decoding, **begun)  # type: ignore[arg-type]


def verified(result: StepResult) -> list[tuple[int, int]]:
    return list(zip(result.verified.drafted.tolist(), result.verified.accepted.tolist(), strict=True))


def test_it_computes_the_prompt_with_the_first_drafts_and_then_one_token_behind() -> None:
    driven = Driven()
    driven.begin()
    assert driven.draft.passes == [], "it waits until there are drafts to propose"
    first = driven.run(drafts={0: 3}, num_decoding=1)
    assert verified(first) == [(3, 3)] and driven.draft.passes == [[0, 1, 2, 3, 4, 5, 6], [7], [8]]
    second = driven.run(drafts={0: 2}, num_decoding=1)  # the last draft was accepted and never computed
    assert verified(second) == [(2, 2)] and driven.draft.passes == [[9, 10], [11]]


def test_rejected_drafts_are_computed_anew() -> None:
    driven = Driven(wrong_of=1)
    driven.begin()
    assert verified(driven.run(drafts={0: 3}, num_decoding=1)) == [(3, 0)]
    assert verified(driven.run(drafts={0: 3}, num_decoding=1)) == [(3, 0)]
    assert driven.draft.passes == [[7], [8], [9]], "position 7 held the first draft, which was wrong"
    for _ in range(2):
        driven.run(num_decoding=1)
    driven.run(drafts={0: 1}, num_decoding=1)
    assert driven.draft.passes == [[8, 9, 10]], "positions 8 and 9 held drafts until the row went on without"


def test_a_row_that_decoded_without_drafts_catches_up() -> None:
    driven = Driven()
    driven.begin()
    driven.run(drafts={0: 1}, num_decoding=1)
    for _ in range(3):
        driven.run(num_decoding=1)
        assert driven.draft.passes == []
    assert verified(driven.run(drafts={0: 2}, num_decoding=1)) == [(2, 2)]
    assert driven.draft.passes == [[7, 8, 9, 10, 11], [12]]


@pytest.mark.parametrize(("cached", "first"), [(4, 4), (5, 5), (0, 0)])
def test_a_row_begins_where_the_blocks_of_its_prefix_end(cached: int, first: int) -> None:
    """The whole block of another row, and the copy of a block in part; or blocks that are given out again."""
    driven = Driven()
    driven.begin(0)
    driven.run(drafts={0: 2}, num_decoding=1)
    if cached == 5:
        blocks, copied = [1, 21, 22, 23, 24], moves(DEVICE, HOST, (2, 1)) + moves(HOST, DEVICE, (1, 21))
    else:
        blocks, copied = [1, 20, 21, 22, 23] if cached else [1, 2, 3, 4, 5], ()
    starts, chunks = (row_start(1, PROMPT),), (sample(1, cached, len(PROMPT)),)
    driven.run(releases=(Row(0),), moves=copied, starts=starts, grants=grants({1: blocks}), chunks=chunks)
    assert verified(driven.run(drafts={1: 3}, num_decoding=1)) == [(3, 3)]
    assert driven.draft.passes[0] == list(range(first, 7))


def test_a_block_that_is_given_out_again_is_empty() -> None:
    """Block 3 held positions that the draft model knew; now it is the second block of another row."""
    driven = Driven()
    driven.begin(0, range(1, 5))
    driven.run(drafts={0: 5}, num_decoding=1)
    driven.run(releases=(Row(0),), starts=(row_start(1, PROMPT[:3]),), grants=grants({1: [9]}),
               chunks=(sample(1, 0, 3),))  # fmt: skip
    driven.run(num_decoding=1, grants=grants({1: [3]}))
    assert verified(driven.run(drafts={1: 2}, num_decoding=1)) == [(2, 2)]
    assert driven.draft.passes[0] == [0, 1, 2, 3, 4]


def test_long_texts_are_caught_up_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is not behind drafts meanwhile."""
    monkeypatch.setattr(draft_model, "MAX_CATCH_UP", 2)
    driven = Driven()
    driven.begin(0)
    counts = []
    for _ in range(4):
        counts += verified(driven.run(drafts={0: 2}, num_decoding=1))
    assert counts == [(0, 0), (0, 0), (2, 2), (2, 2)], "3 positions a step, of 7, 8 and 9"
    driven.begin(1, range(20, 30), num_decoding=1)
    both = driven.run(drafts={0: 1, 1: 2}, num_decoding=2)
    assert verified(both) == [(1, 1), (0, 0)]


def test_it_drafts_nothing_behind_its_last_position() -> None:
    driven = Driven(max_positions=9)
    driven.begin()
    assert verified(driven.run(drafts={0: 5}, num_decoding=1)) == [(2, 2)]
    assert verified(driven.run(drafts={0: 5}, num_decoding=1)) == [(0, 0)]


@pytest.mark.parametrize("vocab_size", [VOCAB - 60, VOCAB + 40])
def test_another_number_of_unused_tokens_at_the_end_is_no_harm(vocab_size: int) -> None:
    """The tokens are those of the model; what the draft model does not have, it never proposes."""
    driven, plain = Driven(vocab_size=vocab_size), Driven()
    texts: list[list[int]] = []
    for each in (driven, plain):
        each.begin()
        results = [each.run(drafts={0: 2} if each is driven else {}, num_decoding=1) for _ in range(12)]
        texts.append([token for result in results for token in result.tokens.tolist()])
    assert texts[0][:12] == texts[1]


@dataclass
class WatchedRunner:
    """Adds up drafts and acceptances of rows that sample freely and go on."""

    inner: TorchOracleRunner
    counts: list[int] = field(default_factory=lambda: [0, 0])

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def launch(self, plan: StepPlan) -> Pending:
        return WatchedStep(self.inner.launch(plan), plan, self.counts)


@dataclass
class WatchedStep:
    pending: Pending
    plan: StepPlan
    counts: list[int]

    @property
    def drafted(self) -> Mapping[Row, IntArray]:
        return self.pending.drafted

    def sample(self, masks: Masks) -> None:
        self.pending.sample(masks)

    def wait(self) -> StepResult:
        result = self.pending.wait()
        others = {ended.row for ended in result.ended} | set(self.plan.masked)
        for row, (drafted, accepted) in zip(result.verified.rows.tolist(), verified(result), strict=True):
            if row not in others:
                self.counts[0] += drafted
                self.counts[1] += accepted
        return result


def test_no_draft_is_wrong_through_forks_copies_preemptions_swaps_and_lost_steps() -> None:
    counts = [0, 0]

    def watched(scenario: Scenario) -> WatchedRunner:
        return WatchedRunner(torch_oracle(scenario, draft_wrong_of=0), counts)

    report = CheckReport(3)
    for trial in TRIALS:
        run_trial(3_000_000 + trial, report, watched, min_tokens=False)  # type: ignore[arg-type]
    assert report.violations == []
    assert report.preemptions > 0 and counts[0] > 100, counts
    assert counts[0] == counts[1], "a draft was computed from a stale block"

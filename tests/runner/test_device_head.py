"""A head that drafts in captured passes, behind the real runner, with integers: what it computes and when, and that no
state, key or value that it reads is stale. What is the same as of a draft model is in `test_device_draft_model`."""

import pytest
import torch
from torch import Tensor

from quire.core.speculative import DRAFTERS
from quire.engine.oracle_runner import CapturedOracle, HeadOracle, torch_oracle
from quire.kernels.draft_interface import REFERENCE_DRAFT_KERNELS, DraftKernels
from quire.kernels.interface import StepLayout
from quire.kernels.row_interface import RowKernels
from quire.kernels.select import select_kernels
from quire.runner.device_draft_model import DeviceDraftModel
from quire.runner.device_drafting import DraftConfig
from quire.runner.draft_model import DraftFeatures, DraftModelConfig, feature_geometry
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.sim.check.check import CheckReport, run_trial
from quire.sim.check.scenario import Scenario
from tests.runner import test_device_draft_model as with_model
from tests.runner.reference_row_kernels import REFERENCE_ROW_KERNELS
from tests.runner.test_device_draft_model import Text, WatchedRunner, next_row
from tests.runner.test_draft_model import BLOCK, CPU, NUM_BLOCKS, PROMPT, VOCAB, verified
from tests.tiers import choices

TRIALS = (3, 7, 21, 41, 64, 97)  # with forks, copies, preemptions, swaps, aborts, lost steps, one or two in flight


class RecordingHead(HeadOracle):
    """Notes the positions of each pass: of the slots, which are one before the tokens."""

    def __init__(self, wrong: bool) -> None:
        super().__init__(VOCAB, torch.zeros(NUM_BLOCKS + 1, dtype=torch.int64))
        self.passes: list[list[int]] = []
        self._wrong = wrong

    def forward(
        self,
        tokens: Tensor,
        layout: StepLayout,
        kv: Tensor,
        selected: Tensor | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        num_real = int((layout.context_lengths > 0).sum()) and int(layout.query_starts[-1])
        self.passes.append(layout.positions[:num_real].tolist())
        found = super().forward(tokens, layout, kv, selected, features)
        found[:, 1] += self._wrong
        return found


class Driven(with_model.Driven):
    """A runner whose head drafts in captured passes, step by step."""

    draft: RecordingHead  # type: ignore[assignment]

    def __init__(
        self,
        wrong: bool = False,
        *,
        text: Text | None = None,
        row_kernels: RowKernels = REFERENCE_ROW_KERNELS,
        draft_kernels: DraftKernels = REFERENCE_DRAFT_KERNELS,
    ) -> None:
        model, self.draft = CapturedOracle(VOCAB, torch.zeros(NUM_BLOCKS + 1, dtype=torch.int64)), RecordingHead(wrong)
        geometries = (model.kv_geometry, self.draft.kv_geometry, feature_geometry(2, torch.int32))
        stores = [new_store(each, NUM_BLOCKS, BLOCK, CPU, num_host_blocks=4) for each in geometries]
        for store in stores:
            store.device.fill_(11)
        features = DraftFeatures(model.capture, self.draft.fuse, stores[2])
        config = DraftModelConfig(self.draft, stores[1], 99, VOCAB, features)
        self.runner = ModelRunner(
            model, stores[0], max_rows=4, max_length=60, row_kernels=row_kernels, max_step_tokens=16,
            device_drafts=DraftConfig(text, draft_kernels, model=config),
        )  # fmt: skip
        while not self.runner.prepared:
            self.runner.prepare()
        self.step = 0


def test_the_first_pass_computes_what_the_last_step_accepted_and_later_ones_a_draft_each() -> None:
    driven = Driven()
    driven.begin()
    assert driven.draft.passes == [], "it waits until there are drafts to propose"
    assert verified(driven.run(drafts={0: 3}, num_decoding=1)) == [(3, 3)]
    assert driven.draft.passes == [[0, 1, 2, 3, 4, 5], [6], [7]]
    assert verified(driven.run(drafts={0: 2}, num_decoding=1)) == [(2, 2)]
    assert driven.draft.passes == [[6, 7, 8, 9], [10]], "accepted drafts again, from the model's states of them"


def test_of_rejected_drafts_only_the_token_in_their_place_is_computed() -> None:
    driven = Driven(wrong=True)
    driven.begin()
    for first in (6, 7, 8):
        assert verified(driven.run(drafts={0: 3}, num_decoding=1)) == [(3, 0)]
        assert driven.draft.passes[1:] == [[first], [first + 1]]
    assert driven.draft.passes[0] == [7]


def test_all_drafts_that_a_row_may_have_are_computed_in_one_pass() -> None:
    driven = Driven()
    driven.begin()
    for _ in range(3):
        assert verified(driven.run(drafts={0: 7}, num_decoding=1)) == [(7, 7)]
    assert [len(positions) for positions in driven.draft.passes] == [8, *[1] * 6]


@pytest.mark.parametrize(("num_plain", "pieces"), [(4, []), (5, [[6]]), (9, [[6, 7, 8, 9, 10]])])
def test_a_row_that_decoded_without_drafts_catches_up(num_plain: int, pieces: list[list[int]]) -> None:
    """What the first pass may lack is 8: three drafts and a token of the step with drafts, and then a token a step."""
    driven = Driven()
    driven.begin()
    driven.run(drafts={0: 3}, num_decoding=1)
    for _ in range(num_plain):
        driven.run(num_decoding=1)
        assert driven.draft.passes == []
    assert verified(driven.run(drafts={0: 2}, num_decoding=1)) == [(2, 2)]
    last = 9 + num_plain
    first = 6 + sum(map(len, pieces))
    assert driven.draft.passes == [*pieces, list(range(first, last + 1)), [last + 1]]


@pytest.mark.parametrize(("cached", "computed"), [(4, [3, 4, 5]), (5, [4, 5]), (0, [0, 1, 2, 3, 4, 5])])
def test_a_row_begins_where_the_blocks_of_its_prefix_end(cached: int, computed: list[int]) -> None:
    """The last slot of a shared block holds the pair with a token behind it, which may be another one now."""
    driven = Driven()
    driven.begin(0)
    driven.run(drafts={0: 2}, num_decoding=1)
    next_row(driven, cached)
    assert verified(driven.run(drafts={1: 3}, num_decoding=1)) == [(3, 3)]
    assert driven.draft.passes == [computed, [6], [7]]


def test_what_the_text_says_is_drafted_first_and_the_head_goes_on_behind_it() -> None:
    plain = Driven()
    plain.begin()
    said = [int(plain.run(num_decoding=1).tokens[0]) for _ in range(12)]
    driven = Driven(text=Text([*[-1] * (len(PROMPT) + 1), *said[:2]]))
    driven.begin()
    result = driven.run(drafts={0: 4}, num_decoding=1)
    assert verified(result) == [(4, 4)] and result.tokens.tolist() == said[:5]
    assert [DRAFTERS[source] for source in result.verified.sources] == ["text"]
    again = driven.run(drafts={0: 2}, num_decoding=1)
    assert verified(again) == [(2, 2)] and [DRAFTERS[source] for source in again.verified.sources] == ["eagle"]


def test_padding_writes_nothing() -> None:
    """As captures and dry runs do, between steps."""
    driven = Driven()
    driven.begin()
    driven.run(drafts={0: 2}, num_decoding=1)
    drafting = driven.runner._draft_model
    assert isinstance(drafting, DeviceDraftModel) and drafting.source == "eagle"
    drafting.dry_run([1, 4])
    assert driven.runner.draft_times() is not None
    assert verified(driven.run(drafts={0: 3}, num_decoding=1)) == [(3, 3)]


def test_the_kernels_of_a_gpu_draft_the_same() -> None:
    """In Triton's interpreter."""
    choice = select_kernels("cuda")
    assert choice.row_kernels is not None and choice.draft_kernels is not None
    driven = Driven(row_kernels=choice.row_kernels, draft_kernels=choice.draft_kernels)
    driven.begin(0)
    driven.begin(1, range(11, 21), num_decoding=1)
    for counts in ({0: 3, 1: 1}, {0: 1, 1: 4}):
        assert verified(driven.run(drafts=counts, num_decoding=2)) == [(each, each) for each in counts.values()]
    driven.run(num_decoding=2)
    assert verified(driven.run(drafts={0: 2}, num_decoding=2)) == [(2, 2)]


@pytest.mark.parametrize("place", choices(("device",), ("device", "host")))
def test_no_draft_is_wrong_through_forks_copies_preemptions_swaps_aborts_and_lost_steps(place: str) -> None:
    counts = [0, 0]
    row_kernels = REFERENCE_ROW_KERNELS if place == "device" else None

    def watched(scenario: Scenario) -> WatchedRunner:
        return WatchedRunner(torch_oracle(scenario, row_kernels=row_kernels, draft_head=True), counts)

    report = CheckReport(3)
    for trial in TRIALS:
        run_trial(3_000_000 + trial, report, watched, min_tokens=False)  # type: ignore[arg-type]
    assert report.violations == []
    assert report.preemptions > 0 and counts[0] > 150, counts
    assert counts[0] == counts[1], "a draft was computed from a stale state or block"

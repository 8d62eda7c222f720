"""A draft model whose passes are captured, behind the real runner, with integers: what it computes and when, that its
blocks are never stale, and that no step waits for what only the device knows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.core.ids import IntArray, Row
from quire.core.oracle import continuation
from quire.core.speculative import DRAFTERS
from quire.core.step import Masks, Pending, RowStart, StepPlan, StepResult
from quire.engine.oracle_runner import TorchOracleRunner, torch_oracle
from quire.kernels.draft_interface import REFERENCE_DRAFT_KERNELS, DraftKernels
from quire.kernels.row_interface import RowKernels
from quire.kernels.select import select_kernels
from quire.kernels.transfers import HostCopy
from quire.models.oracle import OracleModel
from quire.runner import device_draft_model
from quire.runner.device_draft_model import DeviceDraftModel
from quire.runner.device_drafting import DraftConfig, RowHistory
from quire.runner.draft_model import DraftModelConfig
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.sim.check.check import CheckReport, run_trial
from quire.sim.check.scenario import Scenario
from tests.runner import test_draft_model as on_host
from tests.runner.plans import DEVICE, HOST, grants, moves, row_start, sample
from tests.runner.reference_row_kernels import REFERENCE_ROW_KERNELS
from tests.runner.test_draft_model import BLOCK, CPU, NUM_BLOCKS, PROMPT, VOCAB, Recording, verified

TRIALS = (3, 7, 12, 51)  # with drafts, and with all of the events
ROWS = 4


class Driven(on_host.Driven):
    """A runner whose draft model drafts in captured passes, step by step."""

    def __init__(
        self,
        wrong_of: int = 0,
        *,
        max_positions: int = 99,
        vocab_size: int = VOCAB,
        text: "Text | None" = None,
        row_kernels: RowKernels = REFERENCE_ROW_KERNELS,
        draft_kernels: DraftKernels = REFERENCE_DRAFT_KERNELS,
    ) -> None:
        model, self.draft = OracleModel(VOCAB), Recording(wrong_of, vocab_size)
        stores = [new_store(model.kv_geometry, NUM_BLOCKS, BLOCK, CPU, num_host_blocks=4) for _ in range(2)]
        for store in stores:
            store.device.fill_(11)
        config = DraftModelConfig(self.draft, stores[1], max_positions, VOCAB)
        self.runner = ModelRunner(
            model, stores[0], max_rows=ROWS, max_length=60, row_kernels=row_kernels, max_step_tokens=16,
            device_drafts=DraftConfig(text, draft_kernels, model=config),
        )  # fmt: skip
        while not self.runner.prepared:
            self.runner.prepare()
        self.step = 0


def first_token(prompt: list[int]) -> int:
    return next(continuation(np.array(prompt, dtype=np.int32), VOCAB, 0))


@dataclass
class Text:
    """What row 0 says at its positions, as a drafter knows it; -1 where it knows none."""

    tokens: list[int]

    def start(self, starts: Sequence[RowStart]) -> None:
        pass

    def propose(self, texts: RowHistory, count: int) -> Tensor:
        at = texts.lengths[:, None] + torch.arange(count)
        return torch.tensor([*self.tokens, *[-1] * 60])[at.clamp(max=59)]


def test_it_computes_the_prompt_with_the_first_drafts_and_then_two_positions() -> None:
    driven = Driven()
    driven.begin()
    assert driven.draft.passes == [], "it waits until there are drafts to propose"
    first = driven.run(drafts={0: 3}, num_decoding=1)
    assert verified(first) == [(3, 3)] and driven.draft.passes == [[0, 1, 2, 3, 4], [5, 6], [7], [8]]
    second = driven.run(drafts={0: 2}, num_decoding=1)  # the last draft was accepted and never computed
    assert verified(second) == [(2, 2)] and driven.draft.passes == [[9, 10], [11]]


def test_rejected_drafts_are_computed_anew() -> None:
    driven = Driven(wrong_of=1)
    driven.begin()
    assert verified(driven.run(drafts={0: 3}, num_decoding=1)) == [(3, 0)]
    assert verified(driven.run(drafts={0: 3}, num_decoding=1)) == [(3, 0)]
    assert driven.draft.passes == [[6, 7], [8], [9]], "position 7 held the first draft, which was wrong"
    for _ in range(2):
        driven.run(num_decoding=1)
    driven.run(drafts={0: 1}, num_decoding=1)
    assert driven.draft.passes == [[8, 9], [9, 10]], "positions 8 and 9 held drafts until the row went on without"


def test_a_piece_begins_at_the_first_rejected_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_draft_model, "MAX_CATCH_UP", 5)
    driven = Driven(wrong_of=1)
    driven.begin()
    assert verified(driven.run(drafts={0: 3}, num_decoding=1)) == [(3, 0)]
    for _ in range(8):
        driven.run(num_decoding=1)
    assert verified(driven.run(drafts={0: 1}, num_decoding=1)) == [(0, 0)]
    assert driven.draft.passes == [[7, 8, 9, 10, 11]], "of 8 that it lacks; positions 7 and 8 held drafts"


def test_a_row_that_decoded_without_drafts_catches_up() -> None:
    driven = Driven()
    driven.begin()
    driven.run(drafts={0: 1}, num_decoding=1)
    for _ in range(3):
        driven.run(num_decoding=1)
        assert driven.draft.passes == []
    assert verified(driven.run(drafts={0: 2}, num_decoding=1)) == [(2, 2)]
    assert driven.draft.passes == [[7, 8, 9], [10, 11], [12]]


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


def next_row(driven: Driven, cached: int) -> None:
    """Row 0 goes, and row 1 begins with as many cached tokens of the same prompt."""
    blocks, copied = [1, 20, 21, 22, 23] if cached else [1, 2, 3, 4, 5], ()
    if cached % BLOCK:
        blocks, copied = [1, 21, 22, 23, 24], moves(DEVICE, HOST, (2, 1)) + moves(HOST, DEVICE, (1, 21))
    starts, chunks = (row_start(1, PROMPT),), (sample(1, cached, len(PROMPT)),)
    driven.run(releases=(Row(0),), moves=copied, starts=starts, grants=grants({1: blocks}), chunks=chunks)


@pytest.mark.parametrize(("cached", "computed"), [(4, [4]), (5, []), (0, [0, 1, 2, 3, 4])])
def test_a_row_begins_where_the_blocks_of_its_prefix_end(cached: int, computed: list[int]) -> None:
    """The whole block of another row, and the copy of a block in part; or blocks that are given out again."""
    driven = Driven()
    driven.begin(0)
    driven.run(drafts={0: 2}, num_decoding=1)
    next_row(driven, cached)
    assert verified(driven.run(drafts={1: 3}, num_decoding=1)) == [(3, 3)]
    assert driven.draft.passes == [*([computed] if computed else []), [5, 6], [7], [8]]


def test_nothing_is_computed_of_a_row_that_has_ended() -> None:
    """The host does not know of it when it plans the drafts; another row has its prompt's first block."""
    driven, said = Driven(), continuation(np.array(PROMPT, dtype=np.int32), VOCAB, 0)
    starts = (row_start(0, PROMPT, end_ids=(*islice(said, 1, 2),)),)
    driven.run(starts=starts, grants=grants({0: range(1, 11)}), chunks=(sample(0, 0, len(PROMPT)),))
    assert [over.row for over in driven.run(num_decoding=1).ended] == [0]
    assert verified(driven.run(drafts={0: 2}, num_decoding=1)) == [(2, 0)]
    next_row(driven, 4)
    assert verified(driven.run(drafts={1: 3}, num_decoding=1)) == [(3, 3)]
    assert driven.draft.passes[0] == [0, 1, 2, 3, 4]


def test_what_is_computed_of_a_prefix_is_read_when_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the row has no drafts: no step waits for the device."""
    driven, is_ready = Driven(), False
    monkeypatch.setattr(HostCopy, "ready", property(lambda copied: is_ready))
    driven.begin(0)
    driven.run(drafts={0: 2}, num_decoding=1)
    next_row(driven, 4)
    assert verified(driven.run(drafts={1: 3}, num_decoding=1)) == [(0, 0)] and driven.draft.passes == []
    is_ready = True
    assert verified(driven.run(drafts={1: 3}, num_decoding=1)) == [(3, 3)]
    assert driven.draft.passes == [[4, 5], [6, 7], [8], [9]]


def test_a_block_that_is_given_out_again_is_empty() -> None:
    """Block 3 held positions that the draft model knew; now it is the second block of another row, whose blocks a
    third one finds cached."""
    driven = Driven()
    driven.begin(0, range(1, 5))
    driven.run(drafts={0: 5}, num_decoding=1)
    driven.run(releases=(Row(0),), starts=(row_start(1, PROMPT[:3]),), grants=grants({1: [9]}),
               chunks=(sample(1, 0, 3),))  # fmt: skip
    said = [driven.run(num_decoding=1, **({"grants": grants({1: [3]})} if number == 0 else {})) for number in range(4)]
    known = [*PROMPT[:3], first_token(PROMPT[:3]), *(int(result.tokens[0]) for result in said)]
    starts, given = (row_start(2, known, 40),), grants({2: [9, 3, 30, 31]})
    driven.run(starts=starts, grants=given, chunks=(sample(2, 7, 8),), num_decoding=1)
    assert verified(driven.run(drafts={2: 2}, num_decoding=2)) == [(2, 2)]
    assert driven.draft.passes[0] == list(range(7)), "neither block was computed for what it holds now"


def test_long_texts_are_caught_up_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is not behind drafts meanwhile."""
    monkeypatch.setattr(device_draft_model, "MAX_CATCH_UP", 2)
    driven = Driven()
    driven.begin(0)
    counts = []
    for _ in range(5):
        counts += verified(driven.run(drafts={0: 2}, num_decoding=1))
    assert counts == [(0, 0)] * 3 + [(2, 2)] * 2, "2 positions a step, of 5 to 8 before the last two"
    driven.begin(1, range(20, 30), num_decoding=1)
    both = driven.run(drafts={0: 1, 1: 2}, num_decoding=2)
    assert verified(both) == [(1, 1), (0, 0)]


def test_what_the_text_says_is_drafted_first_and_the_model_goes_on_behind_it() -> None:
    plain = Driven()
    plain.begin()
    said = [int(plain.run(num_decoding=1).tokens[0]) for _ in range(12)]
    right = [*[-1] * (len(PROMPT) + 1), *said]
    wrong = [*right[:7], (right[7] + 1) % VOCAB]
    sources, results = [], []
    for wrong_of, text in ((1, right[:9]), (0, right[:9]), (0, wrong), (1, right[:7])):
        driven = Driven(wrong_of, text=Text(text))
        driven.begin()
        result = driven.run(drafts={0: 4}, num_decoding=1)
        results += verified(result)
        sources += [DRAFTERS[source] for source in result.verified.sources]
        assert result.tokens.tolist() == said[: len(result.tokens)]
    assert results == [(4, 2), (4, 4), (4, 0), (4, 0)]
    assert sources == ["text", "text", "text", "draft"]


def test_accepted_drafts_are_found_with_their_blocks() -> None:
    """Of the tokens of a row that went on by drafts, another row has those that the first pass found behind them."""
    driven = Driven()
    driven.begin(0)
    first, second = (driven.run(drafts={0: count}, num_decoding=1) for count in (3, 2))
    assert verified(first) == [(3, 3)] and verified(second) == [(2, 2)]
    known = [*PROMPT, first_token(PROMPT), *first.tokens.tolist(), *second.tokens.tolist()]
    starts, given = (row_start(1, known),), grants({1: [1, 2, 30, 31, 32, 33]})
    driven.run(releases=(Row(0),), starts=starts, grants=given, chunks=(sample(1, 8, len(known)),))
    assert verified(driven.run(drafts={1: 1}, num_decoding=1)) == [(1, 1)]
    assert driven.draft.passes == [list(range(8, len(known) - 1)), [len(known) - 1, len(known)]]


def test_later_passes_have_the_rows_that_want_more(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven()
    for row in range(3):
        driven.begin(row, range(1 + 10 * row, 11 + 10 * row), num_decoding=row)
    both = driven.run(drafts={0: 1, 1: 4, 2: 2}, num_decoding=3)
    assert verified(both) == [(1, 1), (4, 4), (2, 2)]
    assert [len(positions) for positions in driven.draft.passes[1:]] == [8, 2, 1, 1], "two positions of four rows"


def test_it_drafts_nothing_behind_its_last_position() -> None:
    driven = Driven(max_positions=9)
    driven.begin()
    assert verified(driven.run(drafts={0: 5}, num_decoding=1)) == [(2, 2)]
    for _ in range(2):
        driven.run(num_decoding=1)
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


def test_padding_writes_nothing() -> None:
    """As captures and dry runs do, between steps."""
    driven = Driven()
    driven.begin()
    driven.run(drafts={0: 2}, num_decoding=1)
    drafting = driven.runner._draft_model
    assert isinstance(drafting, DeviceDraftModel)
    drafting.dry_run([1, 4])
    assert driven.runner.draft_times() is not None
    assert verified(driven.run(drafts={0: 3}, num_decoding=1)) == [(3, 3)]
    assert driven.draft.passes == [[8, 9], [10], [11]]


@dataclass
class WatchedRunner:
    """Adds up drafts and acceptances of rows that sample freely and go on, with steps in flight."""

    inner: TorchOracleRunner
    counts: list[int]
    ended: set[Row] = field(default_factory=set)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def launch(self, plan: StepPlan) -> Pending:
        return WatchedStep(self.inner.launch(plan), plan, self)


@dataclass
class WatchedStep:
    pending: Pending
    plan: StepPlan
    runner: WatchedRunner

    @property
    def drafted(self) -> Mapping[Row, IntArray]:
        return self.pending.drafted

    def sample(self, masks: Masks) -> None:
        self.pending.sample(masks)

    def wait(self) -> StepResult:
        result, ended = self.pending.wait(), self.runner.ended
        if self.plan.reset:
            ended.clear()
        ended -= {start.row for start in self.plan.starts}
        now = {over.row for over in result.ended}
        for row, (drafted, accepted) in zip(result.verified.rows.tolist(), verified(result), strict=True):
            if row not in ended | now | set(self.plan.masked):
                self.runner.counts[0] += drafted
                self.runner.counts[1] += accepted
        ended |= now
        return result


def test_no_draft_is_wrong_through_forks_copies_preemptions_swaps_and_lost_steps() -> None:
    counts = [0, 0]

    def watched(scenario: Scenario) -> WatchedRunner:
        oracle = torch_oracle(scenario, row_kernels=REFERENCE_ROW_KERNELS, draft_wrong_of=0)
        return WatchedRunner(oracle, counts)

    report = CheckReport(3)
    for trial in TRIALS:
        run_trial(3_000_000 + trial, report, watched, min_tokens=False)  # type: ignore[arg-type]
    assert report.violations == []
    assert report.preemptions > 0 and counts[0] > 100, counts
    assert counts[0] == counts[1], "a draft was computed from a stale block"


def test_drafts_that_are_wrong_now_and_then_change_no_token() -> None:
    report = CheckReport(3)
    for trial in TRIALS[:2]:
        run_trial(
            3_000_000 + trial,
            report,
            lambda scenario: torch_oracle(scenario, row_kernels=REFERENCE_ROW_KERNELS, draft_wrong_of=3),
            min_tokens=False,
        )
    assert report.violations == [] and report.drafted > report.accepted > 0

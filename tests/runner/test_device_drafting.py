"""Drafts on the device: the same proposals as on the host, and the same outputs with steps in flight."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.ids import IntArray, Row
from quire.core.sampling import SamplingParams
from quire.core.speculative import DRAFTERS
from quire.core.step import Drafts, ForcedTokens
from quire.engine.engine import Engine
from quire.engine.local_client import LocalClient
from quire.engine.request_validator import RequestValidator
from quire.kernels.transfers import HostCopy
from quire.kv.manager import KVManager
from quire.models.oracle import OracleModel
from quire.runner.device_drafting import (
    DeviceDrafting,
    DraftConfig,
    RowHistory,
    SuffixDrafter,
    VerifiedRows,
    counts_of,
    drafts_computed,
    write_lines,
)
from quire.runner.drafters import NgramDrafter
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.runner.row_table import RowTable
from quire.sampling.logprobs import LineScores, Scores
from quire.sampling.row_params import DraftedLines
from quire.sched.policy import Policy
from quire.sched.scheduler import Scheduler
from quire.sched.speculation import SpeculationPolicy
from tests.runner.plans import row_start
from tests.runner.reference_row_kernels import REFERENCE_ROW_KERNELS

CPU = torch.device("cpu")
WIDTH = 40


def ids(*tokens: int) -> IntArray:
    return np.array(tokens, dtype=np.int32)


def texts_of(*lines: list[int], width: int = WIDTH) -> RowHistory:
    """Rows 0, 1, … with these tokens."""
    history = torch.full((len(lines) + 1, width), 99, dtype=torch.int32)
    write_lines(history, {row: (0, ids(*line)) for row, line in enumerate(lines)})
    return RowHistory(torch.arange(len(lines)), torch.tensor([len(line) for line in lines]), history)


def propose(drafter: SuffixDrafter, texts: RowHistory, count: int) -> list[list[int]]:
    proposed: list[list[int]] = drafter.propose(texts, count).tolist()
    return proposed


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH), min_size=1, max_size=3))
def test_prompt_lookup_is_that_of_the_host(lines: list[list[int]]) -> None:
    drafter = SuffixDrafter(len(lines), WIDTH, CPU, tree=False)
    for line, found in zip(lines, propose(drafter, texts_of(*lines), 7), strict=True):
        expected = NgramDrafter().propose(row_start(0, line).row, ids(*line), 7).tolist()
        assert found[: len(expected)] == expected, "the host proposes fewer after a short match"
        assert len(found) == 7 and (set(found) <= {0, 1, 2} or set(found) == {-1})


def test_a_long_row_is_searched_in_its_latest_tokens() -> None:
    text = [*range(50, 80), 1, 2, 3, 4, *range(20, 40), 1, 2, 3]
    assert propose(SuffixDrafter(1, WIDTH, CPU, tree=False), texts_of(text), 3) == [[4, 20, 21]]
    text = [1, 2, 3, 4, *range(20, 60), 1, 2, 3]
    assert propose(SuffixDrafter(1, WIDTH, CPU, tree=False), texts_of(text), 2) == [[-1, -1]], "forgotten"


def test_the_tree_is_followed_left_and_found_again() -> None:
    drafter = SuffixDrafter(2, WIDTH, CPU)
    drafter.start([row_start(0, [1, 2, 9])._replace(continuation=ids(3, 4, 5, 6, 7, 8)), row_start(1, [1, 2, 9])])
    first, second = propose(drafter, texts_of([1, 2, 9], [1, 2, 9]), 2)
    assert first == [3, 4] and second == [-1, -1], "the second row has no continuation"
    assert propose(drafter, texts_of([1, 2, 9, 3, 4]), 3) == [[5, 6, 7]]
    assert propose(drafter, texts_of([1, 2, 9, 3, 4, 0]), 2) == [[-1, -1]], "the row says something else"
    assert propose(drafter, texts_of([1, 2, 9, 3, 4, 0, 4, 5, 6]), 3) == [[7, 8, -1]], "and returns; then it ends"
    drafter.start([row_start(0, [1, 2, 9])])
    assert propose(drafter, texts_of([1, 2, 9]), 1) == [[-1]], "another sequence has the row"


def test_a_row_has_a_token_and_its_logprobs_in_each_pass_that_it_reaches() -> None:
    outcome = np.zeros((5, 3, 3), dtype=np.int64)
    outcome[:, 0] = np.array([(7, 1, 1, 0, 0), (9, 1, 1, 1, 0), (6, 1, 1, 0, 0)]).T
    outcome[:, 1, 0] = (8, 1, 1, 0, 1)
    drafted = drafts_computed(Drafts(ids(3, 8), ids(20, 2)), [ForcedTokens(Row(8), 4, ids(1, 2))])
    assert drafted.counts.tolist() == [7, 2], "as many as a graph holds"
    assert [DRAFTERS[source] for source in drafted.sources] == ["text", "grammar"]
    lines = DraftedLines.of(ids(3, 5, 8), counts_of(ids(3, 5, 8), drafted._replace(counts=np.array([1, 2]))))
    assert lines.starts.tolist() == [0, 2, 3] and lines.numbers.tolist() == [0, 1, 0, 0, 1, 2]
    scored = np.array([lines.line_rows != 5]).nonzero()[1]
    packed = torch.tensor([[token, 1, 0] for token in (7, 8, 6, 5, 4)], dtype=torch.int32)
    scores = LineScores(
        lines.line_rows[scored], lines.numbers[scored], np.zeros(5, dtype=np.int64), Scores(HostCopy(packed), 0)
    )
    result = VerifiedRows(ids(3, 5, 8), HostCopy(torch.from_numpy(outcome)), drafted, scores).wait(4)
    assert [(rows.tolist(), tokens.tolist()) for rows, tokens in result.each_pass()] == [
        ([3, 5, 8], [7, 9, 6]),
        ([3], [8]),
    ]
    assert [end.row for end in result.ended] == [5, 3]
    assert {row: [score.token for score in each] for row, each in result.logprobs.items()} == {3: [7, 8], 8: [6]}


def test_forced_tokens_come_before_what_the_text_repeats() -> None:
    """From where each row is on the device, which may be behind what the host knew of it."""
    table = RowTable(3, WIDTH, 4, CPU)
    drafting = DeviceDrafting(table, WIDTH, DraftConfig(SuffixDrafter(3, WIDTH, CPU, tree=False)), 24)
    text = [7, 8, 9, 1, 2, 7, 8, 9]
    for row in (0, 1, 2):
        write_lines(table.history, {row: (0, ids(*text))})  # type: ignore[dict-item, arg-type]
    table.lengths[:3], table.max_lengths[:3], table.last_tokens[:3] = len(text), WIDTH, text[-1]
    drafted = drafts_computed(Drafts(ids(0, 1, 2), ids(7, 3, 2)), [])
    forced = [ForcedTokens(Row(1), 6, ids(50, 51, 52, 53)), ForcedTokens(Row(2), 0, ids(60))]
    made = drafting.make(drafted, [Row(1), Row(2)], forced)
    assert made is not None
    assert {row: tokens.tolist() for row, tokens in made.wait().items()} == {1: [52, 53, 7], 2: [1, 2]}
    starts = torch.tensor([0, 8, 12, 15])
    assert drafting.inputs(torch.arange(3), starts, 15, 8).inputs.tokens.tolist() == [
        *(9, 1, 2, 7, 8, 9, 1, 2),
        *(9, 52, 53, 7),
        *(9, 1, 2),
    ]
    drafting.reject(np.array([2, 9]))
    assert drafting.tokens(15)[[1, 2, 3, 9]].tolist() == [1, -1, 7, -1]
    assert drafting.make(drafted, [], forced) is None, "and the next step has others"
    assert drafting.inputs(torch.arange(3), starts, 15, 8).inputs.tokens.tolist()[8:12] == [9, 1, 2, 7]


def answers(depth: int, drafts: int) -> tuple[list[list[int]], int]:
    """What the integer model says to requests of which each comes again, and how many drafts were right."""
    model = OracleModel(300)
    stores = new_store(model.kv_geometry, 128, 4, CPU)
    runner = ModelRunner(
        model,
        stores,
        max_rows=5,
        max_length=128,
        row_kernels=REFERENCE_ROW_KERNELS,
        max_step_tokens=24,
        device_drafts=DraftConfig(SuffixDrafter(5, 128, CPU)) if drafts else None,
    )
    while not runner.prepared:
        runner.prepare()
    policy = Policy(speculation=SpeculationPolicy(drafts, governed=False, tree=True, max_verified=512))
    scheduler = Scheduler(KVManager(128, 4, 5), max_rows=5, max_step_tokens=24, policy=policy)
    door = RequestValidator(300, (), 128, 5, 128, 4)
    front = LocalClient(Engine(scheduler, runner, door, depth=depth, seed=0, clock=lambda: 0.0), None)
    said = []
    for _ in range(2):
        wishes: list[dict[str, object]] = [{}, {"stop_token_ids": list(range(0, 300, 9))}, {"presence_penalty": 1.5}]
        params = [SamplingParams(temperature=0, max_tokens=12 + i, **wishes[i % 3]) for i in range(6)]  # type: ignore[arg-type]
        tickets = [front.submit([31 * i, 7, 5, i], params[i]) for i in range(6)]
        while not all(ticket.finished for ticket in tickets):
            front.step()
        said += [list(ticket.output().outputs[0].token_ids) for ticket in tickets]
    return said, scheduler.counters.accepted_tokens


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_drafts_from_the_tree_change_no_output(depth: int) -> None:
    plain, none = answers(depth, 0)
    drafted, accepted = answers(depth, 7)
    assert drafted == plain
    assert none == 0 and accepted > 20

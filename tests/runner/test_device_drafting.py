"""Drafts on the device: the same proposals as on the host, and the same outputs with steps in flight."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.ids import IntArray
from quire.core.sampling import SamplingParams
from quire.core.step import Drafts
from quire.engine.engine import Engine
from quire.engine.local_client import LocalClient
from quire.engine.request_validator import RequestValidator
from quire.kernels.transfers import HostCopy
from quire.kv.manager import KVManager
from quire.models.oracle import OracleModel
from quire.runner.device_drafting import (
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
from quire.runner.verification import SampledTokens
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
        assert len(found) == 7 and set(found) <= {0, 1, 2}


def test_a_long_row_is_searched_in_its_latest_tokens() -> None:
    text = [*range(50, 80), 1, 2, 3, 4, *range(20, 40), 1, 2, 3]
    assert propose(SuffixDrafter(1, WIDTH, CPU, tree=False), texts_of(text), 3) == [[4, 20, 21]]
    text = [1, 2, 3, 4, *range(20, 60), 1, 2, 3]
    assert propose(SuffixDrafter(1, WIDTH, CPU, tree=False), texts_of(text), 2) == [[3, 3]], "forgotten"


def test_the_tree_is_followed_left_and_found_again() -> None:
    drafter = SuffixDrafter(2, WIDTH, CPU)
    drafter.start([row_start(0, [1, 2, 9])._replace(continuation=ids(3, 4, 5, 6, 7, 8)), row_start(1, [1, 2, 9])])
    first, second = propose(drafter, texts_of([1, 2, 9], [1, 2, 9]), 2)
    assert first == [3, 4] and second == [9, 9], "the second row has no continuation"
    assert propose(drafter, texts_of([1, 2, 9, 3, 4]), 3) == [[5, 6, 7]]
    assert propose(drafter, texts_of([1, 2, 9, 3, 4, 0]), 2) == [[0, 0]], "the row says something else"
    assert propose(drafter, texts_of([1, 2, 9, 3, 4, 0, 4, 5, 6]), 3) == [[7, 8, 6]], "and returns; then it ends"
    drafter.start([row_start(0, [1, 2, 9])])
    assert propose(drafter, texts_of([1, 2, 9]), 1) == [[9]], "another sequence has the row"


def test_rows_that_are_sampled_apart_are_in_the_first_pass() -> None:
    outcome = np.zeros((5, 2, 3), dtype=np.int64)
    outcome[:, 0, 0], outcome[:, 1, 0] = (7, 1, 1, 0, 0), (8, 1, 1, 0, 1)
    outcome[:, 0, 2] = (6, 1, 1, 0, 0)
    apart = SampledTokens(ids(5), HostCopy(torch.tensor([[9], [1], [1], [1], [0]])), None)
    drafted = drafts_computed(Drafts(ids(3), ids(20)))
    assert drafted.counts.tolist() == [7], "as many as a graph holds"
    assert counts_of(ids(1, 3, 5), drafted).tolist() == [0, 7, 0]
    result = VerifiedRows(ids(3, 5, 8), HostCopy(torch.from_numpy(outcome)), drafted, apart).wait(4)
    assert [(rows.tolist(), tokens.tolist()) for rows, tokens in result.each_pass()] == [
        ([3, 8, 5], [7, 6, 9]),
        ([3], [8]),
    ]
    assert [end.row for end in result.ended] == [5, 3]


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

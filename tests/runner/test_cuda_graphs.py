"""Steps that are recorded by shape: the same tokens as steps that are built, whoever comes, goes or ends."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.core.ids import Row
from quire.core.sampling import SamplingParams
from quire.core.step import StepPlan
from quire.engine.engine import Engine
from quire.engine.local_client import LocalClient
from quire.engine.oracle_runner import TorchOracleRunner, torch_oracle
from quire.engine.request_validator import RequestValidator
from quire.kernels.interface import StepLayout
from quire.kernels.row_interface import PADDING, RowKernels, Sampled, SamplingStage, SamplingTable
from quire.kv.manager import KVManager
from quire.models.oracle import OracleModel
from quire.runner import cuda_graphs as graphs
from quire.runner.cuda_graphs import ChunkArrays, ChunkInputs, GraphCapturer, GraphedSteps, Replay
from quire.runner.graph_shapes import CapturePolicy, StepSize
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.sched.scheduler import Scheduler
from quire.sim.check.check import check
from quire.sim.check.scenario import Scenario
from tests.runner.plans import emitted, grants, row_start, sample
from tests.runner.reference_row_kernels import REFERENCE_ROW_KERNELS
from tests.sim.runner_pairs import RunnerPair, following

CPU = torch.device("cpu")
PADDING_ROW = Row(16)
PROMPT = [5, 96, 3, 41, 0, 17]


class Recording:
    """A step that says what it saw, and chooses everybody's row as a token."""

    def __init__(self, *shapes: StepSize) -> None:
        self.rows: list[int] = []
        self.chunks: dict[str, list[int]] = {}
        self.everybody = torch.empty(0, dtype=torch.int64)
        self.stages: SamplingStage | None = None
        self.graphs = GraphedSteps(self.forward, self.choose, list(shapes), PADDING_ROW, CPU)

    def record_all(self) -> None:
        while not self.graphs.complete:
            self.record_next()

    def record_next(self) -> StepSize | None:
        shape = self.graphs.next_missing
        self.graphs.capture(shape)
        return shape

    def forward(self, rows: torch.Tensor, chunks: ChunkInputs | None) -> torch.Tensor:
        self.rows = rows.tolist()
        self.chunks = {} if chunks is None else {name: value.tolist() for name, value in chunks._asdict().items()}
        self.everybody = rows if chunks is None else torch.cat([rows, chunks.rows])
        return self.everybody

    def choose(self, count: int, stages: SamplingStage) -> torch.Tensor:
        self.stages = stages
        return self.everybody[:count].repeat(5, 1)


def test_the_next_captured_shape_is_used_with_padding() -> None:
    step = Recording(StepSize(16), StepSize(1), StepSize(4))
    steps = step.graphs
    assert steps.forward(np.array([3], np.int32)) is None, "nothing is recorded"
    assert step.record_next() == StepSize(16)
    assert steps.forward(np.array([3, 7, 9], np.int32)) == StepSize(16)
    assert step.rows == [3, 7, 9] + [PADDING_ROW] * 13
    outcome = steps.sample(StepSize(16), 3, 0, SamplingStage.DRAWN)
    assert outcome is not None and outcome.tolist() == [[3, 7, 9]] * 5
    assert step.stages is SamplingStage.DRAWN
    assert steps.sample(StepSize(16), 3, 0, SamplingStage.GREEDY) is not None and step.stages is SamplingStage.GREEDY
    assert step.record_next() == StepSize(1) and not steps.complete
    steps.forward(np.array([7], np.int32))
    assert step.rows == [7]
    step.record_all()
    steps.forward(np.array([1, 2, 3], np.int32))
    assert step.rows == [1, 2, 3, PADDING_ROW]


def test_a_dry_run_executes_all_shapes_and_captures_none() -> None:
    step = Recording(StepSize(4), StepSize(2, 3, 8))
    step.graphs.dry_run([StepSize(2, 3, 8)])
    assert step.rows == [PADDING_ROW] * 2 and step.chunks["rows"] == [PADDING_ROW] * 3
    assert step.graphs.next_missing == StepSize(4) and step.graphs.forward(np.array([1], np.int32)) is None


def test_choices_that_are_forgotten_are_recorded_again() -> None:
    step = Recording(StepSize(2))
    step.record_all()
    step.graphs.drop_sampling_graphs()
    assert step.graphs.forward(np.array([1], np.int32)) == StepSize(2) and not step.graphs.complete
    assert step.graphs.sample(StepSize(2), 1, 0, SamplingStage.GREEDY) is None
    assert step.graphs.lacks_sampling
    step.record_all()
    step.graphs.forward(np.array([1], np.int32))
    outcome = step.graphs.sample(StepSize(2), 1, 0, SamplingStage.GREEDY)
    assert outcome is not None and outcome.tolist() == [[1]] * 5
    step.graphs.drop_sampling_graphs()
    step.graphs.stop_capturing()
    assert step.graphs.complete and not step.graphs.lacks_sampling, "nobody tries again before every step"


def test_chunks_come_behind_the_rows_and_nobodys_are_empty() -> None:
    step = Recording(StepSize(2), StepSize(2, 3, 8))
    step.record_all()
    chunks = ChunkArrays(
        tokens=np.array([11, 12, 13, 14, 15], np.int32),
        positions=np.array([4, 5, 6, 0, 1]),
        token_rows=np.array([5, 5, 5, 6, 6]),
        starts=np.array([0, 3, 5]),
        ends=np.array([7, 2]),
        rows=np.array([5, 6]),
        emitting=np.array([5, PADDING]),
    )
    shape = step.graphs.forward(np.array([9], np.int32), chunks)
    assert shape == StepSize(2, 3, 8) and step.rows == [9, PADDING_ROW]
    assert step.chunks == {
        "tokens": [11, 12, 13, 14, 15, 0, 0, 0],
        "positions": [4, 5, 6, 0, 1, 0, 0, 0],
        "token_rows": [5, 5, 5, 6, 6, PADDING_ROW, PADDING_ROW, PADDING_ROW],
        "starts": [0, 3, 5, 5],
        "ends": [7, 2, 0],
        "rows": [5, 6, PADDING_ROW],
        "emitting": [5, PADDING, PADDING],
    }
    outcome = step.graphs.sample(shape, 1, 2, SamplingStage.GREEDY)
    assert outcome is not None and outcome.tolist() == [[9, 5, 6]] * 5
    assert step.graphs.forward(np.array([9], np.int32), chunks._replace(rows=np.arange(4))) is None, "one too many"


def test_the_pace_is_that_of_the_smallest_decode_and_the_largest_step() -> None:
    step = Recording(StepSize(4), StepSize(1), StepSize(4, 2, 6))
    assert step.graphs.step_times() is None
    step.record_next()
    assert step.graphs.step_times() is None, "no step with chunks"
    step.record_all()
    step_times = step.graphs.step_times()
    assert step_times is not None and step_times.decode_s > 0 and step_times.token_s > 0
    assert step.rows == [PADDING_ROW] * 4 and set(step.chunks["rows"]) == {PADDING_ROW}, "nobody takes part"


def test_random_scenarios_with_faults() -> None:
    runners: list[TorchOracleRunner] = []

    def make_runner(scenario: Scenario) -> TorchOracleRunner:
        runners.append(torch_oracle(scenario, row_kernels=REFERENCE_ROW_KERNELS))
        return runners[-1]

    assert check(1_200, 23, make_runner=make_runner, min_tokens=False).violations == []
    assert sum(runner.num_replayed for runner in runners) > 500


def test_rows_that_end_in_a_recorded_step_write_nothing_more() -> None:
    """Two rows; the first ends while the host still believes that it cruises."""
    pair = RunnerPair(row_kernels=REFERENCE_ROW_KERNELS)
    ending = following(PROMPT, 2)[1]
    opening = StepPlan(
        0,
        starts=(row_start(0, PROMPT, end_ids=(ending,)), row_start(1, PROMPT[::-1])),
        grants=grants({0: [1, 2], 1: [3, 4]}),
        chunks=(sample(0, 0, 6), sample(1, 0, 6)),
    )
    pair.run(opening)
    said = pair.run(StepPlan(1, num_decoding=2))
    assert emitted(said) == {0: ending, 1: following(PROMPT[::-1], 2)[1]} and [end.row for end in said.ended] == [0]
    later = pair.run(StepPlan(2, num_decoding=2, grants=grants({0: [5], 1: [6]})))
    assert emitted(later) == {1: following(PROMPT[::-1], 3)[2]}
    assert pair.torch.num_replayed == 3


def test_more_end_tokens_than_the_table_had_room_for() -> None:
    pair = RunnerPair(row_kernels=REFERENCE_ROW_KERNELS)
    wide = (*range(200, 209), following(PROMPT, 2)[1])
    pair.run(
        StepPlan(0, starts=(row_start(0, PROMPT, end_ids=wide),), grants=grants({0: [1, 2]}), chunks=(sample(0, 0, 6),))
    )
    said = pair.run(StepPlan(1, num_decoding=1))
    assert [end.row for end in said.ended] == [0], "the wider table is the one that is read"


WISHES: list[dict[str, object]] = [
    {},
    {"logprobs": 3},
    {"presence_penalty": 1.5},
    {"logit_bias": {7: 4.0}},
    {"min_tokens": 5, "stop_token_ids": list(range(0, 300, 2))},
    {"allowed_token_ids": list(range(40, 90))},
    {"stop_token_ids": list(range(0, 300, 9))},
]


WIDTHS = (2, 5, 9, 33)
GROWING: list[dict[str, object]] = [{"stop_token_ids": list(range(299, 299 - 3 * width, -3))} for width in WIDTHS]


def answers(
    row_kernels: RowKernels | None,
    wishes: list[dict[str, object]] = WISHES,
    *,
    busily: bool = False,
    first: int = 99,
    capture_graphs: bool = True,
) -> tuple[list[object], int]:
    """What requests with these wishes are told, and how many steps were replayed.

    Busily: what is missing is recorded after every turn, too. First: so many shapes are recorded before; the others on
    demand.
    """
    model = OracleModel(300)
    stores = new_store(model.kv_geometry, 128, 4, CPU)
    runner = ModelRunner(
        model,
        stores,
        max_rows=5,
        max_length=128,
        row_kernels=row_kernels,
        max_step_tokens=24,
        on_demand=True,
        capture_graphs=capture_graphs,
    )
    for _ in range(first):
        runner.prepare()
    if first < 99:
        runner.step_times()
    scheduler = Scheduler(KVManager(128, 4, 5), max_rows=5, max_step_tokens=24)
    engine = Engine(scheduler, runner, RequestValidator(300, (), 128, 5, 128, 4), depth=1, seed=0, clock=lambda: 0.0)
    front = LocalClient(engine, None)
    tickets = []
    for place in range(14):
        wish = {"temperature": 0, "max_tokens": 6 + place % 5} | wishes[place % len(wishes)]
        params = SamplingParams(**wish)  # type: ignore[arg-type]
        tickets.append(front.submit([(place * 31 + i * 7) % 300 for i in range(2 + 3 * place)], params))
    while not all(ticket.finished for ticket in tickets):
        front.step()
        if busily:
            runner.prepare()
    assert runner.prepared or not busily, "what was forgotten is recorded again"
    outputs = [ticket.output().outputs[0] for ticket in tickets]
    return [(each.token_ids, each.finish_reason, each.logprobs) for each in outputs], runner.num_replayed


def test_extra_outputs_come_from_a_replayed_model_too() -> None:
    replayed, count = answers(REFERENCE_ROW_KERNELS)
    eager, none = answers(None)
    assert replayed == eager
    assert count > 15 and none == 0


def test_a_greedy_step_skips_the_sampling_stages() -> None:
    seen = set()

    def choose(logits: Tensor, rows: Tensor, positions: Tensor, table: SamplingTable, stages: SamplingStage) -> Sampled:
        drawing = bool(table.integers[rows[rows >= 0], 3].any())
        seen.add((drawing, stages))
        tokens = logits.argmax(dim=-1)  # of these logits one alone is possible
        return Sampled(tokens, torch.ones_like(rows, dtype=torch.bool))

    drawing = [{"seed": 5, "temperature": 0.8, "max_tokens": 4}, {"seed": 6, "temperature": 1.3, "top_k": 9}]
    replayed, count = answers(
        REFERENCE_ROW_KERNELS._replace(sample_tokens=choose), [{"max_tokens": 40}, {}, *drawing, {}]
    )
    assert (
        seen >= {(False, SamplingStage.GREEDY), (True, SamplingStage.DRAWN)}
        and (True, SamplingStage.GREEDY) not in seen
    )
    assert replayed == answers(None, [{"max_tokens": 40}, {}, *drawing, {}])[0] and count > 15


def test_kernels_that_wait_are_never_recorded_and_rows_end_as_ever() -> None:
    """Not even on demand, nor between steps; what ends rows on the device is the same."""
    finished: list[Sampled] = []

    def finish(chosen: Sampled, *given: Any) -> Tensor:
        finished.append(chosen)
        return REFERENCE_ROW_KERNELS.finish_rows(chosen, *given)

    never, none = answers(REFERENCE_ROW_KERNELS._replace(finish_rows=finish), busily=True, capture_graphs=False)
    assert never == answers(REFERENCE_ROW_KERNELS)[0]
    assert none == 0 and finished


def test_recording_while_others_run_changes_nothing_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that is recorded is also done, as it is before a CUDA graph is captured. Ever more end tokens come on the
    way, so that choices are forgotten and recorded again."""

    def capture(recorder: GraphCapturer, work: Replay) -> Replay:
        work()
        return work

    monkeypatch.setattr(GraphCapturer, "capture", capture)
    for wishes in (WISHES, GROWING):
        busy, count = answers(REFERENCE_ROW_KERNELS, wishes, busily=True)
        eager, _ = answers(None, wishes)
        assert busy == eager
        assert count > 15


def test_what_steps_were_without_for_too_long_is_recorded_before_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clocks say: recording costs next to nothing here, and every token too many a second."""
    monkeypatch.setattr(GraphCapturer, "capture", lambda recorder, work: (work(), work)[1])
    monkeypatch.setattr(graphs, "seconds_of", lambda replay, device: 1.0)
    monkeypatch.setattr(CapturePolicy, "is_faster_eager", lambda policy, step, shape: False)
    few, some = answers(REFERENCE_ROW_KERNELS, first=4)
    many, most = answers(REFERENCE_ROW_KERNELS)
    grown, _ = answers(REFERENCE_ROW_KERNELS, GROWING, first=4)
    assert few == many and some == most, "all steps are replayed, one way or the other"
    assert grown == answers(None, GROWING)[0]


def test_regrets_add_up_by_shape_until_they_reach_the_cost_of_recording() -> None:
    policy = CapturePolicy(lambda: 0.0)
    missing = [StepSize(4), StepSize(2), StepSize(4, 1, 8), StepSize(4, 2, 8)]
    policy.note_capture(StepSize(8), 9.0)
    policy.note_capture(StepSize(1), 1.0)
    assert policy.shape_to_capture(StepSize(2), StepSize(8), missing) is None, "what a token costs is not known"
    policy.token_s = 0.125
    assert policy.shape_to_capture(StepSize(2), StepSize(8), missing) is None, "0.75 s; a capture takes 1.25"
    assert policy.shape_to_capture(StepSize(3), StepSize(8), missing) is None, "0.5 s, of another"
    assert policy.shape_to_capture(StepSize(1), StepSize(8), missing) == StepSize(2), "1.5 s"
    assert policy.shape_to_capture(StepSize(8), StepSize(8), missing) is None
    chunk = StepSize(3, 1, 3)
    assert policy.shape_to_capture(chunk, None, missing) is None, "no such was recorded: its cost is not known"
    policy.note_capture(StepSize(4, 1, 16), 2.0)
    tries = [policy.shape_to_capture(chunk, None, missing) for _ in range(14)]
    assert tries == [None] * 13 + [StepSize(4, 1, 8)], "1.75 s instead of 1.5 each time; 2 s, and 1.5"
    assert policy.shape_to_capture(StepSize(1, 1, 1), None, missing) is None, (
        "1.25 s, and 1.5 in that shape: it would still be built"
    )


def test_a_step_is_built_where_that_takes_less_than_a_shape_that_is_too_large() -> None:
    now_s = 5.0
    policy = CapturePolicy(lambda: now_s)
    step, padded = StepSize(3, 1, 13), StepSize(3, 1, 14)
    policy.note_capture(StepSize(4, 1, 16), 2.0)
    assert not policy.is_faster_eager(step, StepSize(90, 1, 13)), "what a token costs is not known"
    policy.decode_s, policy.token_s = 0.5, 0.125
    assert not policy.is_faster_eager(step, StepSize(3, 1, 21)), "3 s, and 2 with 1 in which the host builds it"
    assert policy.is_faster_eager(step, StepSize(3, 1, 22))
    policy.note_launch(StepSize(1))
    assert not policy.is_faster_eager(step, StepSize(3, 1, 17)), "2.5 s: the decode hides half a second of launches"
    assert policy.is_faster_eager(step, StepSize(3, 1, 18))
    policy.note_launch(StepSize(0, 1, 8))
    assert policy.is_faster_eager(step, padded), "nobody waits for the host"
    assert not policy.is_faster_eager(step, step)
    now_s += 1.0
    assert not policy.is_faster_eager(step, StepSize(3, 1, 17)), "half a second is left"
    policy.note_idle()
    assert not policy.is_faster_eager(step, StepSize(3, 1, 21))
    assert not policy.is_faster_eager(StepSize(3), StepSize(90)), "decodes are replayed"


class Full(OracleModel):
    """A model for whose larger steps there is no memory."""

    def forward(
        self, tokens: torch.Tensor, layout: StepLayout, kv: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        if len(tokens) > 5:
            raise torch.OutOfMemoryError("no memory")
        return super().forward(tokens, layout, kv, wanted)


def test_without_memory_nothing_more_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphCapturer, "capture", lambda recorder, work: (work(), work)[1])
    model = Full(300)
    stores = new_store(model.kv_geometry, 128, 4, CPU)
    runner = ModelRunner(
        model, stores, max_rows=5, max_length=128, row_kernels=REFERENCE_ROW_KERNELS, max_step_tokens=24
    )
    for _ in range(10):
        runner.prepare()
    assert runner.prepared
    first = runner.launch(
        StepPlan(0, starts=(row_start(0, PROMPT[:3]),), grants=grants({0: [1]}), chunks=(sample(0, 0, 3),))
    ).wait()
    second = runner.launch(StepPlan(1, num_decoding=1)).wait()
    assert (len(first.rows), len(second.rows), runner.num_replayed) == (1, 1, 1), "decodes were recorded before"

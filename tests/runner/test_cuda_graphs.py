"""Steps that are recorded by shape: the same tokens as steps that are built, whoever comes, goes or ends."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.core.ids import RequestId, Row
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
from tests.tiers import examples

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

    def choose(self, shape: StepSize, stages: SamplingStage) -> torch.Tensor:
        self.stages = stages
        return self.everybody[: shape.rows].repeat(5, 1)


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

    report = check(examples(500, 1_200), 23, make_runner=make_runner, min_tokens=False)
    assert report.violations == [] and report.drafted > 80
    assert sum(runner.num_replayed for runner in runners) > 200


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
        capture_share=1.0,
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
    monkeypatch.setattr(graphs, "seconds_of", lambda replay, device, at_most_s: 1.0)
    monkeypatch.setattr(CapturePolicy, "is_worth_capturing", lambda policy, step, ran_as, missing: True)
    monkeypatch.setattr(CapturePolicy, "is_faster_eager", lambda policy, step, shape: False)
    few, some = answers(REFERENCE_ROW_KERNELS, first=4)
    many, most = answers(REFERENCE_ROW_KERNELS)
    grown, _ = answers(REFERENCE_ROW_KERNELS, GROWING, first=4)
    assert few == many and some == most, "all steps are replayed, one way or the other"
    assert grown == answers(None, GROWING)[0]


class Clock:
    """Says what it is told."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def test_a_busy_server_captures_what_its_steps_lack_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never idle, a new request for each that ends, and a small share of the time for captures. The times are made up:
    a step takes 2 to 20 ms, a capture 40 ms, and the engine takes a turn every 20 ms."""
    seconds = iter([0.002, 0.020])  # of one row, and of the largest step
    monkeypatch.setattr(graphs, "seconds_of", lambda replay, device, at_most_s: next(seconds))
    noted = CapturePolicy.note_capture
    monkeypatch.setattr(CapturePolicy, "note_capture", lambda policy, shape, seconds: noted(policy, shape, 0.040))
    model, clock = OracleModel(300), Clock()
    stores = new_store(model.kv_geometry, 256, 4, CPU)
    runner = ModelRunner(
        model, stores, max_rows=5, max_length=128, row_kernels=REFERENCE_ROW_KERNELS, max_step_tokens=24,
        capture_share=0.15,
    )  # fmt: skip
    assert runner._captured is not None
    runner._captured.graphs._policy = CapturePolicy(0.15, clock)
    for _ in range(3):  # two decodes, and a step with chunks
        runner.prepare()
    assert runner.step_times() is not None
    scheduler = Scheduler(KVManager(256, 4, 5), max_rows=5, max_step_tokens=24)
    engine = Engine(
        scheduler, runner, RequestValidator(300, (), 128, 5, 256, 4), depth=1, seed=0, clock=clock, preparing=runner
    )
    front = LocalClient(engine, None)
    params = [SamplingParams(temperature=0, max_tokens=5 + 3 * place) for place in range(4)]
    open_tickets = [front.submit([7, 3, place], params[place]) for place in range(4)]
    captured, eager = [], []
    for turn in range(600):
        front.step()
        clock.now_s += 0.020
        assert not engine.idle
        for place, ticket in enumerate(open_tickets):
            if ticket.finished:
                open_tickets[place] = front.submit([(turn + i) % 300 for i in range(1 + turn % 20)], params[place])
        captured.append(engine.launches.captured)
        eager.append(engine.launches.eager)
    assert captured[-1] > captured[0] + 1, "those that these steps lacked"
    assert captured[400] == captured[-1] and not runner.prepared, "and no others"
    assert eager[-1] == 0 and engine.launches.replayed > 500
    slow = [step for step, seconds in engine.launches.slow]
    assert len(slow) == captured[-1] - captured[0] and all(seconds > 0 for _, seconds in engine.launches.slow)
    told = engine.explain(RequestId(open_tickets[0].number))
    assert told.slow_steps.num_steps == len([step for step in slow if step in told.running_steps(10**9)])


def policy_of(share: float = 1.0, capture_s: float = 2.0) -> tuple[CapturePolicy, Clock]:
    """One that knows what captures take, and that a token takes 0.125 s; a step takes at least half a second."""
    clock = Clock()
    policy = CapturePolicy(share, clock)
    policy.note_capture(StepSize(4, 1, 16), 9.0)
    policy.note_capture(StepSize(4, 1, 16), capture_s)
    policy.decode_s, policy.token_s = 0.5, 0.125
    return policy, clock


def worth(policy: CapturePolicy, step: StepSize, ran_as: StepSize | None, missing: StepSize, times: int) -> list[bool]:
    return [policy.is_worth_capturing(step, ran_as, missing) for _ in range(times)]


def test_regrets_add_up_by_shape_until_they_reach_the_pause() -> None:
    policy, clock = policy_of()
    step, large, fine = StepSize(3, 1, 13), StepSize(8, 1, 16), StepSize(4, 1, 16)
    assert not policy.is_worth_capturing(step, large, StepSize(8, 1, 16)), "it would save nothing"
    assert worth(policy, step, large, fine, 4) == [False, False, False, True], "0.5 s each; a capture pauses for 2 s"
    clock.now_s += 9.0
    other = StepSize(4, 1, 12)
    assert worth(policy, StepSize(1, 1, 12), fine, other, 3) == [False] * 3, "0.5 s each, of another"


def test_nothing_is_captured_before_its_cost_is_known() -> None:
    policy = CapturePolicy(1.0, lambda: 0.0)
    step, missing = StepSize(3, 1, 13), StepSize(4, 1, 16)
    policy.note_capture(missing, 1.0)
    assert not policy.is_worth_capturing(step, None, missing), "what a token costs is not known"
    policy.token_s = 0.125
    assert not policy.is_worth_capturing(StepSize(3), StepSize(90), StepSize(4)), "no decode was captured"


def test_a_step_that_no_shape_holds_pays_for_the_capture_at_once_where_the_host_is_slower() -> None:
    policy, _ = policy_of(capture_s=6.0)
    step, missing = StepSize(3, 1, 13), StepSize(4, 1, 16)
    assert worth(policy, step, None, missing, 2) == [False, True], "it computes for 2.5 s; launches take 6"
    policy, _ = policy_of(capture_s=6.0)
    policy.note_launch(StepSize(0, 1, 20))
    assert policy.is_worth_capturing(step, None, missing), "the device is busy for 2.5 s, which hides as much"
    policy, _ = policy_of(capture_s=6.0)
    policy.note_launch(StepSize(0, 1, 48))
    assert policy.is_worth_capturing(step, None, StepSize(3, 1, 13)), "hidden altogether: it costs nothing"
    assert not policy.is_worth_capturing(step, None, missing), "and a shape with padding gains nothing"


def test_captures_pause_steps_for_a_bounded_share_of_the_time() -> None:
    """By the clock alone: in 100 s, of 15 % and what may come at once."""
    clock = Clock()
    policy = CapturePolicy(0.15, clock)
    policy.note_capture(StepSize(4, 1, 16), 0.02)
    policy.decode_s, policy.token_s = 0.004, 20e-6
    captured = 0
    for turn in range(10_000):
        clock.now_s += 0.01
        missing = StepSize(4, 1, 100 + turn % 50)
        for _ in range(9):  # enough to regret it
            policy._lost_s[missing] += 1.0
        captured += policy.is_worth_capturing(StepSize(4, 1, 100), StepSize(4, 1, 300), missing)
    per_capture_s = 0.02 - 20e-6 * 150
    assert captured * per_capture_s <= 0.15 * 100 + 0.1 + 0.02
    assert captured * 0.02 > 0.15 * 100 * 0.8, "and they do come"


def test_the_share_is_not_charged_where_the_step_becomes_no_longer() -> None:
    policy, _ = policy_of(share=0.001, capture_s=2.0)
    step, huge = StepSize(3, 1, 13), StepSize(40, 1, 16)
    for tokens in range(14, 30):
        assert policy.is_worth_capturing(step, huge, StepSize(3, 1, tokens)), "7 s, or a pause of 2 s and 2 to 4 s"
    fine = StepSize(4, 1, 16)
    assert worth(policy, step, StepSize(8, 1, 16), fine, 4) == [False] * 3 + [True], "a step of 3 s takes 4.5"
    assert not any(worth(policy, step, StepSize(8, 1, 16), StepSize(3, 1, 16), 9)), "not twice"


def test_an_eager_step_counts_with_its_launches_unless_they_are_hidden() -> None:
    policy, clock = policy_of()
    step, padded = StepSize(3, 1, 3), StepSize(3, 1, 14)
    fresh = CapturePolicy(1.0, clock)
    assert not fresh.is_faster_eager(step, StepSize(90, 1, 13)), "what a token costs is not known"
    assert not policy.is_faster_eager(step, StepSize(3, 1, 13)), "2 s as a replay, and 2 s of launches"
    assert policy.is_faster_eager(step, padded)
    policy.note_launch(StepSize(1, 1, 14))
    assert policy.is_faster_eager(step, padded), "1.875 s: the device is not busy for all of the launches"
    assert not policy.is_faster_eager(step, StepSize(3, 1, 13))
    policy.note_launch(StepSize(1))
    assert policy.is_faster_eager(step, StepSize(3, 1, 5)), "nothing waits for the host"
    assert not policy.is_faster_eager(step, step)
    clock.now_s += 1.0
    assert not policy.is_faster_eager(step, StepSize(3, 1, 13)), "no longer busy for long enough"
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


def test_the_memory_of_other_captures_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Recording(StepSize(4)).graphs
    free = iter((1000, 700, 650, 400))
    monkeypatch.setattr(GraphCapturer, "free_bytes", lambda capturer: next(free))
    captured: list[str] = []
    steps.count(lambda: captured.append("passes"))
    steps.capture(StepSize(4))
    assert captured == ["passes"]
    assert (steps.counts.captured_bytes, steps.counts.captured) == (550, 1)

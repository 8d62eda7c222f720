"""Ranks whose steps are recorded by shape: all record the same ones in the same order, as rank 0 decides.

On a CPU a replay computes the step again with its padding: ranks that took another shape would add up tensors of other
sizes, which gloo refuses or never ends.
"""

import socket
import threading
from collections.abc import Callable

import pytest
import torch

from quire.core.sampling import SamplingParams
from quire.dist.process_group import ProcessGroup
from quire.engine.engine import Engine
from quire.engine.local_client import LocalClient
from quire.engine.request_validator import RequestValidator
from quire.kernels.cpu.torch_kernels import TorchCpuKernels
from quire.kv.manager import KVManager
from quire.models.decoder import Decoder
from quire.runner import cuda_graphs
from quire.runner.cuda_graphs import GraphCapturer, GraphedSteps, Replay
from quire.runner.graph_shapes import CapturePolicy, StepSize
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.runner.tensor_parallel import TensorParallelRunner, follow
from quire.sched.scheduler import Scheduler
from tests.models.families import FAMILIES, VOCAB, Twin, build
from tests.models.shards import cut, on_ranks
from tests.runner.reference_row_kernels import REFERENCE_ROW_KERNELS

ROWS, STEP_TOKENS, LENGTH, BLOCKS, BLOCK_SIZE = 4, 20, 48, 64, 4
FIRST = 4  # shapes that are recorded before the first request
Shapes = list[StepSize | None]
ON_RANK = threading.local()  # the number of the rank that a thread is


class Ranks:
    """What each rank recorded, and what it is told by its own clock: the other ranks would decide otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded: dict[int, Shapes] = {}  # by capturer
        captured = GraphedSteps.capture

        def capture(steps: GraphedSteps, shape: StepSize | None) -> None:
            self.recorded.setdefault(id(steps), []).append(shape)
            captured(steps, shape)

        monkeypatch.setattr(GraphedSteps, "capture", capture)
        monkeypatch.setattr(CapturePolicy, "is_worth_capturing", lambda *_: ON_RANK.number == 0)
        monkeypatch.setattr(CapturePolicy, "is_faster_eager", lambda *_: ON_RANK.number == 1)
        monkeypatch.setattr(cuda_graphs, "seconds_of", lambda replay, device, at_most_s: 1.0)


def recording(twin: Twin, group: ProcessGroup | None) -> ModelRunner:
    spec = twin.spec if group is None else group.shard.spec(twin.spec)
    weights = twin.weights if group is None else cut(twin.weights, twin.spec, group.shard)
    model = Decoder(spec, weights, TorchCpuKernels(), LENGTH, group)
    runner = ModelRunner(
        model,
        new_store(model.kv_geometry, BLOCKS, BLOCK_SIZE, torch.device("cpu")),
        max_rows=ROWS,
        max_length=LENGTH,
        row_kernels=REFERENCE_ROW_KERNELS,
        max_step_tokens=STEP_TOKENS,
        capture_share=1.0,
        least=None if group is None else group.least,
    )
    for _ in range(FIRST):
        runner.prepare()
    runner.step_times()
    return runner


def answers(runner: ModelRunner | TensorParallelRunner, between: Callable[[], None] = lambda: None) -> list[list[int]]:
    scheduler = Scheduler(KVManager(BLOCKS, BLOCK_SIZE, ROWS), max_rows=ROWS, max_step_tokens=STEP_TOKENS)
    validator = RequestValidator(VOCAB, (), LENGTH, ROWS, BLOCKS, BLOCK_SIZE)
    front = LocalClient(Engine(scheduler, runner, validator, depth=1, seed=0, clock=lambda: 0.0), None)
    tickets = [
        front.submit(
            [(place * 31 + i * 7) % VOCAB for i in range(2 + 3 * place)],
            SamplingParams(temperature=0, max_tokens=4 + place % 5, logprobs=1 if place == 2 else None),
        )
        for place in range(6)
    ]
    while not all(ticket.finished for ticket in tickets):
        front.step()
        between()
    return [list(ticket.output().outputs[0].token_ids) for ticket in tickets]


def two_ranks(twin: Twin, *, busily: bool) -> tuple[list[list[int]], int]:
    """What they answer, and how many steps were replayed. Busily: rank 0 has idle time between steps, too."""
    ours, theirs = socket.socketpair()

    def work(group: ProcessGroup) -> tuple[list[list[int]], int]:
        ON_RANK.number = group.shard.rank
        runner = recording(twin, group)
        if group.shard.rank:
            with theirs:
                follow(runner, theirs, capturing=runner, run_ahead=True)
            return [], runner.num_replayed
        with ours:
            leading = TensorParallelRunner(runner, [ours], lambda: None, runner)
            return answers(leading, leading.prepare if busily else lambda: None), runner.num_replayed

    (found, num_replayed), (_, num_followed) = on_ranks(2, work)
    assert num_replayed == num_followed
    return found, num_replayed


@pytest.fixture(scope="module")
def twin() -> Twin:
    return build(next(family for family in FAMILIES if family.name == "qwen3"))


@pytest.mark.parametrize("busily", [False, True], ids=["on demand", "when idle"])
def test_ranks_record_what_rank_0_decides(twin: Twin, busily: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(recording(twin, None))
    ranks = Ranks(monkeypatch)
    found, num_replayed = two_ranks(twin, busily=busily)
    assert found == expected and num_replayed > 10
    first, second = ranks.recorded.values()
    assert first == second
    assert len([shape for shape in first if shape is not None]) > FIRST, "some were recorded between steps"


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("full"), RuntimeError("not before a run")])
def test_a_capture_that_fails_on_one_rank_fails_on_all(
    twin: Twin, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory, none has the graph, and none captures more. What must run first runs on all."""
    expected = answers(recording(twin, None))
    ranks, tried = Ranks(monkeypatch), [0, 0]

    def capture(capturer: GraphCapturer, work: Replay) -> Replay:
        tried[ON_RANK.number] += 1
        if tried[ON_RANK.number] == 9 and ON_RANK.number == 1:
            raise failure
        return work

    monkeypatch.setattr(GraphCapturer, "_capture", capture)
    found, num_replayed = two_ranks(twin, busily=True)
    assert found == expected and num_replayed > 5
    first, second = ranks.recorded.values()
    assert first == second
    shapes = [shape for shape in first if shape is not None]
    assert (len(shapes) <= FIRST) == isinstance(failure, torch.OutOfMemoryError)

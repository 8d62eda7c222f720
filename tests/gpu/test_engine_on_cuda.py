"""The engine on a GPU: recorded steps, built steps and the plain reference say the same; so does the integer oracle."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from quire.core.model import ModelSpec
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.engine.local_client import LocalClient
from quire.engine.oracle_runner import TorchOracleRunner, torch_oracle
from quire.engine.request_validator import RequestValidator
from quire.formats.presets import SHAPES
from quire.kernels.interface import Kernels
from quire.kernels.reference import ReferenceKernels
from quire.kernels.select import KernelChoice, select_kernels
from quire.kv.manager import KVManager
from quire.models.decoder import Decoder
from quire.runner.graph_shapes import CapturePolicy
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.sched.scheduler import Scheduler
from quire.sim.check.check import check
from quire.sim.check.scenario import Scenario
from quire.weights.allocate import dummy_weights

CUDA = torch.device("cuda")
NUM_BLOCKS, BLOCK_SIZE, LENGTH, ROWS = 512, 16, 512, 20


@pytest.fixture(scope="module")
def choice() -> KernelChoice:
    chosen = select_kernels("cuda")
    assert chosen.row_kernels is not None, chosen.reason
    return chosen


def run(
    spec: ModelSpec,
    kernels: Kernels,
    params: Callable[[int], SamplingParams],
    choice: KernelChoice | None,
    count: int = 24,
    *,
    on_demand: bool = False,
) -> tuple[list[list[int]], int]:
    """What so many requests say, on 20 rows, in steps of 96 tokens; and how many steps were replayed. On demand: only
    the first shapes are captured before, the others between steps, each when it is first missed."""
    model = Decoder(spec, dummy_weights(spec, torch.float32, CUDA, 3).filled(), kernels, LENGTH)
    stores = new_store(model.kv_geometry, NUM_BLOCKS, BLOCK_SIZE, CUDA)
    stores.device.fill_(torch.nan)  # nothing that was not written is read
    row_kernels = None if choice is None else choice.row_kernels
    runner = ModelRunner(
        model,
        stores,
        max_rows=ROWS,
        max_length=LENGTH,
        row_kernels=row_kernels,
        max_step_tokens=96 if on_demand else 0,
        capture_share=float(on_demand),
    )
    while not runner.prepared if not on_demand else runner.launches.captured < runner.num_first:
        runner.prepare()
    if on_demand:
        runner.step_times()
    door = RequestValidator(spec.vocab_size, (), LENGTH, ROWS, NUM_BLOCKS, BLOCK_SIZE)
    scheduler = Scheduler(KVManager(NUM_BLOCKS, BLOCK_SIZE, ROWS), max_rows=ROWS, max_step_tokens=96)
    front = LocalClient(Engine(scheduler, runner, door, depth=1, seed=0, clock=lambda: 0.0), None)
    prompts = [[(7 * i + 13 * j * j) % spec.vocab_size for i in range(3 + 11 * j)] for j in range(count)]
    tickets = [front.submit(prompt, params(place)) for place, prompt in enumerate(prompts)]
    while not all(ticket.finished for ticket in tickets):
        front.step()
    return [ticket.output().outputs[0].token_ids for ticket in tickets], runner.num_replayed


def greedy(place: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=4 + place)


def mixed(place: int) -> SamplingParams:
    """Every fifth asks for something that is not replayed."""
    kinds: list[dict[str, object]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": place},
        {"temperature": 1.2, "seed": place, "top_k": 7},
        {"temperature": 0.9, "seed": place, "top_p": 0.7, "min_p": 0.01},
        {"temperature": 0.5, "seed": place, "presence_penalty": 0.4},
    ]
    return SamplingParams(max_tokens=4 + place, **kinds[place % 5 if place > 18 else place % 4])  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", ["smollm2-135m", "qwen3-0.6b"])
@pytest.mark.parametrize("params", [greedy, mixed])
def test_graphs_eager_steps_and_reference_agree(shape: str, params: Callable, choice: KernelChoice) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    spec = SHAPES[shape]
    replayed, count = run(spec, choice.kernels, params, choice)
    built, none = run(spec, choice.kernels, params, None)
    assert count > 10 and none == 0
    assert replayed == built


@pytest.mark.parametrize("params", [greedy, mixed])
def test_graphs_captured_between_steps_in_flight_agree(
    params: Callable, choice: KernelChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up of the first model has loaded what the second captures without one."""
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setattr(CapturePolicy, "is_worth_capturing", lambda policy, step, ran_as, missing: True)
    spec = SHAPES["qwen3-0.6b"]
    built, _ = run(spec, choice.kernels, params, None)
    replayed, count = run(spec, choice.kernels, params, choice, on_demand=True)
    assert count > 10 and replayed == built


def test_the_reference_kernels_generate_the_same(choice: KernelChoice) -> None:
    """It is slow: a few layers and requests, in whole numbers of blocks and beyond."""
    torch.backends.cuda.matmul.allow_tf32 = False
    spec = replace(SHAPES["qwen3-0.6b"], num_layers=3)
    built, _ = run(spec, choice.kernels, greedy, choice, count=4)
    truth, _ = run(spec, ReferenceKernels(), greedy, None, count=4)
    assert built == truth


def test_the_integer_oracle_in_cuda_graphs(choice: KernelChoice) -> None:
    runners: list[TorchOracleRunner] = []

    def make_runner(scenario: Scenario) -> TorchOracleRunner:
        runners.append(torch_oracle(scenario, "cuda", choice.row_kernels, choice.copy_blocks))
        return runners[-1]

    assert check(1_000, 17, make_runner=make_runner, min_tokens=False).violations == []
    assert sum(runner.num_replayed for runner in runners) > 150

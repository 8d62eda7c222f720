"""The same runner on the GPU: CUDA is a choice of kernels, not another runner."""

from functools import partial

import pytest
import torch

from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.engine.local_client import LocalClient
from quire.engine.oracle_runner import torch_oracle
from quire.engine.request_validator import RequestValidator
from quire.formats.presets import SHAPES
from quire.kernels.reference import ReferenceKernels
from quire.kv.manager import KVManager
from quire.models.decoder import Decoder
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.sched.scheduler import Scheduler
from quire.sim.check.check import check
from quire.sim.check.scenario import ScenarioEvent
from quire.weights.allocate import dummy_weights

NUM_BLOCKS = 64
BLOCK_SIZE = 16


def test_the_integer_model_behind_the_real_runner_on_the_gpu() -> None:
    """Grammar masks, partitions, and lost steps of which some copies and writes did not happen."""
    report = check(1_500, 11, make_runner=partial(torch_oracle, device="cuda"), min_tokens=False)
    assert report.violations == []
    assert {ScenarioEvent.ARRIVE_MASKED, ScenarioEvent.LOSE, ScenarioEvent.DEMOTE} <= set(report.events)


def _greedy(device: str, prompts: list[list[int]]) -> list[list[int]]:
    spec = SHAPES["smollm2-135m"]
    weights = dummy_weights(spec, torch.float32, device).filled()
    model = Decoder(spec, weights, ReferenceKernels(), max_length=256)
    kv = new_store(model.kv_geometry, NUM_BLOCKS, BLOCK_SIZE, torch.device(device))
    runner = ModelRunner(model, kv, max_rows=8, max_length=256)
    door = RequestValidator(spec.vocab_size, (), 256, 8, NUM_BLOCKS, BLOCK_SIZE)
    scheduler = Scheduler(KVManager(NUM_BLOCKS, BLOCK_SIZE, 8), max_rows=8, max_step_tokens=32)
    front = LocalClient(Engine(scheduler, runner, door, depth=1, seed=0, clock=lambda: 0.0), None)
    params = SamplingParams(temperature=0, max_tokens=8)
    tickets = [front.submit(prompt, params) for prompt in prompts]
    while not all(ticket.finished for ticket in tickets):
        front.step()
    return [ticket.output().outputs[0].token_ids for ticket in tickets]


@pytest.mark.parametrize("count", [1, 5])
def test_the_decoder_agrees_on_gpu_and_cpu(count: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = [[(7 * i + 13 * j) % 49152 for i in range(5 + 9 * j)] for j in range(count)]
    assert _greedy("cuda", prompts) == _greedy("cpu", prompts)

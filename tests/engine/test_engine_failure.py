"""After a fatal step failure an engine rejects new requests with the reason."""

import pytest

from quire.core.errors import EngineFailed
from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason, StepLost, StepPlan
from quire.engine.engine import Engine
from quire.engine.local_client import LocalClient
from quire.engine.messages import AddRequest
from quire.engine.request_validator import RequestValidator
from quire.kv.manager import KVManager
from quire.sched.scheduler import Scheduler
from quire.sim.runners import FinishedStep, ToyRunner


class FailingRunner:
    """A ToyRunner that can be made to fail."""

    def __init__(self) -> None:
        self._toy = ToyRunner(50)
        self.broken = False
        self.lost: StepLost | None = None  # raised by the next step

    def launch(self, plan: StepPlan) -> FinishedStep:
        if self.lost is not None:
            lost, self.lost = self.lost, None
            raise lost
        if self.broken:
            raise MemoryError("out of memory")
        return self._toy.launch(plan)


def engine_of(runner: FailingRunner) -> Engine:
    validator = RequestValidator(vocab_size=50, end_ids=(), max_length=100, max_rows=2, num_blocks=10, block_size=4)
    scheduler = Scheduler(KVManager(10, 4, 2), max_rows=2, max_step_tokens=8)
    return Engine(scheduler, runner, validator, depth=0, seed=0, clock=lambda: 0.0)


def test_an_engine_whose_steps_all_fail_rejects_new_requests_with_the_reason() -> None:
    runner = FailingRunner()
    engine = engine_of(runner)
    engine.submit(AddRequest(0, [1, 2], SamplingParams(max_tokens=5)))
    assert engine.step() is not None
    runner.broken = True
    for number in range(1, 3):  # each fails alone, and is blamed for it
        progress = engine.step()
        assert progress is not None and [over.reason for over in progress.finished] == [FinishReason.FAILED]
        engine.submit(AddRequest(number, [1, 2], SamplingParams(max_tokens=5)))
    with pytest.raises(MemoryError):
        engine.step()
    with pytest.raises(EngineFailed, match="out of memory"):
        engine.step()
    with pytest.raises(EngineFailed, match="load the model again"):
        engine.submit(AddRequest(9, [1], SamplingParams()))


def test_out_of_memory_ends_the_largest_request_with_its_numbers() -> None:
    runner = FailingRunner()
    client = LocalClient(engine_of(runner), tokenizer=None)
    small = client.submit([1, 2], SamplingParams(max_tokens=3))
    large = client.submit([3, 4, 5], SamplingParams(max_tokens=17))
    client.step()
    runner.lost = StepLost("out of memory", too_large=True)
    while not client.idle:
        client.step()
    (ended,) = large.output().outputs
    assert ended.finish_reason == "out_of_memory"
    assert ended.error is not None
    assert ended.error.startswith("Out of memory for a step: the largest request was ended")
    assert "3 prompt tokens and up to 17 more" in ended.error
    assert small.output().outputs[0].finish_reason == "length"

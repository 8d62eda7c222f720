"""The memory ledger adds up, and a step that runs out of memory fails only the largest request."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason
from quire.engine.engine import Engine
from quire.engine.local_client import LocalClient
from quire.engine.request_validator import RequestValidator
from quire.engine.stats import MemoryUsage, account_memory
from quire.kernels.interface import StepLayout
from quire.kv.manager import KVManager
from quire.models.oracle import OracleModel
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.sched.scheduler import Scheduler

VOCAB, BLOCKS, BLOCK, ROWS = 97, 64, 4, 4
sizes = st.integers(0, 10**12)


@given(sizes, sizes, sizes, sizes, sizes, sizes)
def test_the_ledger_adds_up(weights: int, kv: int, graphs: int, other: int, workspace: int, free: int) -> None:
    total = weights + kv + graphs + other + free
    ledger = account_memory(weights=weights, kv=kv, graphs=graphs, workspace=workspace, free=free, total=total)
    assert ledger.weights + ledger.kv + ledger.graphs + ledger.other + ledger.workspace + ledger.free == total
    assert ledger.other == other and ledger.workspace == min(workspace, free)


@given(sizes, sizes, sizes, sizes)
def test_graphs_captured_later_are_taken_from_what_was_free(
    at_ready: int, more: int, workspace: int, free: int
) -> None:
    ledger = MemoryUsage(weights=5, graphs=at_ready, workspace=workspace, free=free)
    later = ledger.with_graphs(at_ready + more)
    assert later.graphs == at_ready + more and later.free == max(free - more, 0) and later.weights == 5
    assert later.workspace == max(min(workspace, workspace + free - more), 0)
    assert ledger.with_graphs(0) == ledger, "an engine that has said nothing yet"


def test_zero_entries_are_not_reported() -> None:
    assert MemoryUsage(weights=3 << 30, kv=1 << 29).describe() == "weights 3.00 GiB · kv 0.50 GiB"


class SmallMemoryModel(OracleModel):
    """Runs out of memory in steps of more than `max_tokens` tokens."""

    max_tokens = 12

    def forward(self, tokens: Tensor, layout: StepLayout, kv: Tensor, wanted: Tensor | None = None) -> Tensor:
        if len(tokens) > self.max_tokens:
            raise torch.OutOfMemoryError(f"tried to allocate {len(tokens)} tokens")
        return super().forward(tokens, layout, kv, wanted)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_out_of_memory_fails_only_the_largest_request(depth: int) -> None:
    model = SmallMemoryModel(VOCAB)
    stores = new_store(model.kv_geometry, BLOCKS, BLOCK, torch.device("cpu"))
    runner = ModelRunner(model, stores, max_rows=ROWS, max_length=64)
    validator = RequestValidator(VOCAB, (), 64, ROWS, BLOCKS, BLOCK)
    scheduler = Scheduler(KVManager(BLOCKS, BLOCK, ROWS), max_rows=ROWS, max_step_tokens=64)
    parts: list[str] = []

    class Span:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            parts.append(self.name)

        def __exit__(self, *error: object) -> None:
            parts.append(f"/{self.name}")

    engine = Engine(scheduler, runner, validator, depth=depth, seed=0, clock=lambda: 0.0, span=Span)
    client = LocalClient(engine, None)
    params = SamplingParams(temperature=0, max_tokens=5)
    small, large = client.submit([3, 1, 4], params), client.submit(list(range(40)), params)
    for _ in range(60):
        client.step()
    assert large.output().outputs[0].finish_reason == FinishReason.OUT_OF_MEMORY.value
    sequence = small.output().outputs[0]
    assert (len(sequence.token_ids), sequence.finish_reason) == (5, "length")
    assert {"plan", "launch", "wait", "absorb"} <= set(parts)
    assert parts.count("absorb") == parts.count("/absorb") > 3, "every span is closed"

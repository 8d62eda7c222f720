"""CUDA graphs on a GPU: a capture runs nothing, what failed is captured again, and garbage does not break it."""

import gc

import pytest
import torch
from torch import Tensor

from quire.runner.cuda_graphs import GraphCapturer

CUDA = torch.device("cuda")


class Ring:
    """Something that only the garbage collector frees, as engines are: it knows itself."""

    def __init__(self, held: object) -> None:
        self.held, self.itself = held, self


@pytest.fixture
def eager_collector():
    """Garbage is looked for at every occasion."""
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("eager_collector")
def test_a_graph_survives_the_graphs_of_a_deleted_engine() -> None:
    x = torch.ones(1000, device=CUDA)
    old = [Ring(GraphCapturer(CUDA).capture(lambda: x + 1)) for _ in range(2)]

    def doubled() -> Tensor:
        old.clear()  # within the capture
        occasions = [[] for _ in range(100)]
        return x * 2 + len(occasions)

    replay = GraphCapturer(CUDA).capture(doubled)
    assert not old
    x.fill_(3.0)
    assert torch.equal(replay(), torch.full_like(x, 106.0))


LONG = 1_000_000_000  # cycles: half a second


def test_a_capture_does_not_run_and_need_not_wait_for_what_is_in_flight() -> None:
    """The driver waits now and then, when it needs memory for a graph."""
    x, weight = torch.ones(64, 64, device=CUDA), torch.eye(64, device=CUDA)
    runs = torch.zeros(1, device=CUDA)

    def work() -> Tensor:
        runs.add_(1)
        return torch.mm(x, weight) * 2

    capturer = GraphCapturer(CUDA)
    captured, has_waited = [capturer.capture(work)], []  # cuBLAS takes its workspace
    for number in range(8):
        done = torch.cuda.Event()
        torch.cuda._sleep(LONG)
        x.fill_(float(number))
        done.record()
        captured.append(capturer.capture(work))
        has_waited.append(done.query())
        result = captured[-1]()
        assert torch.equal(result, torch.full_like(x, 2.0 * number)), "a replay is behind what is queued"
    assert runs.item() == 8, "once for each replay"
    assert not all(has_waited)


def test_what_fails_before_its_first_run_is_run_and_captured_again() -> None:
    x, known = torch.ones(8, device=CUDA), []

    def work() -> Tensor:
        if not known:
            known.append(x.sum().item())  # waits for the device, which no capture may
        return x * known[0]

    replay = GraphCapturer(CUDA).capture(work)
    x.fill_(2.0)
    assert replay().tolist() == [16.0] * 8


def test_a_capture_without_memory_says_so_and_the_next_succeeds() -> None:
    x, capturer = torch.ones(8, device=CUDA), GraphCapturer(CUDA)
    with pytest.raises(torch.OutOfMemoryError):
        capturer.capture(lambda: torch.empty(1 << 50, dtype=torch.int8, device=CUDA))
    replay = capturer.capture(lambda: x + 1)
    assert replay().tolist() == [2.0] * 8

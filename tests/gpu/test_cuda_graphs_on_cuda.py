"""CUDA graphs on a GPU: garbage of the process must not break a capture."""

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
        old.pop()  # one before the capture, one within it
        occasions = [[] for _ in range(100)]
        return x * 2 + len(occasions)

    replay = GraphCapturer(CUDA).capture(doubled)
    assert not old
    x.fill_(3.0)
    assert torch.equal(replay(), torch.full_like(x, 106.0))

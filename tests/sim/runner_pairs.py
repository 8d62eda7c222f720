"""Both oracle runners on the same plans, compared with each other and with the closed form."""

from itertools import islice

import numpy as np

from quire.core.oracle import candidates, continuation, total
from quire.core.step import Candidates, StepPlan, StepResult
from quire.engine.oracle_runner import TorchOracleRunner
from quire.kernels.row_interface import RowKernels
from quire.sim.runners import OracleRunner
from tests.runner.plans import emitted

VOCAB = 97
BLOCK = 4
NUM_BLOCKS = 24
NUM_HOST_BLOCKS = 8


class RunnerPair:
    """The numpy oracle, and the torch runner with the integer model."""

    def __init__(self, device: str = "cpu", row_kernels: RowKernels | None = None) -> None:
        self.numpy = OracleRunner(NUM_BLOCKS, BLOCK, VOCAB, NUM_HOST_BLOCKS)
        self.torch = TorchOracleRunner(
            vocab_size=VOCAB,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK,
            num_host_blocks=NUM_HOST_BLOCKS,
            max_rows=4,
            max_length=40,
            device=device,
            row_kernels=row_kernels,
        )

    def run(self, plan: StepPlan) -> StepResult:
        """The result of both, which must be equal."""
        numpy, torch = self.numpy.launch(plan).wait(), self.torch.launch(plan).wait()
        assert emitted(numpy) == emitted(torch)
        assert set(numpy.ended) == set(torch.ended)
        assert numpy.candidates.keys() == torch.candidates.keys()
        for row, likeliest in numpy.candidates.items():
            assert_same(torch.candidates[row], likeliest)
        assert {row: sums.tolist() for row, sums in numpy.pooled.items()} == {
            row: sums.tolist() for row, sums in torch.pooled.items()
        }
        return numpy


def assert_same(found: Candidates, expected: Candidates) -> None:
    """Bit for bit: the oracle's logits are such that no softmax rounds them."""
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.logprobs.tolist() == expected.logprobs.tolist()


def following(known: list[int], count: int, index: int = 0) -> list[int]:
    return list(islice(continuation(np.array(known, np.int32), VOCAB, index), count))


def after(known: list[int], count: int) -> Candidates:
    return candidates(total(np.array(known, np.int32)), VOCAB, count)

"""The bodies that judge each other: both oracles on the same plans, and the closed form beside them."""

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


class Bodies:
    """The numpy oracle and the integer model behind the torch runner, side by side."""

    def __init__(self, device: str = "cpu", row_kernels: RowKernels | None = None) -> None:
        self.paper = OracleRunner(NUM_BLOCKS, BLOCK, VOCAB, NUM_HOST_BLOCKS)
        self.metal = TorchOracleRunner(
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
        """What both say."""
        paper, metal = self.paper.launch(plan).wait(), self.metal.launch(plan).wait()
        assert emitted(paper) == emitted(metal)
        assert set(paper.ended) == set(metal.ended)
        assert paper.candidates.keys() == metal.candidates.keys()
        for row, likeliest in paper.candidates.items():
            assert_same(metal.candidates[row], likeliest)
        assert {row: sums.tolist() for row, sums in paper.pooled.items()} == {
            row: sums.tolist() for row, sums in metal.pooled.items()
        }
        return paper


def assert_same(found: Candidates, expected: Candidates) -> None:
    """Bit for bit: the oracle's scores are made so that no softmax rounds them."""
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.logprobs.tolist() == expected.logprobs.tolist()


def following(known: list[int], count: int, index: int = 0) -> list[int]:
    return list(islice(continuation(np.array(known, np.int32), VOCAB, index), count))


def after(known: list[int], count: int) -> Candidates:
    return candidates(total(np.array(known, np.int32)), VOCAB, count)

"""The sampling kernels against the chain of tensor operations: the same tokens, whatever the rows ask for."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.core.ids import Row, SequenceId
from quire.core.sampling import RowSampling
from quire.core.step import RowStart
from quire.kernels.gpu.sampling import sample
from quire.kernels.gpu.sampling.finish import finish_rows
from quire.kernels.gpu.sampling.sample import _scratch as new_scratch
from quire.kernels.row_interface import RowState, Sampled, SamplingStage
from quire.runner.row_table import RowTable
from quire.sampling.row_params import SamplingBatch
from quire.sampling.sampler import Sampler
from tests.kernels.gpu_row_kernels import GPU_ROW_KERNELS
from tests.tiers import examples, long_only

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

GREEDY = RowSampling()
MIXTURE = (
    GREEDY,
    RowSampling(temperature=1.0),
    RowSampling(temperature=0.6, min_p=0.05),
    RowSampling(temperature=0.7, top_k=1),
    RowSampling(temperature=1.3, top_k=40),
    RowSampling(temperature=0.8, top_p=0.9),
    RowSampling(temperature=2.0, top_p=0.999),
    RowSampling(temperature=1.0, top_k=20, top_p=0.6),
    RowSampling(temperature=1.5, top_k=300, top_p=0.95, min_p=0.002),
    RowSampling(temperature=1e-9, top_p=0.5),
)


def samplers(samplings: list[RowSampling], vocab_size: int) -> tuple[Sampler, Sampler]:
    """One that has the kernel and one that has not, with these rows; row i has sequence index i."""
    pair = (Sampler(len(samplings), vocab_size, DEVICE, GPU_ROW_KERNELS), Sampler(len(samplings), vocab_size, DEVICE))
    for sampler in pair:
        for row, sampling in enumerate(samplings):
            tokens = np.zeros(1, dtype=np.int32)
            sampler.assign([RowStart(Row(row), SequenceId(row), row, tokens, 1, 1000, sampling)])
    return pair


def batch_of(rows: list[int], position: int) -> SamplingBatch:
    positions = torch.full((len(rows),), position, device=DEVICE)
    return SamplingBatch(torch.tensor(rows, device=DEVICE), np.array(rows, dtype=np.int32), positions)


def agree(samplings: list[RowSampling], logits: Tensor, position: int = 5) -> Sampled:
    quick, plain = samplers(samplings, logits.shape[1])
    batch = batch_of(list(range(len(samplings))), position)
    untouched = logits.clone()
    chosen, truth = quick.sample(logits, batch), plain.sample(logits, batch)
    assert chosen.tokens.tolist() == truth.tokens.tolist()
    assert chosen.finite.tolist() == truth.finite.tolist()
    assert torch.equal(logits.nan_to_num(), untouched.nan_to_num())
    return chosen


def normal(num_rows: int, vocab_size: int, spread: float = 4.0) -> Tensor:
    return (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * spread).to(DEVICE)


@pytest.mark.parametrize(
    ("vocab_size", "spread"), [(1, 1.0), (1000, 0.05), (2500, 6.0), *long_only([(1000, 1.0)], gpu=True)]
)
def test_every_kind_of_row_gets_the_token_of_the_reference(vocab_size: int, spread: float) -> None:
    samplings = [sampling for sampling in MIXTURE if sampling.top_k <= vocab_size]
    agree(samplings, normal(len(samplings), vocab_size, spread))


@pytest.mark.long(gpu=True)
def test_at_the_size_of_a_real_vocabulary_too() -> None:
    agree([MIXTURE[0], MIXTURE[5], MIXTURE[8]], normal(3, 49152, spread=3.0).to(torch.bfloat16).float())


ROWS = st.builds(
    RowSampling,
    temperature=st.sampled_from([0.0, 0.25, 1.0, 30.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 100]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.53, 0.9999]),
    min_p=st.sampled_from([0.0, 0.0, 0.031, 1.0]),
    seed=st.integers(-(2**63) + 1, 2**63 - 1),
)


@settings(max_examples=examples(4, 6, gpu=True))
@given(st.lists(ROWS, min_size=1, max_size=3), st.integers(0, 2**32), st.sampled_from([1, 2, 40]), st.integers(0, 9))
def test_of_equal_logits_the_lowest_ids_are_kept(
    rows: list[RowSampling], seed: int, values: int, position: int
) -> None:
    ties = torch.randint(-values, values, (len(rows), 2100), generator=torch.Generator().manual_seed(seed))
    agree(rows, (ties / 8 * torch.where(ties == 0, -1.0, 1.0)).to(DEVICE), position)  # zeros of both signs


def test_more_candidates_than_the_list_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "_MAX_CANDIDATES", 16)
    choosy = [RowSampling(temperature=1.0, top_p=0.9), RowSampling(temperature=1.0, top_k=300, top_p=0.7)]
    agree(choosy, torch.zeros(2, 3000, device=DEVICE))
    agree(choosy, normal(2, 3000, spread=0.001))


def test_a_flat_row_has_few_candidates_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its tokens weigh something. Once, that was taken for a cut by top-k, and most of them were candidates."""
    made: list[sample._Scratch] = []
    monkeypatch.setattr(sample, "_scratch", lambda *given: made.append(new_scratch(*given)) or made[-1])
    flat = [RowSampling(temperature=0.6, top_p=0.95), RowSampling(temperature=1.5, top_p=0.999)]
    agree([*flat, RowSampling(temperature=1.0, top_k=5000)], normal(3, 20_000, spread=1.0))
    [scratch] = made
    num_candidates = scratch.stats[:, sample._COUNT.value].tolist()
    assert min(num_candidates) > 0 and max(num_candidates) < 500, num_candidates


def test_non_finite_rows_fail_alone_and_padding_is_ignored() -> None:
    whole = RowSampling(temperature=1.0, top_p=0.9, top_k=50)
    logits = normal(9, 2100)
    logits[0, 2099] = math.nan
    logits[1, 7] = -math.nan
    logits[2, 2050] = math.inf
    logits[3] = -math.inf
    logits[4] = -math.inf
    logits[4, 2077] = -3.0
    logits[5, :2000] = -math.inf
    logits[7, 3] = math.nan
    chosen = agree([whole] * 7 + [GREEDY] * 2, logits)
    assert chosen.finite.tolist() == [False] * 4 + [True] * 3 + [False, True]
    assert chosen.tokens.tolist()[:5] == [0, 0, 0, 0, 2077]

    quick, plain = samplers([whole, GREEDY], 2100)
    rows = torch.tensor([-1, 1, -1, 0], device=DEVICE)
    padded = quick.sample_with_kernels(logits[[0, 5, 6, 8]], rows, torch.full_like(rows, 5), SamplingStage.DRAWN)
    truth = plain.sample(logits[[5, 8]], batch_of([1, 0], 5))
    assert padded.tokens.tolist() == [0, truth.tokens[0], 0, truth.tokens[1]]
    assert padded.finite.tolist() == [False, True, False, True]


def row_table(num_rows: int) -> RowTable:
    table = RowTable(num_rows, 64, 16, DEVICE)
    table.alive[:] = torch.arange(num_rows + 1, device=DEVICE) % 5 != 4
    table.lengths[:] = 7
    table.last_tokens[:] = 99
    return table


def test_finished_rows_agree_with_the_runner() -> None:
    """More rows than one program takes, in any order; what comes out is what the tensor operations give."""
    num_rows = 70
    samplings = [RowSampling(end_ids=tuple(range(row % 4))) for row in range(num_rows)]
    sampler, _ = samplers(samplings, 8)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(num_rows, generator=generator)[:66].to(DEVICE)
    batch = SamplingBatch(rows, rows.cpu().numpy(), torch.where(rows % 3 == 0, 999, 500))
    chosen = Sampled(torch.randint(0, 8, (66,), generator=generator).to(DEVICE), rows % 7 != 6)
    truth, table = row_table(num_rows), row_table(num_rows)

    ends = sampler.ends(batch, chosen.tokens)
    alive = truth.alive[rows]
    truth.advance(rows, chosen.tokens, alive & chosen.finite, ends.stop | ends.length | ~chosen.finite)
    expected = torch.stack([part.long() for part in (chosen.tokens, alive, chosen.finite, ends.stop, ends.length)])

    padding = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    outcome = finish_rows(
        Sampled(torch.cat([padding, chosen.tokens]), torch.cat([padding.bool(), chosen.finite])),
        torch.cat([padding - 1, rows]),
        torch.cat([padding, batch.positions]),
        sampler.end_columns,
        RowState(table.last_tokens, table.lengths, table.alive),
    )
    assert torch.equal(outcome, torch.cat([torch.zeros_like(expected[:, :2]), expected], dim=1))
    for name in ("last_tokens", "lengths", "alive"):
        assert torch.equal(getattr(table, name), getattr(truth, name)), name

"""A row's token is its own affair: not of its neighbours, its row number, their failures or a preemption."""

import math
import random
from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.ids import Row
from quire.core.sampling import RowSampling
from quire.sampling.sampler import Sampler
from tests.sampling.reference import CPU, Case, batch_of, row_start, sampler_of
from tests.sampling.strategies import VOCAB, cases, logits_of
from tests.tiers import examples

WIDE = 1_000  # tokens


@settings(max_examples=examples(20, 60))
@given(st.data())
def test_a_token_depends_neither_on_the_batch_nor_on_the_row(data: st.DataObject) -> None:
    assigned = data.draw(st.lists(cases(), min_size=2, max_size=6))
    logits = torch.tensor(data.draw(logits_of(len(assigned))), dtype=torch.float32)
    together, batch = sampler_of(assigned, VOCAB)
    tokens = together.sample(logits, batch).tokens.tolist()
    order = data.draw(st.permutations(range(len(assigned))))
    shuffled, shuffled_batch = sampler_of([assigned[row] for row in order], VOCAB)
    assert shuffled.sample(logits[list(order)], shuffled_batch).tokens.tolist() == [tokens[row] for row in order]
    for row, case in enumerate(assigned):
        alone, lone_batch = sampler_of([case], VOCAB)
        assert alone.sample(logits[row : row + 1], lone_batch).tokens.tolist() == [tokens[row]]


def test_at_the_size_of_a_real_vocabulary_too() -> None:
    """Wide rows take other paths through the kernels: threads, vector tails, pieces."""
    mixture = [
        RowSampling(temperature=1.0, seed=1),
        RowSampling(temperature=0.9, top_p=0.95, seed=2),
        RowSampling(temperature=2.0, top_p=0.99, min_p=0.001, seed=3),
        RowSampling(temperature=0.7, top_k=50, seed=4),
        RowSampling(),
    ]
    assigned = [Case(sampling, index=copy) for copy in range(4) for sampling in mixture]
    logits = torch.randn(len(assigned), 50_257, generator=torch.Generator().manual_seed(0)) * 4
    sampler, batch = sampler_of(assigned, 50_257)
    weights = sampler.weights(logits, batch)
    tokens = sampler.sample(logits, batch).tokens
    for row in range(len(assigned)):
        alone = batch_of([row], [1])
        assert torch.equal(sampler.weights(logits[row : row + 1], alone)[0], weights[row])
        assert sampler.sample(logits[row : row + 1], alone).tokens[0] == tokens[row]


@settings(max_examples=examples(20, 60))
@given(st.data())
def test_a_broken_row_fails_alone(data: st.DataObject) -> None:
    assigned = data.draw(st.lists(cases(), min_size=2, max_size=6))
    logits = torch.tensor(data.draw(logits_of(len(assigned))), dtype=torch.float32)
    sampler, batch = sampler_of(assigned, VOCAB)
    healthy = sampler.sample(logits, batch).tokens
    broken = data.draw(st.integers(0, len(assigned) - 1))
    damage = data.draw(st.sampled_from([math.nan, math.inf, "all -inf"]))
    spoiled = logits.clone()
    if isinstance(damage, str):
        spoiled[broken] = -math.inf
    else:
        spoiled[broken, data.draw(st.integers(0, VOCAB - 1))] = damage
    sampled = sampler.sample(spoiled, batch)
    others = torch.arange(len(assigned)) != broken
    assert sampled.finite.tolist() == others.tolist()
    assert torch.equal(sampled.tokens[others], healthy[others])
    assert 0 <= int(sampled.tokens[broken]) < VOCAB


def random_row(chance: random.Random) -> Case:
    tokens = tuple(chance.choices(range(WIDE), k=chance.randrange(1, 9)))
    sampling = RowSampling(
        temperature=chance.choice((0.0, 0.7, 1.0, 1.9)),
        top_k=chance.choice((0, 1, 20)),
        top_p=chance.choice((1.0, 0.53, 0.95)),
        min_p=chance.choice((0.0, 0.05)),
        repetition_penalty=chance.choice((1.0, 0.8, 1.3)),
        presence_penalty=chance.choice((0.0, 1.25, -0.5)),
        seed=chance.getrandbits(63),
        logit_bias=chance.choice(((), ((3, -100.0), (5, 2.0)))),
        allowed_ids=chance.choice((None, None, tuple(range(0, WIDE, 3)))),
    )
    return Case(sampling, tokens, 1, chance.randrange(4))


def spoil(chance: random.Random, row: torch.Tensor) -> None:
    """Numbers that a broken model gives, in place."""
    kind = chance.randrange(4)
    if kind == 3:
        row[:] = -math.inf
    else:
        places = chance.sample(range(len(row)), chance.choice((1, 7, len(row))))
        row[places] = (math.nan, math.inf, -math.nan)[kind]


def test_hostile_rows_in_random_batches(dose: Callable[[int], int]) -> None:
    """Their neighbours' tokens and log-probabilities are the same bits as without them: 10,000 batches by `--dose`."""
    chance, generator = random.Random(10), torch.Generator().manual_seed(10)
    for _ in range(dose(100)):
        assigned = [random_row(chance) for _ in range(chance.randrange(2, 9))]
        logits = torch.randn(len(assigned), WIDE, generator=generator) * chance.choice((1.0, 8.0, 60.0))
        sampler, batch = sampler_of(assigned, WIDE)
        healthy, weights = sampler.sample(logits, batch).tokens, sampler.weights(logits, batch)
        hostile = set(chance.sample(range(len(assigned)), chance.randrange(1, len(assigned))))
        spoiled = logits.clone()
        for row in hostile:
            spoil(chance, spoiled[row])
        sampled = sampler.sample(spoiled, batch)
        others = [row for row in range(len(assigned)) if row not in hostile]
        assert sampled.finite.tolist() == [row not in hostile for row in range(len(assigned))]
        assert torch.equal(sampled.tokens[others], healthy[others])
        assert torch.equal(sampler.weights(spoiled, batch)[others], weights[others])


def test_a_row_with_nothing_left_to_choose_is_not_finite() -> None:
    cornered = RowSampling(allowed_ids=(3,), end_ids=(3,), min_tokens=2)
    sampler, batch = sampler_of([Case(cornered), Case(RowSampling())], 8)
    assert sampler.sample(torch.zeros(2, 8), batch).finite.tolist() == [False, True]


@settings(max_examples=examples(10, 30))
@given(st.data())
def test_rows_come_and_go_and_carry_on_where_they_were(data: st.DataObject) -> None:
    """Counts and tails that followed the tokens, in slots that others held before, equal a fresh recount."""
    max_rows = 5
    sampler = Sampler(max_rows, VOCAB, CPU)
    present: dict[int, Case] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        row = data.draw(st.integers(0, max_rows - 1))
        if row in present:
            sampler.release(Row(row))
            del present[row]
        else:
            present[row] = data.draw(cases())
            row_start(sampler, row, present[row])
        if not present:
            continue
        rows = sorted(present)
        logits = torch.tensor(data.draw(logits_of(len(rows))), dtype=torch.float32)
        batch = batch_of(rows, [len(present[row].tokens) for row in rows])
        sampled = sampler.sample(logits, batch)
        fresh, fresh_batch = sampler_of([present[row] for row in rows], VOCAB)
        assert torch.equal(sampled.tokens, fresh.sample(logits, fresh_batch).tokens)
        assert torch.equal(sampler.weights(logits, batch), fresh.weights(logits, fresh_batch))
        sampler.commit(batch, sampled.tokens)
        for row, token in zip(rows, sampled.tokens.tolist(), strict=True):
            case = present[row]
            present[row] = Case(case.sampling, (*case.tokens, token), case.num_prompt, case.index)


def test_a_reused_slot_has_no_old_state() -> None:
    penalized = RowSampling(repetition_penalty=9.0, presence_penalty=2.0)
    sampler, batch = sampler_of([Case(penalized, tokens=(0, 1), num_prompt=1)], 4)
    sampler.release(Row(0))
    row_start(sampler, 0, Case(penalized, tokens=(2,)))
    assert sampler.sample(torch.tensor([[1.0, 1.1, 3.0, 0.0]]), batch).tokens.tolist() == [1]


def test_an_infinite_logit_is_a_fault_even_where_it_is_forbidden() -> None:
    early = RowSampling(end_ids=(2,), min_tokens=5)
    sampler, batch = sampler_of([Case(early)], 4)
    assert not sampler.sample(torch.tensor([[1.0, 0.0, math.inf, 0.0]]), batch).finite.any()


def test_seed_and_sequence_index_both_matter_and_decide_all() -> None:
    logits = torch.zeros(4, 1000)
    seeds_and_indexes = [(1, 0), (2, 0), (1, 1), (1, 0)]
    assigned = [Case(RowSampling(temperature=1.0, seed=seed), index=index) for seed, index in seeds_and_indexes]
    sampler, _ = sampler_of(assigned, 1000)
    runs = np.array([sampler.sample(logits, batch_of([0, 1, 2, 3], [at] * 4)).tokens.tolist() for at in range(20)])
    assert (runs[:, 0] == runs[:, 3]).all()
    assert len({tuple(run) for run in runs.T}) == 3
    assert len(set(runs[:, 0])) > 15


def num_bytes(sampler: Sampler) -> int:
    """Of vocabulary-wide state."""
    penalties, words = sampler._penalties, sampler._bad_words
    tables = (sampler._logit_bias.table, penalties.in_prompt, penalties.generated, words._beginnings, words._lasts)
    return sum(table.nbytes for table in (*tables, words._tails))


def test_vocabulary_sized_state_is_allocated_on_demand() -> None:
    sampler = Sampler(64, 1000, CPU)
    for row in range(60):
        row_start(sampler, row, Case(RowSampling(temperature=0.7, top_p=0.9, top_k=5, min_tokens=2, end_ids=(1, 2))))
    assert num_bytes(sampler) == 0
    row_start(sampler, 60, Case(RowSampling(presence_penalty=1.0)))
    assert num_bytes(sampler) == 1000 * 5
    for _ in range(10):
        sampler.release(Row(60))
        row_start(sampler, 60, Case(RowSampling(presence_penalty=1.0)))
    assert num_bytes(sampler) == 1000 * 5

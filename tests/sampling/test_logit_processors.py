"""Bad words, allowed ids, bias and early ends, by hand-computable examples."""

import torch

from quire.core.sampling import RowSampling
from tests.sampling.reference import Case, batch_of, sampler_of

FALLING = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])  # greedy takes the lowest id that is allowed


def greedy_run(case: Case, num_tokens: int) -> list[int]:
    sampler, _ = sampler_of([case], 6)
    tokens = []
    for step in range(num_tokens):
        batch = batch_of([0], [len(case.tokens) + step])
        chosen = sampler.sample(FALLING, batch).tokens
        sampler.commit(batch, chosen)
        tokens.append(int(chosen))
    return tokens


def test_a_bad_word_of_one_token_never_comes() -> None:
    assert greedy_run(Case(RowSampling(bad_words=((0,), (1,)))), 2) == [2, 2]


def test_a_bad_word_of_several_tokens_is_begun_but_not_completed() -> None:
    assert greedy_run(Case(RowSampling(bad_words=((0, 0), (0, 1, 0))), tokens=(5,)), 6) == [0, 1, 1, 0, 1, 1]


def test_a_bad_word_begun_by_the_prompt_is_not_completed() -> None:
    assert greedy_run(Case(RowSampling(bad_words=((4, 5, 0),)), tokens=(4, 5), num_prompt=2), 2) == [1, 0]


def test_a_word_longer_than_the_sequence_does_not_match() -> None:
    assert greedy_run(Case(RowSampling(bad_words=((4, 4, 4, 0),)), tokens=(4, 4), num_prompt=2), 1) == [0]


def test_words_of_a_new_row_may_be_more_and_longer_than_those_of_rows_before() -> None:
    short = Case(RowSampling(bad_words=((3, 0),)), tokens=(3,))
    long = Case(RowSampling(bad_words=((1, 2, 3, 0), (3, 1), (5, 2))), tokens=(1, 2, 3), num_prompt=3)
    sampler, batch = sampler_of([short, long, short], 6)
    assert sampler.sample(FALLING.expand(3, -1), batch).tokens.tolist() == [1, 2, 1]


def test_only_allowed_ids_come_and_bias_chooses_among_them() -> None:
    assert greedy_run(Case(RowSampling(allowed_ids=(3, 5))), 1) == [3]
    assert greedy_run(Case(RowSampling(allowed_ids=(3, 5), logit_bias=((5, 2.5), (0, 100.0)))), 1) == [5]


def test_end_tokens_wait_for_min_tokens() -> None:
    sampling = RowSampling(end_ids=(0, 1), min_tokens=2)
    assert greedy_run(Case(sampling, tokens=(4, 4, 4), num_prompt=3), 3) == [2, 2, 0]
    resumed = Case(sampling, tokens=(4, 4, 4, 2), num_prompt=3)
    assert greedy_run(resumed, 2) == [2, 0]


def test_rows_with_other_numbers_of_end_tokens_share_a_batch() -> None:
    assigned = [
        Case(RowSampling(end_ids=(1,), min_tokens=1)),
        Case(RowSampling(end_ids=(0, 1, 2, 3), min_tokens=1)),
        Case(RowSampling(end_ids=(), min_tokens=1)),
    ]
    sampler, batch = sampler_of(assigned, 6)
    assert sampler.sample(FALLING.expand(3, -1), batch).tokens.tolist() == [0, 4, 0]


def test_the_logits_given_are_not_changed() -> None:
    everything = RowSampling(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        min_tokens=3,
        end_ids=(1,),
        logit_bias=((2, 1.0),),
        bad_words=((0,), (0, 3)),
        allowed_ids=(0, 1, 2, 3),
    )
    sampler, batch = sampler_of([Case(everything)], 6)
    logits = FALLING.clone()
    sampler.sample(logits, batch)
    assert torch.equal(logits, FALLING)

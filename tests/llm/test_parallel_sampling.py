"""Several continuations of one prompt: the prompt is computed once, and of best_of the likeliest are returned."""

import pytest

from quire import LLM, SamplingParams
from quire.sched.audit import audit_rest
from tests.llm.tiny import byte_ids

PROMPT = "a prompt that fills several blocks of the cache, and half of one more"


@pytest.fixture(autouse=True)
def _at_rest(llm: LLM):
    llm.reset_prefix_cache()
    yield
    audit_rest(llm.built.engine.scheduler)


def computed(llm: LLM, params: SamplingParams) -> int:
    """The tokens that the engine computes for this prompt alone."""
    scheduler = llm.built.engine.scheduler
    before = scheduler.counters.computed_tokens
    llm.generate(PROMPT, params)
    return scheduler.counters.computed_tokens - before


def test_four_greedy_continuations_are_equal_and_their_prompt_is_computed_once(llm):
    params = SamplingParams(n=4, temperature=0.0, max_tokens=10, ignore_eos=True)
    assert computed(llm, params) == len(byte_ids(PROMPT)) + 3 + 4 * 9  # each sibling computes its last token again
    outputs = llm.generate(PROMPT, params)[0].outputs
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    alone = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True))[0].outputs[0]
    assert [output.token_ids for output in outputs] == [alone.token_ids] * 4
    assert [output.text for output in outputs] == [alone.text] * 4


def test_best_of_returns_the_likeliest_per_token_of_the_same_continuations(llm):
    every = SamplingParams(n=5, seed=3, max_tokens=12, logprobs=0)
    all_five = llm.generate(PROMPT, every)[0].outputs
    means = [output.cumulative_logprob / len(output.token_ids) for output in all_five]
    best = sorted(range(5), key=lambda place: -means[place])[:2]
    chosen = llm.generate(PROMPT, SamplingParams(n=2, best_of=5, seed=3, max_tokens=12))[0].outputs
    assert [output.token_ids for output in chosen] == [all_five[place].token_ids for place in best]
    assert [output.index for output in chosen] == [0, 1]
    assert [output.score for output in chosen] == pytest.approx([means[place] for place in best], abs=1e-4)
    assert all(output.logprobs is None for output in chosen)


def test_best_of_with_logprobs_and_stop_strings_shows_them(llm):
    params = SamplingParams(best_of=3, seed=3, max_tokens=20, logprobs=1, stop="a", allowed_token_ids=byte_ids("abcd"))
    output = llm.generate(PROMPT, params)[0].outputs[0]
    assert len(output.logprobs) == len(output.token_ids)
    assert output.cumulative_logprob == pytest.approx(output.score * len(output.token_ids))


def test_best_of_streams_its_choice_at_the_end(llm):
    params = SamplingParams(n=2, best_of=4, seed=9, max_tokens=8)
    deltas = list(llm.stream(PROMPT, params))
    whole = llm.generate(PROMPT, params)[0].outputs
    assert [(delta.index, delta.text, delta.token_ids, delta.finish_reason) for delta in deltas] == [
        (output.index, output.text, output.token_ids, output.finish_reason) for output in whole
    ]


def test_a_failed_sequence_is_never_the_best(llm):
    """After an x no token is allowed: a sequence that starts with one fails, and is ranked last."""
    params = SamplingParams(
        n=4, best_of=6, seed=5, max_tokens=1, allowed_token_ids=byte_ids("xyz"), bad_words=["xx", "xy", "xz"]
    )
    assert [output.finish_reason for output in llm.generate("q", params)[0].outputs] == ["length"] * 4
    longer = SamplingParams(
        n=6, seed=5, max_tokens=6, allowed_token_ids=byte_ids("xyz"), bad_words=["xx", "xy", "xz"], best_of=None
    )
    reasons = [output.finish_reason for output in llm.generate("q", longer)[0].outputs]
    assert {"nothing_left", "length"} == set(reasons)
    ranked = SamplingParams(
        n=5, seed=5, max_tokens=6, allowed_token_ids=byte_ids("xyz"), bad_words=["xx", "xy", "xz"], best_of=6
    )
    outputs = llm.generate("q", ranked)[0].outputs
    failed = [output.finish_reason == "nothing_left" for output in outputs]
    assert failed == sorted(failed) and failed.count(False) == min(reasons.count("length"), 5)


def test_aborting_best_of_releases_everything(llm):
    stream = llm.stream(PROMPT, SamplingParams(best_of=3, max_tokens=50, ignore_eos=True))
    for _ in range(4):
        llm._step(stream)
    stream.close()
    while not llm.client.idle:
        llm.client.step()
    assert not llm.client._processor._choosing

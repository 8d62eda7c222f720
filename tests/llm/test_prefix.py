"""Prefix caching: more cache hits, never a different token."""

from random import Random
from typing import NamedTuple

import pytest

from quire import LLM, SamplingParams
from quire.sched.audit import audit_rest
from tests.llm.tiny import VOCAB

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


class Work(NamedTuple):
    prompts: list[list[int]]
    params: list[SamplingParams]
    expected: list[list[list[int]]]  # without the cache


def mixed_work(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts with shared prefixes and varied parameters."""
    random = Random(seed)
    stems = [[random.randrange(3, VOCAB) for _ in range(length)] for length in (5, 33, 64)]
    prompts = [random.choice(stems)[: random.randint(4, 70)] + [random.randrange(3, VOCAB)] * 2 for _ in range(12)]
    kinds = [
        {"temperature": 0.0},
        {"seed": 4},
        {"seed": 5, "n": 3},
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"use_beam_search": True, "n": 2},
        {"seed": 6, "best_of": 3},
    ]
    chosen = [random.choice(kinds) for _ in prompts]
    return prompts, [SamplingParams(max_tokens=random.randint(1, 14), ignore_eos=True, **kind) for kind in chosen]


def tokens(outputs) -> list[list[list[int]]]:
    return [[each.token_ids for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def plain(tiny_folder) -> LLM:
    return LLM(str(tiny_folder), dtype="float32", enable_prefix_caching=False)


def test_a_second_turn_finds_its_own_history(llm, plain):
    llm.reset_prefix_cache()
    messages = [{"role": "u", "content": "a first question of some length"}]
    first = llm.chat(messages, GREEDY)[0]
    assert first.metrics.num_cached_tokens == 0
    history = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    follow_up = [*history, 77, 78, 79]
    second = llm.generate(follow_up, GREEDY)[0]
    assert second.metrics.num_cached_tokens == len(history) - 1  # the last token was sampled, not computed
    assert second.outputs[0].token_ids == plain.generate(follow_up, GREEDY)[0].outputs[0].token_ids
    audit_rest(llm.built.engine.scheduler)


def test_without_the_cache_nothing_is_found(plain):
    for _ in range(2):
        assert plain.generate("the same prompt again", GREEDY)[0].metrics.num_cached_tokens == 0


@pytest.fixture(scope="module")
def long_work(plain) -> Work:
    """Mixed, and eight long answers beside it."""
    prompts, params = mixed_work(3)
    prompts += [[9 + place] * 7 for place in range(8)]
    params += [SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)] * 8
    return Work(prompts, params, tokens(plain.generate(prompts, params)))


@pytest.fixture(scope="module")
def short_work(plain) -> Work:
    prompts, params = mixed_work(4)
    return Work(prompts, params, tokens(plain.generate(prompts, params)))


@pytest.mark.parametrize("seed", [1, 2])
def test_the_cache_changes_no_token(tiny_folder, plain, seed):
    prompts, params = mixed_work(seed)
    cached = LLM(str(tiny_folder), dtype="float32", block_size=4, max_num_batched_tokens=70, run_ahead=1)
    expected = tokens(plain.generate(prompts, params))
    assert tokens(cached.generate(prompts, params)) == expected
    again = cached.generate(prompts, params)
    assert tokens(again) == expected
    assert sum(output.metrics.num_cached_tokens for output in again) > 0
    audit_rest(cached.built.engine.scheduler)


@pytest.mark.parametrize("overcommit", ["never", "hedge", "optimistic"])
def test_a_small_cache_and_a_host_tier_change_no_token(tiny_folder, plain, long_work, overcommit):
    per_token = plain.built.checkpoint.spec.kv_bytes_per_token(4)
    small = LLM(
        str(tiny_folder), dtype="float32", block_size=4, kv_cache_memory=200 * per_token, max_num_seqs=8,
        max_num_batched_tokens=32, host_kv_memory=400 * per_token, overcommit=overcommit, run_ahead=1,
    )  # fmt: skip
    small.built.engine.scheduler.cost.set_transfer(1e-9)  # always worth it, whatever this machine measured
    num_preemptions = 0
    for _ in range(2):
        outputs = small.generate(long_work.prompts, long_work.params)
        assert tokens(outputs) == long_work.expected
        num_preemptions += sum(output.metrics.num_preemptions for output in outputs)
    assert (num_preemptions > 0) == (overcommit != "never")
    assert small.built.engine.scheduler.counters.moved_blocks > 0
    audit_rest(small.built.engine.scheduler)


def test_other_salts_and_tenants_never_share(llm):
    llm.reset_prefix_cache()
    prompt = list(range(10, 60))

    def cached(**options: str) -> int:
        return llm.generate(prompt, GREEDY, **options)[0].metrics.num_cached_tokens

    assert cached() == 0 and cached() == 49
    assert cached(cache_salt="a") == 0 and cached(cache_salt="a") == 49
    assert cached(cache_salt="b") == 0
    assert cached(tenant="a") == 0 and cached(tenant="a") == 49
    assert cached(tenant="a", cache_salt="b") == 0
    audit_rest(llm.built.engine.scheduler)


@pytest.mark.parametrize("regime", ["static", "dynamic", "continuous", "paged", "chunked"])
def test_every_regime_gives_the_same_tokens(tiny_folder, short_work, regime):
    older = LLM(str(tiny_folder), dtype="float32", regime=regime, max_num_seqs=6)
    assert tokens(older.generate(short_work.prompts, short_work.params)) == short_work.expected
    audit_rest(older.built.engine.scheduler)

"""The selection equals transformers' `generate`, and with beams enough for everything it is exhaustive search."""

import copy
import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from quire.core.request import BeamParams, EarlyStopping
from quire.core.step import Candidates, FinishReason
from quire.sched.beam_search import BeamSearch, BeamStep
from tests.tiers import examples

HF_STOPPING: dict[EarlyStopping, bool | str] = {
    EarlyStopping.WHEN_FULL: True,
    EarlyStopping.WHEN_UNLIKELY: False,
    EarlyStopping.NEVER: "never",
}
NUM_SETTINGS = examples(20, 60)

# Of whole sequences of one length: for each the log-probability of every next token.
NextLogprobs = Callable[[list[tuple[int, ...]]], np.ndarray]


class Setting(NamedTuple):
    prompt: tuple[int, ...]
    params: BeamParams
    max_tokens: int
    end_ids: tuple[int, ...]
    min_tokens: int


class Found(NamedTuple):
    tokens: tuple[int, ...]
    score: float


def search(setting: Setting, logprobs: NextLogprobs) -> BeamSearch:
    """Drive a search to its end, with the prefixes kept as an engine would keep them: by parents and tokens alone."""
    num_prompt = len(setting.prompt)
    beam = BeamSearch(
        setting.params, num_prompt, num_prompt + setting.max_tokens, setting.end_ids, min_tokens=setting.min_tokens
    )
    prefixes = [setting.prompt]
    while (step := beam.advance([top(row, beam.num_candidates) for row in logprobs(prefixes)])) is not None:
        prefixes = [(*prefixes[parent], token) for parent, token in zip(step.parents, step.tokens, strict=True)]
        assert [prefix[num_prompt:] for prefix in prefixes] == list(beam.live)
        beam = copy.deepcopy(beam)
    return beam


def top(logprobs: np.ndarray, count: int) -> Candidates:
    order = np.argsort(-logprobs, kind="stable")[:count]
    return Candidates(order.astype(np.int32), logprobs[order].astype(np.float32))


# Against transformers.


@pytest.fixture(scope="module")
def models() -> list[LlamaForCausalLM]:
    torch.set_num_threads(1)  # for such small tensors a second thread only adds overhead
    return [tiny_llama(seed) for seed in range(3)]


def tiny_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=40 + 10 * seed,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def logprobs_of(model: LlamaForCausalLM) -> NextLogprobs:
    def logprobs(prefixes: list[tuple[int, ...]]) -> np.ndarray:
        with torch.inference_mode():
            logits = model(torch.tensor(prefixes)).logits[:, -1].float()
        return torch.log_softmax(logits, dim=-1).numpy()

    return logprobs


def random_setting(number: int, model: LlamaForCausalLM) -> Setting:
    """Width and stopping by turns, so that each pair occurs; most end tokens from what the model likes."""
    rng = random.Random(number)
    vocab = range(1, model.config.vocab_size)
    width = 1 + number % 5
    prompt = tuple(rng.choices(vocab, k=rng.randint(1, 12)))
    liked = top(logprobs_of(model)([prompt])[0], 6).ids.tolist()
    ends = rng.sample([token for token in liked if token] if rng.random() < 0.7 else vocab, k=rng.randint(1, 2))
    params = BeamParams(
        width,
        length_penalty=rng.choice([-0.7, 0.0, 0.6, 1.0, 2.0]),
        early_stopping=list(EarlyStopping)[number // 5 % 3],
        num_returned=rng.randint(1, width),
    )
    max_tokens = rng.randint(1, 10)
    return Setting(prompt, params, max_tokens, tuple(ends), min_tokens=rng.choice([0, 0, 0, min(2, max_tokens)]))


def generate(model: LlamaForCausalLM, setting: Setting) -> list[Found]:
    """What transformers finds; one beam is greedy decoding there, without a score of its own."""
    params = setting.params
    beams: dict[str, object] = {"length_penalty": params.length_penalty} if params.width > 1 else {}
    if params.width > 1:
        beams["early_stopping"] = HF_STOPPING[params.early_stopping]
    told = model.generate(
        torch.tensor([setting.prompt]),
        num_beams=params.width,
        num_return_sequences=params.num_returned,
        max_new_tokens=setting.max_tokens,
        min_new_tokens=setting.min_tokens or None,
        eos_token_id=list(setting.end_ids),
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **beams,
    )
    found = [cut(sequence[len(setting.prompt) :].tolist(), setting.end_ids) for sequence in told.sequences]
    if params.width > 1:
        return [Found(*pair) for pair in zip(found, told.sequences_scores.tolist(), strict=True)]
    steps = zip(found[0], told.logits, strict=True)
    total = sum(torch.log_softmax(logits[0].float(), dim=-1)[token].item() for token, logits in steps)
    return [Found(found[0], total / len(found[0]) ** params.length_penalty)]


def cut(tokens: list[int], end_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Without the padding after the first end token."""
    ends = [i for i, token in enumerate(tokens) if token in end_ids]
    return tuple(tokens[: ends[0] + 1] if ends else tokens)


@pytest.mark.parametrize("number", range(NUM_SETTINGS))
def test_sequences_and_scores_are_those_of_transformers(models: list[LlamaForCausalLM], number: int) -> None:
    model = models[number % len(models)]
    setting = random_setting(number, model)
    results = search(setting, logprobs_of(model)).results()
    wanted = generate(model, setting)
    assert [result.tokens for result in results] == [one.tokens for one in wanted]
    np.testing.assert_allclose([result.score for result in results], [one.score for one in wanted], atol=1e-4)
    for result in results:
        ended = result.tokens[-1] in setting.end_ids
        assert result.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)


# Against exhaustive search, with a made-up model.


def made_up(seed: int, vocab_size: int) -> NextLogprobs:
    @cache
    def logprobs_after(prefix: tuple[int, ...]) -> np.ndarray:
        weights = np.random.default_rng([seed, *prefix]).normal(size=vocab_size) * 2
        return (weights - np.log(np.exp(weights).sum())).astype(np.float32)

    return lambda prefixes: np.stack([logprobs_after(prefix) for prefix in prefixes])


def every_continuation(setting: Setting, logprobs: NextLogprobs, vocab_size: int) -> Iterator[Found]:
    """All that may be generated: nothing follows an end token, and none comes too early."""
    for length in range(1, setting.max_tokens + 1):
        for tokens in product(range(vocab_size), repeat=length):
            ends = [i for i, token in enumerate(tokens) if token in setting.end_ids]
            whole = ends == [length - 1] or (not ends and length == setting.max_tokens)
            if whole and not (ends and length <= setting.min_tokens):
                rows = [logprobs([(*setting.prompt, *tokens[:i])])[0] for i in range(length)]
                total = sum(float(row[token]) for row, token in zip(rows, tokens, strict=True))
                yield Found(tokens, total / length**setting.params.length_penalty)


@settings(max_examples=examples(20, 60), deadline=None)
@given(
    seed=st.integers(0, 2**16),
    vocab_size=st.integers(2, 3),
    max_tokens=st.integers(1, 3),
    num_ends=st.integers(0, 2),
    min_tokens=st.integers(0, 2),
    length_penalty=st.sampled_from([0.0, 0.5, 1.0, -1.0]),
    stopping=st.sampled_from([EarlyStopping.WHEN_UNLIKELY, EarlyStopping.NEVER]),
)
def test_a_beam_wide_enough_for_everything_finds_the_best_of_all(
    seed: int,
    vocab_size: int,
    max_tokens: int,
    num_ends: int,
    min_tokens: int,
    length_penalty: float,
    stopping: EarlyStopping,
) -> None:
    params = BeamParams(vocab_size**max_tokens, length_penalty, stopping, num_returned=vocab_size**max_tokens)
    setting = Setting((1, 0), params, max_tokens, tuple(range(num_ends)), min_tokens)
    logprobs = made_up(seed, vocab_size)
    wanted = sorted(every_continuation(setting, logprobs, vocab_size), key=lambda one: -one.score)
    results = search(setting, logprobs).results()
    assert {result.tokens for result in results} == {one.tokens for one in wanted}
    np.testing.assert_allclose([result.score for result in results], [one.score for one in wanted], atol=1e-4)


# By hand.


def row(**logprobs: float) -> Candidates:
    """row(t3=-0.1, t1=-0.5): token 3, then token 1."""
    return Candidates(
        np.array([int(name[1:]) for name in logprobs], dtype=np.int32),
        np.array(list(logprobs.values()), dtype=np.float32),
    )


def test_an_end_outside_the_best_width_is_dropped_and_the_live_beams_are_filled_up() -> None:
    search = BeamSearch(BeamParams(width=2, length_penalty=0.0), num_prompt=3, max_length=13, end_ids=[9])
    assert search.num_candidates == 4
    assert search.advance([row(t1=-0.5, t2=-1.0, t9=-1.5, t3=-2.0)]) == BeamStep((0, 0), (1, 2))
    rows = [row(t9=-0.1, t4=-0.4, t5=-3.0, t6=-4.0), row(t9=-0.2, t7=-0.3, t8=-5.0, t6=-6.0)]
    assert search.advance(rows) == BeamStep((0, 1), (4, 7))
    assert search.live == ((1, 4), (2, 7))
    rows = [row(t9=-0.05, t1=-0.6, t2=-0.7, t3=-0.8), row(t1=-0.1, t2=-3.0, t3=-4.0, t4=-5.0)]
    assert search.advance(rows) is None  # 1,4,9 (-0.95) joins 1,9 (-0.6); the best live beam has -1.4
    (best,) = search.results()
    assert best.tokens == (1, 9) and best.score == pytest.approx(-0.6) and best.finish_reason is FinishReason.STOP


def test_the_three_stoppings_end_at_different_steps() -> None:
    """After two steps 1,9 (-0.3) and 8 (-3.0) are finished; 1,3 goes on with -1.1 and loses 8.0 with each token."""

    def num_steps(stopping: EarlyStopping) -> int:
        params = BeamParams(width=2, length_penalty=1.0, early_stopping=stopping)
        search = BeamSearch(params, num_prompt=1, max_length=9, end_ids=[8, 9])
        search.advance([row(t1=-0.1, t8=-3.0, t2=-4.0)])
        step, count = search.advance([row(t9=-0.5, t3=-1.0)] * 2), 2
        while step is not None:
            step, count = search.advance([row(t1=-8.0, t2=-9.0)] * 2), count + 1
        return count

    assert num_steps(EarlyStopping.WHEN_FULL) == 2
    assert num_steps(EarlyStopping.WHEN_UNLIKELY) == 3  # -9.1 / 3 is below -3.0
    assert num_steps(EarlyStopping.NEVER) == 5  # -25.1 / 8, at the greatest length, is the first below -3.0


def test_never_looks_at_the_greatest_length_only_if_length_is_rewarded() -> None:
    params = BeamParams(width=2, length_penalty=-1.0, early_stopping=EarlyStopping.NEVER)
    search = BeamSearch(params, num_prompt=1, max_length=9, end_ids=[8, 9])
    search.advance([row(t1=-0.1, t8=-3.0, t2=-4.0)])
    assert search.advance([row(t9=-0.1, t3=-0.5)] * 2) is not None  # -0.6 times 2 is above -3.0, times 8 below


def test_one_beam_is_greedy_decoding_and_ends_with_its_first_end() -> None:
    params = BeamParams(width=1, early_stopping=EarlyStopping.NEVER)
    search = BeamSearch(params, num_prompt=1, max_length=9, end_ids=[9])
    assert search.advance([row(t9=-1.0, t1=-1.2)]) is None  # a beam would go on: -1.2 / 8 is above -1.0
    assert search.results()[0].tokens == (9,)


def test_equal_scores_keep_the_better_beam_first() -> None:
    search = BeamSearch(BeamParams(width=2), num_prompt=1, max_length=9, end_ids=[])
    assert search.advance([row(t5=-1.0, t4=-1.0, t3=-1.0, t2=-1.0)]) == BeamStep((0, 0), (5, 4))
    assert search.advance([row(t7=-1.0), row(t3=-1.0)]) == BeamStep((0, 1), (7, 3))


def test_forbidden_tokens_never_live_and_a_search_without_continuations_ends() -> None:
    search = BeamSearch(BeamParams(width=3, num_returned=3), num_prompt=1, max_length=9, end_ids=[9])
    assert search.advance([row(t9=-0.1, t1=-2.0, t2=-np.inf)]) == BeamStep((0,), (1,))
    assert search.advance([row(t1=-np.inf)]) is None
    assert [result.tokens for result in search.results()] == [(9,)]


def test_if_every_beam_proposes_every_end_there_is_enough_left_to_go_on_with() -> None:
    params = BeamParams(width=2, early_stopping=EarlyStopping.NEVER)
    search = BeamSearch(params, num_prompt=1, max_length=9, end_ids=[8, 9])
    assert search.num_candidates == 6
    assert search.advance([row(t1=-0.1, t2=-0.2, t3=-9.0)]) == BeamStep((0, 0), (1, 2))
    rows = [row(t8=-1.0, t9=-1.1, t4=-1.2, t5=-7.0)] * 2
    assert search.advance(rows) == BeamStep((0, 1), (4, 4)), "the best four are ends"

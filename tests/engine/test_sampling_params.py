"""Every field of `SamplingParams` rejects invalid values, and the error names the field."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.core.errors import InvalidParameter
from quire.core.sampling import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_CHARACTERS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_SEQUENCES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from quire.engine.messages import RequestOptions
from tests.engine.junk import junk
from tests.tiers import examples

NAN, INF = float("nan"), float("inf")
NO_NUMBERS = ["1", "", [1], (), {}, {1: 2}, b"1", True, False, object()]

FLOATS = {  # field: the numbers just outside
    "temperature": [-0.1, 2.1],
    "top_p": [0.0, -0.5, 1.01],
    "min_p": [-0.01, 1.01],
    "repetition_penalty": [0.0, -1.0, 101],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "length_penalty": [-10.1, 10.1],
}
INTEGERS = {
    "n": [0, -1, MAX_SEQUENCES + 1],
    "top_k": [-2, 2**31],
    "max_tokens": [0, -1, 2**31],
    "min_tokens": [-1, 2**31],
    "seed": [MAX_SEED + 1, -MAX_SEED - 1],
    "logprobs": [-1, MAX_LOGPROBS + 1],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1],
    "best_of": [0, -1, MAX_SEQUENCES + 1],
    "beam_width": [0, -1, MAX_SEQUENCES + 1],
}
OPTIONAL = {"max_tokens", "seed", "logprobs", "prompt_logprobs", "best_of", "beam_width"}
BOOLEANS = ["ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "use_beam_search"]
LISTS = {
    "stop": ["x"] * (MAX_STOP_STRINGS + 1),
    "bad_words": ["x"] * (MAX_BAD_WORDS + 1),
    "stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1),
    "logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0),
}


def refused(name: str, value: object) -> str:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("name", FLOATS)
def test_floats(name):
    for value in [*FLOATS[name], NAN, INF, -INF, 10**400, -(10**5000), None, *NO_NUMBERS]:
        refused(name, value)
    for value in FLOATS[name]:
        assert repr(value) in refused(name, value)


@pytest.mark.parametrize("name", INTEGERS)
def test_whole_numbers(name):
    for value in [*INTEGERS[name], NAN, INF, 1.0, 1.5, 10**400, *NO_NUMBERS, *([] if name in OPTIONAL else [None])]:
        refused(name, value)
    for value in INTEGERS[name]:
        assert repr(value) in refused(name, value)


@pytest.mark.parametrize("name", BOOLEANS)
def test_switches(name):
    for value in [0, 1, None, "true", 1.0, []]:
        refused(name, value)


@pytest.mark.parametrize("name", LISTS)
def test_lists_have_a_cap_with_its_number(name):
    assert str(len(LISTS[name])) in refused(name, LISTS[name])
    assert str(len(LISTS[name]) - 1) in refused(name, LISTS[name])


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_lists_of_strings(name):
    for value in [[""], ["a", ""], [1], [None], [["a"]], 5, True, 1.5, {"a": 1}, b"a", iter(["a"])]:
        refused(name, value)
    refused("stop", "")
    refused("bad_words", "word")  # not its letters


@pytest.mark.parametrize(("name", "most"), [("stop", MAX_STOP_CHARACTERS), ("bad_words", MAX_BAD_WORD_CHARACTERS)])
def test_strings_have_a_longest(name, most):
    SamplingParams(**{name: ["x" * most]})
    words = refused(name, ["x", "y" * (most + 1)])
    assert f"of {most + 1} characters; the limit is {most}." in words


def test_one_stop_string_has_the_same_longest():
    assert "8000000 characters" in refused("stop", "a" * 8_000_000)


def test_bad_words_have_so_many_characters_in_all():
    whole = ["x" * MAX_BAD_WORD_CHARACTERS] * (MAX_BAD_WORDS_CHARACTERS // MAX_BAD_WORD_CHARACTERS)
    SamplingParams(bad_words=whole)
    words = refused("bad_words", [*whole, "y"])
    assert f"has {MAX_BAD_WORDS_CHARACTERS + 1} characters in total; the limit is {MAX_BAD_WORDS_CHARACTERS}." in words


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_lists_of_token_ids(name):
    for value in ["12", b"12", 5, True, 1.5, {1: 2}, iter([1])]:
        refused(name, value)
    refused("allowed_token_ids", [])


def test_biases():
    for value in [[1], [(1, 2.0)], "x", 5, {1: NAN}, {1: INF}, {1: "2"}, {1: None}, {1: 100.5}, {1: -101}, {1: True}]:
        refused("logit_bias", value)


def test_min_tokens_above_max_tokens():
    with pytest.raises(InvalidParameter, match=r"min_tokens is 9.*max_tokens, which is 8") as caught:
        SamplingParams(min_tokens=9, max_tokens=8)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize("value", [None, 0, 1, "Never", "", [], 1.0])
def test_early_stopping(value):
    assert "never" in refused("early_stopping", value)


@pytest.mark.parametrize(
    ("values", "param", "words"),
    [
        ({"n": 3, "best_of": 2}, "best_of", "from 3 to"),
        ({"n": 1, "best_of": 2, "temperature": 0}, "best_of", "all continuations are the same"),
        ({"beam_width": 4}, "beam_width", "use_beam_search=True"),
        ({"length_penalty": 0.5}, "length_penalty", "use_beam_search=True"),
        ({"early_stopping": True}, "early_stopping", "use_beam_search=True"),
        ({"use_beam_search": True, "n": 3, "beam_width": 2}, "beam_width", "from 3 to"),
        ({"use_beam_search": True, "best_of": 3, "beam_width": 2}, "best_of", "give one of them"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature", "0.7"),
        ({"use_beam_search": True, "top_p": 0.9}, "top_p", "beam search"),
        ({"use_beam_search": True, "top_k": 5}, "top_k", "beam search"),
        ({"use_beam_search": True, "min_p": 0.1}, "min_p", "beam search"),
        ({"use_beam_search": True, "repetition_penalty": 1.1}, "repetition_penalty", "beam search"),
        ({"use_beam_search": True, "presence_penalty": 1}, "presence_penalty", "beam search"),
        ({"use_beam_search": True, "frequency_penalty": -1}, "frequency_penalty", "beam search"),
        ({"use_beam_search": True, "stop": "x"}, "stop", "beam search"),
        ({"use_beam_search": True, "logprobs": 0}, "logprobs", "beam search"),
    ],
)
def test_invalid_combinations(values, param, words):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**values)
    assert caught.value.param == param
    assert words in caught.value.message and caught.value.message.endswith(".")


def test_how_many_are_computed_and_returned():
    def counts(**values: object) -> tuple[int, int, bool]:
        params = SamplingParams(**values)
        return params.num_sequences, params.n, params.chooses

    assert counts() == (1, 1, False)
    assert counts(n=3) == counts(n=3, best_of=3) == (3, 3, False)
    assert counts(n=2, best_of=5) == (5, 2, True)
    assert counts(use_beam_search=True, n=2) == counts(use_beam_search=True, n=2, temperature=0) == (2, 2, True)
    assert counts(use_beam_search=True, best_of=4) == counts(use_beam_search=True, beam_width=4) == (4, 1, True)
    assert counts(use_beam_search=True, beam_width=4, best_of=4, stop=[], top_k=-1) == (4, 1, True)


def test_the_edges_are_inside():
    params = SamplingParams(
        n=MAX_SEQUENCES, temperature=2, top_p=1, top_k=-1, min_p=1, repetition_penalty=100, presence_penalty=-2,
        frequency_penalty=2, max_tokens=None, min_tokens=2**31 - 1, stop="a", stop_token_ids=(), seed=-MAX_SEED,
        logprobs=MAX_LOGPROBS, prompt_logprobs=0, logit_bias={}, bad_words=[], allowed_token_ids=range(3),
    )  # fmt: skip
    assert (params.n, params.temperature, params.seed, params.min_tokens) == (MAX_SEQUENCES, 2, -MAX_SEED, 2**31 - 1)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
@settings(max_examples=examples(15, 60))
@given(value=junk)
def test_any_value_is_accepted_or_refused(name, value):
    try:
        params = SamplingParams(**{name: value})
    except InvalidParameter as error:
        assert error.param in (name, "min_tokens")
        assert len(error.message) < 300
    else:
        assert isinstance(params.stop_strings, tuple)
        assert params.greedy == (params.temperature == 0)


@given(st.lists(st.text(min_size=1, max_size=3), max_size=5))
def test_stop_strings_are_always_a_tuple(stop):
    assert SamplingParams(stop=stop).stop_strings == tuple(stop)


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(
        n=np.int32(2), temperature=np.float32(0.5), top_p=np.float64(0.25), max_tokens=np.int64(9), seed=np.uint8(3),
        ignore_eos=np.bool_(True), stop_token_ids=np.array([4, 5]), logit_bias={np.int64(7): np.float32(1.5)},
    )  # fmt: skip
    assert params == SamplingParams(
        n=2, temperature=0.5, top_p=0.25, max_tokens=9, seed=3, ignore_eos=True, stop_token_ids=[4, 5],
        logit_bias={7: 1.5},
    )  # fmt: skip
    kinds = {type(getattr(params, name)) for name in ("n", "max_tokens", "seed", "temperature", "top_p", "ignore_eos")}
    assert kinds == {int, float, bool}, "values sent to other processes have Python's types"
    with pytest.raises(InvalidParameter, match="max_tokens must be a whole number"):
        SamplingParams(max_tokens=np.float64(9.0))
    assert type(RequestOptions(priority=np.int64(-1)).priority) is int
    assert type(EngineConfig(max_model_len=np.int64(64)).max_model_len) is int

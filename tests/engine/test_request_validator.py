"""Invalid requests are rejected with one sentence, the numbers and the parameter."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import ContextLengthExceeded, InvalidParameter, InvalidPrompt, NeverFits, QuireError
from quire.core.request import BeamParams, EarlyStopping, Request
from quire.core.sampling import MAX_SEQUENCES, SamplingParams
from quire.engine.messages import AddRequest, RequestOptions
from quire.engine.request_validator import RequestValidator
from quire.sched.reservation import most_blocks
from tests.engine.junk import junk
from tests.tiers import examples

VOCAB = 100
VALIDATOR = RequestValidator(vocab_size=VOCAB, end_ids=(2,), max_length=64, max_rows=8, num_blocks=10, block_size=4)
LARGE = RequestValidator(vocab_size=VOCAB, end_ids=(2,), max_length=64, max_rows=8, num_blocks=100, block_size=4)


def admit(prompt: object, validator: RequestValidator = VALIDATOR, **params: object) -> Request:
    settings = {"max_tokens": 4} | params
    return validator.admit(AddRequest(0, prompt, SamplingParams(**settings)), fresh_seed=9)  # type: ignore[arg-type]


def refusal(
    kind: type[QuireError], prompt: object = (5, 6), validator: RequestValidator = VALIDATOR, **params: object
) -> QuireError:
    with pytest.raises(kind) as caught:
        admit(prompt, validator, **params)
    assert kind is QuireError or type(caught.value) is kind
    assert caught.value.message.endswith(".") and "\n" not in caught.value.message
    assert len(caught.value.message) < 400
    return caught.value


def numbers(error: QuireError) -> set[int]:
    return {int(number) for number in re.findall(r"-?\d+", error.message)}


def test_a_valid_request_is_admitted_unchanged():
    request = admit([5, 99, 0], n=2, seed=4, stop_token_ids=[7])
    assert request.prompt.tolist() == [5, 99, 0] and request.prompt.dtype == np.int32
    assert (request.max_tokens, request.num_sequences, request.max_length) == (4, 2, 7)
    assert request.sampling.end_ids == (2, 7) and request.sampling.seed == 4
    assert admit([5]).sampling.seed == 9
    assert admit(np.array([5, 6])).prompt.tolist() == [5, 6]


def test_an_empty_prompt():
    assert refusal(InvalidPrompt, []).param == "prompt"


@pytest.mark.parametrize("token", [VOCAB, VOCAB + 1, -1, -(2**31), 2**31, 2**63, 2**64 + 5, np.int64(VOCAB)])
def test_a_token_the_model_does_not_have(token):
    error = refusal(InvalidPrompt, [5, token, 6])
    assert error.param == "prompt"
    assert {int(token), VOCAB - 1} <= numbers(error)


@pytest.mark.parametrize(
    "token",
    [True, False, 1.0, float("nan"), "5", None, [5], b"5", {}, np.float32(1), pytest.param(10**5000, id="huge")],
)
def test_non_token_values(token):
    assert refusal(InvalidPrompt, [5, token]).param == "prompt"


def test_a_prompt_longer_than_the_context():
    for length in (64, 65, 1000):
        assert {64, length} <= numbers(refusal(ContextLengthExceeded, [5] * length, LARGE))
    assert admit([5] * 63, LARGE, max_tokens=1).max_length == 64


def test_a_prompt_that_is_too_long_by_itself_is_refused_with_the_length_that_was_asked_for():
    error = refusal(ContextLengthExceeded, [5] * 70, LARGE, max_tokens=50)
    assert "you requested 120 tokens (70 in the messages, 50 in the completion)" in error.message
    error = refusal(ContextLengthExceeded, [5] * 70, LARGE, max_tokens=None)
    assert "you requested 71 tokens (70 in the messages, 1 in the completion)" in error.message


@pytest.mark.parametrize("wanted", ["pooled", "without_tokens"])
@pytest.mark.parametrize("max_tokens", [1, 9, None])
def test_a_prompt_that_nothing_follows_may_fill_the_context(wanted, max_tokens):
    def alone(length: int, validator: RequestValidator = LARGE) -> Request:
        return validator.admit(AddRequest(0, [5] * length, SamplingParams(max_tokens=max_tokens), **{wanted: True}), 0)

    request = alone(64)
    assert (len(request.prompt), request.max_tokens) == (64, 1)
    assert most_blocks(request, LARGE.block_size) == 64 // LARGE.block_size, "the last token needs no slot"
    with pytest.raises(ContextLengthExceeded, match="65 in the messages, 0 in the completion"):
        alone(65)
    with pytest.raises(NeverFits, match="needs 16 KV blocks"):
        alone(64, VALIDATOR)


def test_a_completion_longer_than_the_context():
    assert {64, 60, 5, 65} <= numbers(refusal(ContextLengthExceeded, [5] * 60, LARGE, max_tokens=5))
    assert admit([5] * 60, LARGE, max_tokens=4).max_length == 64
    refusal(ContextLengthExceeded, [5], LARGE, max_tokens=2**31 - 1)


def test_a_request_larger_than_the_kv_cache():
    """Ten blocks of four hold 40 positions; the last token is never computed."""
    assert admit([5] * 31, max_tokens=10).max_length == 41
    error = refusal(NeverFits, [5] * 31, max_tokens=11)
    assert {41, 11, 10, 4, 40} <= numbers(error)
    assert "--kv-cache-memory" in error.message


def test_default_max_tokens_are_the_rest_of_the_context():
    assert admit([5] * 31, max_tokens=None).max_length == 41
    assert admit([5] * 31, LARGE, max_tokens=None).max_length == 64
    refusal(NeverFits, [5] * 50, max_tokens=None)
    error = refusal(InvalidParameter, [5] * 31, max_tokens=None, min_tokens=11)
    assert error.param == "min_tokens" and {11, 10} <= numbers(error)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
@pytest.mark.parametrize("token", [VOCAB, -1, 2**40, True, 1.0, "5", None])
def test_token_ids_in_parameters_are_the_models(name, token):
    value = {token: 1.0} if name == "logit_bias" else [5, token]
    error = refusal(InvalidParameter, **{name: value})
    assert error.param == name and VOCAB - 1 in numbers(error)


def test_allowed_ids_are_no_more_than_the_vocabulary_and_each_counts_once():
    assert admit([5], allowed_token_ids=[7, 5, 7]).sampling.allowed_ids == (7, 5)
    assert len(admit([5], allowed_token_ids=range(VOCAB)).sampling.allowed_ids) == VOCAB
    error = refusal(InvalidParameter, allowed_token_ids=[5] * (VOCAB + 1))
    assert error.param == "allowed_token_ids" and numbers(error) == {VOCAB + 1, VOCAB}


def test_more_logprobs_than_tokens():
    small = RequestValidator(vocab_size=10, end_ids=(), max_length=64, max_rows=8, num_blocks=10, block_size=4)
    assert numbers(refusal(InvalidParameter, validator=small, logprobs=11)) == {11, 10}
    assert refusal(InvalidParameter, validator=small, prompt_logprobs=11).param == "prompt_logprobs"


def test_many_continuations_have_a_cap():
    assert MAX_SEQUENCES in numbers(refusal(InvalidParameter, n=MAX_SEQUENCES + 1))


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"n": 9}, "n"),
        ({"n": 2, "best_of": 9, "temperature": 1}, "best_of"),
        ({"use_beam_search": True, "beam_width": 9}, "beam_width"),
    ],
)
def test_more_continuations_than_the_engine_has_rows(said, name):
    error = refusal(InvalidParameter, validator=LARGE, **said)
    assert error.param == name and {9, 8} <= numbers(error)
    assert "--max-num-seqs 9" in error.message


def test_a_request_group_fits_as_a_whole_or_not_at_all():
    """Ten blocks of four: the 9-token prompt fills two, which are shared; each of three tails may have two more."""
    assert admit([5] * 9, n=3, max_tokens=8).max_length == 17
    error = refusal(NeverFits, [5] * 9, n=3, max_tokens=9)
    assert {3, 17, 11, 10} <= numbers(error) and "fewer continuations" in error.message
    assert admit([5] * 9, n=3, max_tokens=None).max_tokens == 8
    assert admit([5] * 9, max_tokens=None).max_tokens == 32
    assert admit([5] * 9, max_tokens=None, use_beam_search=True, beam_width=3).max_tokens == 8


@given(
    num_prompt=st.integers(1, 60), count=st.integers(1, 8), num_blocks=st.integers(1, 40), block_size=st.integers(1, 9)
)
def test_a_length_left_out_is_the_longest_that_fits(num_prompt, count, num_blocks, block_size):
    validator = RequestValidator(
        vocab_size=VOCAB, end_ids=(), max_length=64, max_rows=8, num_blocks=num_blocks, block_size=block_size
    )
    try:
        request = admit([5] * num_prompt, validator, n=count, max_tokens=None)
    except NeverFits:
        refusal(NeverFits, [5] * num_prompt, validator, n=count, max_tokens=1)
        return
    assert most_blocks(request, block_size) <= num_blocks
    refusal(QuireError, [5] * num_prompt, validator, n=count, max_tokens=request.max_tokens + 1)


def test_beams_get_candidates_for_every_end():
    request = admit([5, 6], use_beam_search=True, beam_width=4, n=2, length_penalty=2, early_stopping="never")
    assert request.beam == BeamParams(4, 2.0, EarlyStopping.NEVER, 2)
    assert (request.num_sequences, request.sampling.num_candidates) == (4, 8)
    more_ends = admit([5, 6], use_beam_search=True, beam_width=4, stop_token_ids=[7, 8])
    assert more_ends.sampling.num_candidates == 16
    narrow = RequestValidator(vocab_size=7, end_ids=(), max_length=64, max_rows=8, num_blocks=10, block_size=4)
    assert admit([5, 6], narrow, use_beam_search=True, beam_width=4).sampling.num_candidates == 7
    assert admit([5, 6], n=3).sampling.num_candidates == 0


def test_best_of_requests_the_logprobs_it_compares():
    assert admit([5], n=2, best_of=3, temperature=1).sampling.num_logprobs == 0
    assert admit([5], n=2, best_of=3, temperature=1, logprobs=4).sampling.num_logprobs == 4
    assert admit([5], n=3, best_of=3).sampling.num_logprobs is None
    assert admit([5], use_beam_search=True, beam_width=2).sampling.num_logprobs is None


def test_options_reach_the_request():
    options = RequestOptions(priority=-3, tenant="t", cache_salt="s", timeout_s=2.5)
    request = LARGE.admit(AddRequest(0, [5], SamplingParams(), options=options), 0, now_s=10.0)
    assert (request.priority, request.tenant, request.deadline_s) == (-3, "t", 12.5)
    assert request.partition == options.partition


def test_a_client_of_a_tenant_has_its_own_share_and_no_cache_of_its_own():
    options = RequestOptions(client="10.0.0.1")
    request = LARGE.admit(AddRequest(0, [5], SamplingParams(), options=options), 0)
    assert (request.tenant, request.partition) == ("10.0.0.1", RequestOptions().partition)


def test_a_bad_word_of_too_many_tokens():
    with pytest.raises(InvalidParameter, match="33 tokens"):
        VALIDATOR.admit(AddRequest(0, [5], SamplingParams(max_tokens=2), (tuple(range(33)),)), fresh_seed=0)


@settings(max_examples=examples(20, 60))
@given(prompt=st.lists(junk, max_size=70))
def test_any_prompt_is_admitted_or_refused(prompt):
    try:
        request = admit(prompt)
    except QuireError as error:
        assert error.message
    else:
        assert all(type(token) is int and 0 <= token < VOCAB for token in prompt)
        assert request.prompt.tolist() == prompt


@settings(max_examples=examples(20, 60))
@given(values=st.dictionaries(st.sampled_from(sorted(SamplingParams.__dataclass_fields__)), junk, max_size=3))
def test_any_parameters_are_admitted_or_refused(values):
    try:
        params = SamplingParams(**values)
        request = LARGE.admit(AddRequest(0, [5], params), fresh_seed=0)
    except QuireError as error:
        assert error.message and len(error.message) < 400
    else:
        assert 1 <= request.max_tokens <= 63
        assert params.stop_strings == () or all(params.stop_strings)
        hash((request.sampling.end_ids, request.sampling.logit_bias, request.sampling.allowed_ids))

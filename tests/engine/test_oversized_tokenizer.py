"""A tokenizer may know more tokens than the model has logits for; those never reach the embedding."""

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import InvalidParameter, InvalidPrompt
from quire.sched.audit import audit_rest
from tests.llm.tiny import FIRST_BYTE, VOCAB, tiny_llama, write_model

WIDTH = FIRST_BYTE + ord("z") + 1  # logits up to "z"; the tokenizer knows all bytes


@pytest.fixture(scope="module")
def narrow(tmp_path_factory) -> LLM:
    return LLM(str(write_model(tmp_path_factory.mktemp("narrow"), tiny_llama(WIDTH), VOCAB)), dtype="float32")


def test_text_with_a_token_without_a_logit_is_refused(narrow):
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    assert narrow.generate("plain", greedy)[0].finished
    with pytest.raises(InvalidPrompt, match=f"0 to {WIDTH - 1}"):
        narrow.generate("naïve", greedy)
    with pytest.raises(InvalidPrompt, match=str(WIDTH)):
        narrow.generate({"prompt_token_ids": [WIDTH]}, greedy)
    audit_rest(narrow.built.engine.scheduler)


def test_parameters_with_such_tokens_are_refused(narrow):
    for params in (SamplingParams(logit_bias={WIDTH: 1.0}), SamplingParams(bad_words=["ï"])):
        with pytest.raises(InvalidParameter, match=str(WIDTH - 1)):
            narrow.generate("plain", params)
    audit_rest(narrow.built.engine.scheduler)


def test_logits_without_a_token_give_no_text(tmp_path):
    """Models pad their logits; such an id may be requested and sampled, and gives no text."""
    wide = LLM(str(write_model(tmp_path, tiny_llama(VOCAB + 16), VOCAB)), dtype="float32")
    padding = VOCAB + 3
    params = SamplingParams(temperature=0.0, max_tokens=3, allowed_token_ids=[padding], logprobs=1)
    deltas = list(wide.stream([FIRST_BYTE + ord("a"), padding], params))
    assert [token for delta in deltas for token in delta.token_ids] == [padding] * 3
    assert "".join(delta.text for delta in deltas) == ""

"""Structured output from the real model and the real engine."""

import json
import re
from dataclasses import replace

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import InvalidGrammar, InvalidParameter
from quire.core.sampling import Grammar, GrammarKind

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def llm(shallow_model_path):
    return LLM(str(shallow_model_path), threads=1, max_model_len=512, kv_cache_memory=64 << 20)


def settle(llm):
    while not llm.client.idle:
        llm.client.step()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_continuation_matches_the_schema(llm, temperature):
    params = SamplingParams(n=3, temperature=temperature, max_tokens=80, seed=3, grammar=PERSON)
    (output,) = llm.chat([{"role": "user", "content": "Name a person and an age."}], params)
    for said in output.outputs:
        assert said.finish_reason == "stop", said
        person = json.loads(said.text)
        assert set(person) == {"name", "age"} and 0 <= person["age"] <= 99 and len(person["name"]) <= 12
    settle(llm)
    assert llm.built.engine.grammars.num_sequences == 0


def test_choices_patterns_and_free_outputs_in_one_batch(llm):
    choice = SamplingParams(
        temperature=0.0, max_tokens=20, grammar=Grammar(GrammarKind.CHOICE, '["red", "green blue"]')
    )
    pattern = SamplingParams(
        temperature=1.0, seed=1, max_tokens=40, grammar=Grammar(GrammarKind.REGEX, "[a-f]{3}-[0-9]{4}")
    )
    free = SamplingParams(temperature=0.0, max_tokens=12)
    alone = llm.generate("The sky is", free)[0].outputs[0].text
    one, two, three = llm.generate(["Colour:", "Code:", "The sky is"], [choice, pattern, free])
    assert one.outputs[0].text in ("red", "green blue")
    assert re.fullmatch("[a-f]{3}-[0-9]{4}", two.outputs[0].text)
    assert three.outputs[0].text == alone
    assert one.outputs[0].finish_reason == two.outputs[0].finish_reason == "stop"


def test_finish_reasons_of_truncated_and_complete_outputs(llm):
    cut = llm.generate("x", SamplingParams(max_tokens=3, grammar=PERSON))[0].outputs[0]
    assert cut.finish_reason == "length"
    stubborn = SamplingParams(
        max_tokens=50, ignore_eos=True, min_tokens=30, grammar=Grammar(GrammarKind.CHOICE, '["yes"]')
    )
    said = llm.generate("x", stubborn)[0].outputs[0]
    assert (said.text, said.finish_reason) == ("yes", "stop")


def test_a_grammar_that_excludes_all_allowed_tokens_is_a_client_error(llm):
    """Only that row ends; a failure of the grammar itself would be an internal error."""
    only = llm.client.encode("yes")[1]
    yes = Grammar(GrammarKind.CHOICE, '["yes"]')
    params = SamplingParams(temperature=0.0, max_tokens=9, grammar=yes, allowed_token_ids=only)
    assert llm.generate("x", params)[0].outputs[0].text == "yes"
    free = SamplingParams(temperature=0.0, max_tokens=9)
    beside = llm.generate("The sky is", free)[0].outputs[0].text
    other = llm.client.encode("no")[1]
    cornered, free_again = llm.generate(["x", "The sky is"], [replace(params, allowed_token_ids=other), free])
    (said,) = cornered.outputs
    assert (said.finish_reason, said.token_ids) == ("nothing_left", [])
    assert "the form of the answer and allowed_token_ids left none" in said.error
    assert free_again.outputs[0].text == beside
    settle(llm)
    assert llm.built.engine.grammars.num_sequences == 0


def test_an_invalid_grammar_is_refused_and_leaves_no_state(llm):
    with pytest.raises(InvalidGrammar):
        llm.generate("x", SamplingParams(grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type": 7}')))
    with pytest.raises(InvalidParameter, match="beam search"):
        SamplingParams(n=2, use_beam_search=True, grammar=PERSON)
    with pytest.raises(InvalidParameter, match="grammar must be a text"):
        SamplingParams(grammar=7)
    assert llm.client.idle and llm.built.engine.grammars.num_sequences == 0

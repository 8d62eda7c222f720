"""Tools, response formats and template variables offline, scores, tokens; keywords of other engines."""

import json
import re

import pytest
from pydantic import BaseModel, Field

from quire import LLM, Grammar, GrammarKind, QuireError, SamplingParams

QUESTION = [{"role": "user", "content": "How is the weather in Oslo?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
GREEDY = SamplingParams(temperature=0, max_tokens=80)


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def llm(shallow_model_path):
    return LLM(str(shallow_model_path), threads=1, max_model_len=1024, kv_cache_memory=64 << 20)


def test_a_required_tool_is_called_with_arguments_of_its_schema(llm):
    (output,) = llm.chat(QUESTION, GREEDY, tools=[WEATHER], tool_choice="required")
    (call, *_) = output.outputs[0].tool_calls
    assert call.name == "get_weather" and set(json.loads(call.arguments)) == {"city"}
    assert call.message()["function"] == {"name": "get_weather", "arguments": call.arguments}
    history = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call.message()]},
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    (named,) = llm.chat(
        history, GREEDY, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "get_weather"}}
    )
    assert [each.name for each in named.outputs[0].tool_calls] == ["get_weather"]
    (free,) = llm.chat(history, SamplingParams(temperature=0, max_tokens=4), tools=[WEATHER], tool_choice="none")
    assert free.outputs[0].tool_calls == []


@pytest.mark.parametrize(
    "response_format",
    [Person, {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema()}}],
)
def test_a_response_format_is_followed(llm, response_format):
    (output,) = llm.chat(QUESTION, GREEDY, response_format=response_format)
    Person.model_validate_json(output.outputs[0].text)
    streamed = "".join(delta.text for delta in llm.stream_chat(QUESTION, GREEDY, response_format=response_format))
    assert streamed == output.outputs[0].text


@pytest.mark.parametrize(
    "given, matches",
    [
        ({"json": Person}, lambda text: Person.model_validate_json(text)),
        ({"json": json.dumps(Person.model_json_schema())}, lambda text: Person.model_validate_json(text)),
        ({"regex": "[a-c]{3}"}, lambda text: re.fullmatch("[a-c]{3}", text)),
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"grammar": 'start: "a" ("b" | "c")'}, lambda text: re.fullmatch("a[bc]", text)),
    ],
)
def test_every_way_to_constrain_an_output(llm, given, matches):
    params = SamplingParams(temperature=0, max_tokens=60, **given)
    assert isinstance(params.grammar, Grammar) and params.json is params.regex is params.choice is None
    (output,) = llm.generate("Say:", params)
    assert matches(output.outputs[0].text), output.outputs[0]


def test_template_variables_reach_the_template(llm):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}"
    (output,) = llm.chat(
        QUESTION, SamplingParams(max_tokens=1), chat_template=template, chat_template_kwargs={"mood": "!!"}
    )
    assert llm.detokenize(output.prompt_token_ids).endswith("Oslo?!!")


@pytest.mark.parametrize(
    "given, words",
    [
        ({"tools": "x"}, "tools must be a list"),
        ({"tools": [{"type": "function"}]}, "tools\\[0\\] must be"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "'none', 'auto', 'required'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "not among tools"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [WEATHER], "tool_choice": {"a": 1}}, "tool_choice may be"),
        ({"response_format": {"type": "xml"}}, "response_format must be"),
        ({"response_format": {"type": "json_schema"}}, "must be a JSON schema"),
        ({"chat_template_kwargs": {"messages": []}}, "may not set 'messages'"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_in_words(llm, given, words):
    with pytest.raises(QuireError, match=words):
        llm.chat(QUESTION, GREEDY, **given)


def test_two_constraints_are_refused(llm):
    with pytest.raises(QuireError, match="both constrain"):
        llm.chat(QUESTION, SamplingParams(regex="a"), response_format=Person)
    with pytest.raises(QuireError, match="regex and choice both"):
        SamplingParams(regex="a", choice=["b"])


@pytest.mark.parametrize(
    "given, words",
    [
        ({"json": "{"}, "not JSON"), ({"json": 3}, "must be a JSON schema"),
        ({"json": {"a": object()}}, "not JSON data"),
        ({"regex": ""}, "must be a text"), ({"grammar": 5}, "must be a text"), ({"choice": []}, "choice is empty"),
        ({"choice": "ab"}, "must be a list"), ({"choice": [1]}, "non-empty strings"),
        ({"temperature": 9}, "from 0 to 2"),
    ],
)  # fmt: skip
def test_wrong_constraints_are_refused_in_words(given, words):
    with pytest.raises(QuireError, match=words):
        SamplingParams(**given)


@pytest.mark.parametrize(
    "name, words",
    [
        ("guided_decoding", "use json, regex, choice or grammar"), ("structured_outputs", "use json, regex"),
        ("max_new_tokens", "use max_tokens"), ("repeat_penalty", "use repetition_penalty"), ("num_beams", "beam_width"),
        ("temprature", "did you mean temperature\\?"), ("zzz", "help"),
        ("priority", "keyword of generate, chat"), ("cache_salt", "keyword of generate"),
    ],
)  # fmt: skip
def test_keywords_of_other_engines_get_a_hint(name, words):
    with pytest.raises(TypeError, match=words) as raised:
        SamplingParams(**{name: 1})
    assert isinstance(raised.value, QuireError) and name in str(raised.value)


@pytest.mark.parametrize(("keyword", "words"), [("tools", "chat takes it"), ("system", '"role": "system"')])
def test_keywords_of_chats_get_a_hint(llm, keyword, words):
    with pytest.raises(TypeError, match=words):
        llm.stream_chat([{"role": "user", "content": "hi"}], **{keyword: []})


def test_scores_are_cosines_of_embeddings(llm):
    same, other = llm.score("a river", ["a river", "quantum chromodynamics"])
    assert same.score == pytest.approx(1, abs=1e-3) and other.score < same.score and same.num_tokens > 2
    assert len(llm.score(["a", "b"], ["a", "c"])) == 2
    with pytest.raises(QuireError, match="give one text_1, or as many"):
        llm.score(["a", "b"], ["c", "d", "e"])


def test_tokens_and_back(llm):
    assert llm.detokenize(llm.tokenize("Hello world")) == "Hello world"
    for wrong in ("text", [1, "2"], [-1], 5.5):
        with pytest.raises(QuireError, match="detokenize takes a list of token ids, not "):
            llm.detokenize(wrong)  # type: ignore[arg-type]
    with pytest.raises(QuireError, match=r"no token 1000000: this model's ids run from 0 to \d+\."):
        llm.detokenize([1, 1_000_000])
    for pair in ((1, "a"), ("a", ["b", 2]), (None, None)):
        with pytest.raises(QuireError, match=r"text_[12] must be a text or a list of texts, not "):
            llm.score(*pair)  # type: ignore[arg-type]
    with pytest.raises(QuireError, match="one text"):
        llm.tokenize(["a"])


def test_what_it_prints_as(llm):
    assert "device='cpu'" in repr(llm) and "max_model_len=1024" in repr(llm) and "KV cache of" in repr(llm)
    assert repr(SamplingParams(choice=["a"])).count("CHOICE") == 1
    assert Grammar(GrammarKind.REGEX, "a") == SamplingParams(regex="a").grammar

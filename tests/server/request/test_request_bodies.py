"""Bodies are read once, at the edge: typed, bounded, and refused by name."""

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidParameter, InvalidPrompt, QuireError
from quire.server.anthropic.messages import MessagesBody
from quire.server.anthropic.messages import as_chat as messages_as_chat
from quire.server.openai.responses_input import ResponsesBody
from quire.server.openai.responses_input import as_chat as responses_as_chat
from quire.server.request.decode import (
    MAX_COMMAS,
    MAX_DEPTH,
    MAX_OBJECTS,
    MAX_STRINGS,
    JsonSize,
    decode,
    nests_deeper,
    size_of,
)
from quire.server.request.schema import REPLACEMENTS, ChatBody, CompletionBody, Legacy

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def refused(body: bytes, kind: type[msgspec.Struct] = CompletionBody) -> QuireError:
    with pytest.raises(QuireError) as caught:
        decode(body, kind)
    assert caught.value.status == 400
    assert len(caught.value.message) < 1000
    return caught.value


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"n": "x"}, "n", 'n must be a whole number or left out, not "x".'),
        ({"n": 1.5}, "n", "n must be a whole number or left out, not 1.5."),
        ({"temperature": True}, "temperature", "temperature must be a number or left out, not true."),
        ({"temperature": "hot"}, "temperature", 'temperature must be a number or left out, not "hot".'),
        ({"temperature": {"a": [1]}}, "temperature", 'not {"a": [1]}.'),
        ({"temperature": "h" * 1000}, "temperature", "hhh…."),
        ({"seed": "é\n"}, "seed", 'not "\\u00e9\\n".'),
        ({"stop": 7}, "stop", "stop must be text, a list of texts or left out, not 7."),
        ({"stop": ["a", 7]}, "stop[1]", "stop[1] must be text, not 7."),
        ({"stream": "yes"}, "stream", 'stream must be true, false or left out, not "yes".'),
        ({"stop_token_ids": "2"}, "stop_token_ids", "must be a list of whole numbers or left out"),
        ({"stream_options": []}, "stream_options", "stream_options must be an object or left out, not []."),
        (
            {"stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "stream_options.include_usage must be true, false or left out, not 1.",
        ),
        ({"logit_bias": {"3": 1, "no": 1}}, "logit_bias", "has 'no': 1; it maps token ids to numbers"),
        ({"logit_bias": {"3": 1, "1.5": 1}}, "logit_bias", "has '1.5': 1;"),
        ({"logit_bias": {"3": 1, "5": "x"}}, "logit_bias", "has '5': 'x';"),
        ({"logit_bias": [5]}, "logit_bias", "logit_bias must be an object or left out, not [5]."),
        ({"response_format": {}}, "response_format.type", "response_format.type is missing; it must be text."),
        ({"response_format": {"type": None}}, "response_format.type", "must be text, not null."),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "is not a field; the fields are json, json_obj"),
    ],
)
def test_a_wrong_type_is_named_by_its_path(body: dict[str, object], param: str, words: str) -> None:
    error = refused(json.dumps({"prompt": "hi", **body}).encode())
    assert isinstance(error, InvalidParameter)
    assert error.param == param
    assert param in error.message and words in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"[]", b"null", b"7", b'"text"', b"{", b"{'prompt': 'hi'}", b'{"prompt": NaN}',
        b'{"prompt": "hi"} x', b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00 x"}', b'{"prompt": "\xff"}', b"\xff\xfe",
        b'{"\\ud800": 1}',
        b'{"prompt": ' + b"[" * 100_000, b'{"x": ' + b'{"y":' * 100_000, b'{"prompt": 7}', b"{}",
        b'{"prompt": "hi", "messages": ' + b"1" * 100_000 + b"}",
    ],
)  # fmt: skip
def test_an_invalid_body_is_refused(body: bytes) -> None:
    if b"messages" not in body:
        assert isinstance(refused(body), InvalidPrompt)
    else:
        assert decode(body, CompletionBody).prompt == "hi", "an unknown field is ignored"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[1]", "The body must be a JSON object, not [1]."),
        (b"null", "The body must be a JSON object, not null."),
        (b"{}", "prompt is missing; it must be text or a list of texts, whole numbers or lists of whole numbers."),
        (b'{"prompt": ["a", 1.5]}', "prompt[1] must be text, a whole number or a list of whole numbers, not 1.5."),
        (b'{"prompt": "x", "n": "y", "n": 2}', "n must be a whole number or left out, not text."),
        (b'{"n": "y", "prompt": NaN}', "n must be a whole number or left out, not text."),
        (b'{"n": "y", "prompt": "' + b"x" * (2 << 20) + b'"}', "n must be a whole number or left out, not text."),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature cannot be read: Number out of range; 1e999 was given."),
    ],
)
def test_a_body_is_refused_in_plain_words(body: bytes, words: str) -> None:
    assert refused(body).message == words


def test_messages_are_refused_with_an_example() -> None:
    error = refused(b'{"messages": "hi"}', ChatBody)
    assert error.message.startswith('messages must be a list of objects, not "hi"; send for example [{"role": ')
    assert refused(b"{}", ChatBody).message.startswith("messages is missing; it must be a list of objects; send for")


@pytest.mark.parametrize("rest", [b"NaN}", b'"\\ud800"}', b"[" * 1000])
def test_a_wrong_bias_before_invalid_json_is_refused(rest: bytes) -> None:
    assert refused(b'{"logit_bias": {"no": 1}, "prompt": ' + rest).status == 400


@pytest.mark.parametrize("number", [b"1" * 5000, b"1e999", b"-1e999", b"1" * 400 + b".5"])
def test_a_number_beyond_all_bounds_is_refused(number: bytes) -> None:
    assert refused(b'{"prompt": "hi", "temperature": ' + number + b"}").param == "temperature"


def test_unknown_fields_and_nulls_are_ignored() -> None:
    names = [name for name in ChatBody.__struct_fields__ if name != "messages"]
    body = decode(json.dumps({**CHAT, **dict.fromkeys(names), "store": True, "anything": [{}]}).encode(), ChatBody)
    assert all(getattr(body, name) is None for name in names)


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_a_legacy_field_is_refused_with_its_replacement(name: str) -> None:
    error = refused(json.dumps({**CHAT, name: "x"}).encode(), ChatBody)
    assert error.param == name
    assert REPLACEMENTS[name] in error.message
    assert refused(json.dumps({**CHAT, name: {}}).encode(), ChatBody).param == name, "an empty schema is one"
    decode(json.dumps({**CHAT, name: None}).encode(), ChatBody)


def test_values_that_ask_for_nothing_are_accepted() -> None:
    nothing = {"functions": [], "function_call": "none", "modalities": ["text"], "typical_p": 1.0, "mirostat": 0}
    assert decode(json.dumps({**CHAT, **nothing}).encode(), ChatBody).messages
    assert refused(json.dumps({**CHAT, "modalities": ["text", "audio"]}).encode(), ChatBody).param == "modalities"
    assert refused(json.dumps({**CHAT, "typical_p": 0.5}).encode(), ChatBody).param == "typical_p"


def test_every_legacy_field_has_a_replacement() -> None:
    assert set(Legacy.__struct_fields__) == set(REPLACEMENTS)


@pytest.mark.parametrize(
    ("kind", "name", "value", "instead"),
    [
        (ResponsesBody, "response_format", {"type": "json_object"}, "use text.format"),
        (ResponsesBody, "max_tokens", 0, "use max_output_tokens"),
        (ResponsesBody, "max_completion_tokens", 5, "use max_output_tokens"),
        (ResponsesBody, "guided_json", {}, "structured_outputs"),
        (MessagesBody, "response_format", {"type": "json_object"}, "use output_config.format"),
        (MessagesBody, "output_format", {"type": "json_schema", "schema": {}}, "use output_config.format"),
    ],
)
def test_a_field_of_another_api_is_refused_with_its_name_here(
    kind: type[msgspec.Struct], name: str, value: object, instead: str
) -> None:
    body = {**CHAT, "input": "hi", "max_tokens": 5, name: value}
    if kind is ResponsesBody and name != "max_tokens":
        del body["max_tokens"]
    error = refused(json.dumps(body).encode(), kind)
    assert error.param == name and instead in error.message


@pytest.mark.parametrize("kind", [ResponsesBody, MessagesBody])
def test_sampling_fields_have_the_same_names_in_all_apis(kind: type[ResponsesBody] | type[MessagesBody]) -> None:
    sampling: dict[str, Any] = {"stop": ["x"], "stop_token_ids": [7], "bad_words": ["no"], "allowed_token_ids": [1, 2],
                                "logit_bias": {"3": 1.0}, "min_p": 0.5}  # fmt: skip
    body = {**CHAT, "input": "hi", **({"max_tokens": 5} if kind is MessagesBody else {}), **sampling}
    decoded = decode(json.dumps(body).encode(), kind)
    chat = (
        messages_as_chat(decoded)
        if isinstance(decoded, MessagesBody)
        else responses_as_chat(decoded, (), lambda _: None)
    )
    assert {name: getattr(chat, name) for name in sampling} == {**sampling, "logit_bias": {3: 1.0}}


def test_stop_has_one_name_at_a_time() -> None:
    body = {**CHAT, "max_tokens": 5, "stop_sequences": ["x"]}
    assert messages_as_chat(decode(json.dumps(body).encode(), MessagesBody)).stop == ["x"]
    with pytest.raises(InvalidParameter, match="give one of them"):
        messages_as_chat(decode(json.dumps({**body, "stop": "y"}).encode(), MessagesBody))


JSON = st.recursive(
    st.none() | st.integers() | st.text('[]{}"\\a', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('[]{}"\\a', max_size=3), inner, max_size=3),
    max_leaves=8,
)


def depth(value: object) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(value=JSON, indent=st.sampled_from([None, 1]))
def test_the_depth_of_a_text_is_that_of_its_value(value: object, indent: int | None) -> None:
    text = json.dumps(value, indent=indent).encode()
    assert not nests_deeper(text, depth(value))
    assert depth(value) == 0 or nests_deeper(text, depth(value) - 1)


def objects_and_strings(value: object) -> tuple[int, int]:
    if isinstance(value, str):
        return 0, 1
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    counted = [objects_and_strings(each) for each in inner]
    own = isinstance(value, dict | list)
    return own + sum(each for each, _ in counted), sum(each for _, each in counted)


def commas(value: object) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return max(len(inner) - 1, 0) + sum(map(commas, inner))


@given(value=JSON, indent=st.sampled_from([None, 1]))
def test_the_size_of_a_text_is_that_of_its_value(value: object, indent: int | None) -> None:
    assert size_of(json.dumps(value, indent=indent).encode()) == (
        depth(value),
        *objects_and_strings(value),
        commas(value),
    )


@pytest.mark.parametrize("num_before", [*range(6), (1 << 18) - 3, (1 << 18) - 2, (1 << 18) - 1, 1 << 18])
def test_an_escape_at_the_end_of_a_block_stays_whole(num_before: int) -> None:
    escaped = ["x" * num_before + "\\" * (1 << 18) + '"{', {"\\": '\\"['}]
    assert size_of(json.dumps(escaped).encode()) == (2, 2, 3, 1)


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_a_body_that_would_take_ten_times_its_bytes_is_refused(kind: type[msgspec.Struct]) -> None:
    """400,000 messages in 13 MB took 150 MB, and a second in which no other request was served."""
    many = {**CHAT, "prompt": "hi", "metadata": [{}] * MAX_OBJECTS}
    assert f"a request may bring {MAX_OBJECTS} and {MAX_STRINGS}" in refused(json.dumps(many).encode(), kind).message
    strings = {**CHAT, "prompt": "hi", "metadata": [""] * MAX_STRINGS}
    assert f"{MAX_STRINGS} strings" not in refused(json.dumps(strings).encode(), kind).message
    blocks = b"[" + b"{}," * (1 << 20)
    assert MAX_OBJECTS < size_of(blocks, JsonSize(9, MAX_OBJECTS, 9, MAX_OBJECTS)).num_objects < 2 * MAX_OBJECTS, (
        "no more is read"
    )
    ids = {**CHAT, "prompt": [7] * (MAX_COMMAS + 2)}
    assert f"a request may bring {MAX_COMMAS}" in refused(json.dumps(ids).encode(), kind).message
    commas = {**CHAT, "prompt": "," * (MAX_COMMAS + 2)}
    assert decode(json.dumps(commas).encode(), kind), "text may have any commas"
    code = {**CHAT, "prompt": '{"a": ["b", {}]} ' * MAX_OBJECTS}
    assert decode(json.dumps(code).encode(), kind), "text may have any brackets"


def test_depth_is_counted_across_blocks() -> None:
    far = b'["' + b"x[" * (1 << 18) + b'",' + b"[]," * (1 << 17) + b"[[[]]]]"
    assert nests_deeper(far, 3) and not nests_deeper(far, 4)


@pytest.mark.parametrize("levels", [MAX_DEPTH, MAX_DEPTH + 1])
def test_the_deepest_body_that_is_read(levels: int) -> None:
    inside = levels - 4  # the body, the messages, the message, its content
    nested: object = "x"
    for _ in range(inside):
        nested = [nested]
    body = json.dumps({"messages": [{"role": "user", "content": {"x": nested}}]}).encode()
    if levels == MAX_DEPTH:
        assert decode(body, ChatBody).messages
    else:
        assert "64 levels" in refused(body, ChatBody).message


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    kind=st.sampled_from([ChatBody, CompletionBody]),
    name=st.sampled_from(ChatBody.__struct_fields__),
    value=ANYTHING,
)
def test_no_value_of_any_field_is_more_than_a_refusal(kind: type[msgspec.Struct], name: str, value: object) -> None:
    body = json.dumps({**CHAT, "prompt": "hi", name: value}).encode()
    try:
        decoded = decode(body, kind)
    except QuireError as error:
        assert error.status == 400
    else:
        told = getattr(decoded, name, None)
        assert told is None or not isinstance(told, float) or math.isfinite(told)

"""An error names the field that the client sent, whatever its internal name."""

from typing import Any

import httpx
import pytest

from quire.core.errors import InvalidParameter
from quire.server.http.errors import rename_error_params

HELLO = [{"role": "user", "content": "hi"}]
LONG = "word " * 2000
CHAT: dict[str, Any] = {"messages": HELLO, "max_tokens": 1}
BEAMS = {"use_beam_search": True, "n": 2, "temperature": 0}
FORM = {"type": "json_object"}
BAD_FORMAT = {"type": "json_schema", "schema": {"type": "object", "propertyNames": {"maxLength": 9}}}


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt", "in the messages"),
        ("/v1/embeddings", {"input": LONG}, "input", "in the messages"),
        ("/v1/responses", {"input": LONG}, "input", "in the messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages", "in the messages"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 5000}, "max_tokens", "5000 in the completion"),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 5000}, "max_tokens", "5000 in the completion"),
        ("/v1/chat/completions", {"messages": HELLO, "max_completion_tokens": 5000}, "max_completion_tokens",
         "5000 in the completion"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 5000}, "max_output_tokens", "5000 in the completion"),
        ("/v1/completions", {"prompt": [9] * 1024, "max_tokens": 1}, "prompt", "1024 in the messages"),
        ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"continuous_usage_stats": True}},
         "stream_options.continuous_usage_stats", "requires include_usage: true"),
        ("/v1/completions", {"prompt": "hi", "truncation_side": "middle"}, "truncation_side", "'left' or 'right'"),
        ("/v1/embeddings", {"input": "hi", "truncation_side": "middle"}, "truncation_side", "'left' or 'right'"),
        ("/detokenize", {"tokens": [10**6]}, "tokens", "1000000"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2, "min_tokens": 5}, "min_tokens",
         "more than max_output_tokens, which is 2"),
        ("/v1/chat/completions", {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens",
         "max_completion_tokens must be"),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 0}, "max_tokens", "max_tokens must be"),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 101}, "top_logprobs",
         "top_logprobs must be a whole number from 0 to 100, not 101."),
        ("/v1/chat/completions", {**CHAT, "prompt_logprobs": 101}, "prompt_logprobs", "prompt_logprobs must be"),
        ("/v1/chat/completions", {**CHAT, **BEAMS, "logprobs": True}, "logprobs",
         "logprobs cannot be combined with a beam search"),
        ("/v1/responses", {"input": "hi", "text": {"format": {"type": "yaml"}}}, "text.format.type",
         "text.format.type is 'yaml'"),
        ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_schema", "schema": 7}}},
         "text.format.schema", "text.format.schema must be"),
        ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_object", "schema": {}}}},
         "text.format.schema", "text.format.schema is not served"),
        ("/v1/responses", {"input": "hi", "text": {"format": {**BAD_FORMAT, "strict": True}}}, "text.format",
         "propertyNames"),
        ("/v1/chat/completions", {**CHAT, "structured_outputs": {"json": {"enum": []}}}, "structured_outputs",
         "cannot be compiled"),
        ("/v1/chat/completions", {**CHAT, **BEAMS, "response_format": FORM}, "response_format",
         "response_format cannot be combined with a beam search"),
        ("/v1/completions", {"prompt": "hi", **BEAMS, "structured_outputs": {"regex": "a"}}, "structured_outputs",
         "structured_outputs cannot be combined with a beam search"),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1]",
         '{"type": "function", "name": …, "parameters": {…}}'),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": 7}]},
         "tools[0].parameters", "a JSON schema"),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "name": "f"}]}, "tools[0]",
         '{"type": "function", "function": {"name": …}}'),
    ],
)  # fmt: skip
def test_an_error_names_the_field_that_was_sent(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and words in error["message"], error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"stop_sequences": [""]}, "stop_sequences must hold non-empty strings"),
        ({"stop": [""]}, "stop must hold non-empty strings"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 7}}}, "output_config.format.schema must be"),
        ({"tools": [{"input_schema": {}}]}, 'tools[0] must be {"name": …, "input_schema": {…}}'),
        ({"tools": [{"name": "f", "input_schema": 7}]}, "tools[0].input_schema must be a JSON schema"),
    ],
)
def test_anthropic_errors_name_the_field_that_was_sent(http: httpx.Client, body: dict[str, Any], words: str) -> None:
    response = http.post("/v1/messages", json={**CHAT, **body})
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be"),
        ({"top_n_tokens": 1000, "details": True}, "top_n_tokens must be"),
        ({"truncate": 0}, "truncate must be"),
        ({"grammar": {"type": "json", "value": 7}}, "grammar.value must be a JSON schema"),
        ({"grammar": {"type": "regex", "value": ""}}, "grammar.value: it is empty"),
    ],
)
def test_tgi_errors_name_the_field_that_was_sent(http: httpx.Client, parameters: dict[str, Any], words: str) -> None:
    response = http.post("/generate", json={"inputs": "hi", "parameters": parameters})
    assert response.status_code == 422, response.text
    assert words in response.json()["error"]


def test_words_and_values_that_look_like_field_names_are_unchanged() -> None:
    names = {"stop": "stop_sequences", "max_tokens": "max_new_tokens", "max_tokens.low": "lowest"}
    message = "stop may not stop, 'max_tokens' is a value, x_max_tokens another; max_tokens.low and max_tokens not."
    with pytest.raises(InvalidParameter) as caught, rename_error_params(names):
        raise InvalidParameter(message, param="max_tokens[3]")
    assert caught.value.param == "max_new_tokens[3]"
    assert caught.value.message == (
        "stop_sequences may not stop, 'max_tokens' is a value, x_max_tokens another; lowest and max_new_tokens not."
    )

"""Any wrong request gets an OpenAI-shaped error with the right status, and the server goes on."""

import json
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

HI = {"prompt": "hi", "max_tokens": 1}
HELLO = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def refusal(response: httpx.Response) -> dict[str, str]:
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == {404: "not_found_error", 504: "server_error"}.get(
        response.status_code, "invalid_request_error"
    )
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "words"),
    [
        ("completions", {**HI, "model": "gpt-x"}, 404, "model_not_found", "this server has 'smollm2-135m-instruct'"),
        ("completions", {**HI, "max_tokens": 5000}, 400, "context_length_exceeded", "maximum context length is 1024"),
        ("completions", {"prompt": "word " * 2000}, 400, "context_length_exceeded", "(2001 in the messages"),
        ("completions", {"prompt": "a" * 131_073}, 400, "context_length_exceeded", "requested at least 1025 tokens"),
        ("completions", {"prompt": ""}, 400, "invalid_prompt", "empty"),
        ("completions", {"prompt": [10**6]}, 400, "invalid_prompt", "1000000"),
        ("completions", {"prompt": ["one", 2]}, 400, "invalid_prompt", "ids not beside texts"),
        ("completions", {"prompt": []}, 400, "invalid_prompt", "not empty"),
        ("completions", {"prompt": ["a"] * 129}, 400, "invalid_prompt", "129 prompts"),
        ("completions", {"prompt": [[10**30]], "echo": True}, 400, "invalid_prompt", "ids run from 0"),
        ("completions", {**HI, "stop_token_ids": [10**30]}, 400, "invalid_parameter", "stop_token_ids has"),
        ("completions", {**HI, "allowed_token_ids": [10**30]}, 400, "invalid_parameter", "allowed_token_ids has"),
        ("completions", {**HI, "logit_bias": {10**30: 1}}, 400, "invalid_parameter", "logit_bias has"),
        ("completions", {**HI, "temperature": -1}, 400, "invalid_parameter", "temperature"),
        ("completions", {**HI, "temperature": "x" * 10**6}, 400, "invalid_parameter", "temperature"),
        ("completions", {**HI, "logit_bias": {"no": 1}}, 400, "invalid_parameter", "logit_bias"),
        ("completions", {**HI, "stream": "yes"}, 400, "invalid_parameter", "stream"),
        ("completions", {**HI, "stream_options": {}}, 400, "invalid_parameter", "stream_options"),
        ("completions", {**HI, "best_of": 3, "n": 2}, 400, "invalid_parameter", "best_of must be omitted or equal n"),
        ("completions", {**HI, "suffix": "x"}, 400, "invalid_parameter", "suffix"),
        ("completions", {**HI, "truncate_prompt_tokens": 0}, 400, "invalid_parameter", "truncate_prompt_tokens"),
        ("completions", {**HI, "guided_json": {"type": "object"}}, 400, "invalid_parameter", "use response_format"),
        ("completions", {**HI, "stream": True, "prompt_logprobs": 1}, 400, "invalid_parameter", "be streamed"),
        ("completions", {**HI, "use_beam_search": True, "stop": "x"}, 400, "invalid_parameter", "beam search"),
        ("completions", {**HI, "n": 100}, 400, "invalid_parameter", "--max-num-seqs 100"),
        ("completions", {**HI, "priority": 1000}, 400, "invalid_parameter", "priority"),
        ("completions", {**HI, "cache_salt": 7}, 400, "invalid_parameter", "cache_salt"),
        ("completions", {**HI, "timeout_s": 0}, 504, "deadline_expired", "timeout_s"),
        ("completions", {**HI, "logprobs": 101}, 400, "invalid_parameter", "logprobs"),
        (
            "chat/completions",
            {},
            400,
            "invalid_prompt",
            'messages is missing; it must be a list of objects; send for example [{"role"',
        ),
        (
            "chat/completions",
            {"messages": "hi"},
            400,
            "invalid_prompt",
            '; send for example [{"role": "user", ',
        ),
        ("chat/completions", {"messages": [{"role": 7}]}, 400, "invalid_prompt", "role"),
        ("chat/completions", {"messages": HELLO, "tools": [{}]}, 400, "invalid_parameter", "tools[0]"),
        ("chat/completions", {"messages": HELLO, "tool_choice": "required"}, 400, "invalid_parameter", "no tools"),
        (
            "chat/completions",
            {"messages": HELLO, "tools": TOOLS, "tool_choice": "maybe"},
            400,
            "invalid_parameter",
            "'maybe'",
        ),
        (
            "chat/completions",
            {"messages": HELLO, "tools": TOOLS, "tool_choice": {"function": {"name": "g"}}},
            400,
            "invalid_parameter",
            "'g'",
        ),
        ("chat/completions", {"messages": HELLO, "functions": [{"name": "f"}]}, 400, "invalid_parameter", "use tools"),
        ("chat/completions", {"messages": HELLO, "chat_template": "x"}, 400, "invalid_parameter", "chat_template"),
        ("chat/completions", {"messages": HELLO, "documents": [{}]}, 400, "invalid_parameter", "documents"),
        (
            "chat/completions",
            {"messages": HELLO, "chat_template_kwargs": {"messages": []}},
            400,
            "invalid_parameter",
            "field of its own",
        ),
        ("chat/completions", {"messages": HELLO, "top_logprobs": 2}, 400, "invalid_parameter", "logprobs: true"),
        ("chat/completions", {"messages": HELLO, "best_of": 3}, 400, "invalid_parameter", "best_of is 3 and n is 1"),
        ("chat/completions", {"messages": HELLO, "max_tokens": 0}, 400, "invalid_parameter", "max_tokens"),
        ("chat/completions", {"messages": IMAGE}, 400, "invalid_prompt", "reads text only"),
        ("chat/completions", {"messages": []}, 400, "invalid_prompt", "messages"),
        ("chat/completions", [], 400, "invalid_prompt", "JSON object"),
        ("nowhere", {}, 404, "not_served", "POST /v1/nowhere is not served"),
    ],
)
def test_a_refusal_names_its_reason(
    http: httpx.Client, path: str, body: object, status: int, code: str, words: str
) -> None:
    response = http.post(f"/v1/{path}", json=body)
    error = refusal(response)
    assert (response.status_code, error["code"]) == (status, code)
    assert words in error["message"]
    assert len(error["message"]) <= 1000


def test_a_stream_that_fails_before_its_start_has_an_error_status(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={**HI, "max_tokens": 5000, "stream": True}).status_code == 400


@pytest.mark.parametrize("body", [b"", b"junk", b"{", b"\xff\xfe", b'"\\ud800"', b"[" * 100_000, b"1" * 5000])
def test_a_body_that_is_not_json(http: httpx.Client, body: bytes) -> None:
    response = http.post("/v1/completions", content=body)
    assert response.status_code == 400
    refusal(response)


def test_an_endless_body_is_cut_off(http: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(17):
            yield b" " * (1 << 20)

    response = http.post("/v1/completions", content=pieces())
    assert response.status_code == 413
    assert "16777216 bytes" in refusal(response)["message"]


def test_fields_without_effect_are_accepted(http: httpx.Client) -> None:
    harmless = {
        "tools": [],
        "response_format": {"type": "text"},
        "logprobs": None,
        "best_of": 1,
        "user": "me",
        "n": None,
    }
    assert http.post("/v1/completions", json={**HI, **harmless}).status_code == 200
    unscored = {"messages": HELLO, "max_tokens": 1, "logprobs": False, "top_logprobs": 0, "best_of": 1}
    [choice] = http.post("/v1/chat/completions", json=unscored).json()["choices"]
    assert choice["logprobs"] is None


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from(
    [
        "prompt", "messages", "temperature", "top_p", "top_k", "min_p", "n", "max_tokens", "max_completion_tokens",
        "stop", "stop_token_ids", "seed", "logit_bias", "bad_words", "allowed_token_ids", "ignore_eos", "stream",
        "stream_options", "model", "min_tokens", "presence_penalty", "skip_special_tokens", "tools", "best_of",
        "use_beam_search", "beam_width", "length_penalty", "early_stopping", "priority", "cache_salt", "logprobs",
        "top_logprobs", "prompt_logprobs", "echo", "suffix", "truncate_prompt_tokens", "tool_choice",
        "return_token_ids", "response_format", "structured_outputs", "chat_template_kwargs", "reasoning_effort",
        "continue_final_message",
    ]
)  # fmt: skip


@given(path=st.sampled_from(["completions", "chat/completions"]), junk=st.dictionaries(FIELDS, JUNK, max_size=3))
@settings(max_examples=60)
def test_random_json_never_causes_a_500(http: httpx.Client, path: str, junk: dict[str, object]) -> None:
    body = {"prompt": "hi", "messages": HELLO, "max_tokens": 1, **junk}
    content = json_with_everything(body)
    response = http.post(f"/v1/{path}", content=content)
    assert response.status_code in (200, 400, 404), response.text


def json_with_everything(body: object) -> bytes:
    """With NaN and lone surrogates."""
    return json.dumps(body).encode()

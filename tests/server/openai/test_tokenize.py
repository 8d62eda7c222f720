"""Tokenization, templates, models, and the HTML pages."""

import json
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from quire.core.sampling import SamplingParams
from quire.engine.messages import RequestOptions
from quire.engine.model_format import find_model_format
from quire.engine.outputs import Delta
from quire.server.app import ENDPOINTS
from quire.server.chat.logprobs import TokenText
from quire.server.context import ServedModel
from quire.server.openai.chunks import ChunkHeader
from quire.server.openai.completions import CompletionPrompt, CompletionResponse
from quire.server.request.params import GenerationRequest
from quire.version import __version__
from tests.server.scripted_app import Script, app_over, events, post

FRANCE = "The capital of France is"
ASK = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("text", [FRANCE, "日本語 🙂", "<|im_start|>", ""])
def test_tokenize_and_detokenize_round_trip(http: httpx.Client, text: str) -> None:
    response = http.post("/tokenize", json={"prompt": text}).json()
    assert response["count"] == len(response["tokens"]) and response["max_model_len"] == 1024
    assert "token_strs" not in response
    assert http.post("/detokenize", json={"tokens": response["tokens"]}).json() == {"prompt": text}


def test_return_token_strs_adds_the_token_strings(http: httpx.Client) -> None:
    response = http.post("/tokenize", json={"prompt": FRANCE, "return_token_strs": True}).json()
    assert response["token_strs"] == ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]


def test_the_token_count_of_a_conversation_equals_its_usage(http: httpx.Client) -> None:
    response = http.post("/tokenize", json={"messages": ASK}).json()
    charged = http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 1}).json()["usage"]
    assert response["count"] == charged["prompt_tokens"]
    text = http.post("/apply-template", json={"messages": ASK}).json()["prompt"]
    same = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert same["tokens"] == response["tokens"]


def test_variables_and_tools_reach_the_template(model: ServedModel) -> None:
    template = "{{ mood }} {{ tools | length }} {{ messages[0].content }}{# <tool_call> #}"
    model_format = find_model_format(template, model.tokenizer)
    app = app_over(Script(), replace(model, chat_template=template, model_format=model_format))
    tools = [{"type": "function", "function": {"name": "f"}}]
    fields = {"messages": ASK, "tools": tools, "chat_template_kwargs": {"mood": "calm"}}
    assert post(app, "/apply-template", fields).json() == {"prompt": "calm 1 hi"}
    assert post(app, "/tokenize", fields).json()["tokens"] == model.text().encode("calm 1 hi")


@pytest.mark.parametrize(
    ("fields", "rendered"),
    [
        ({}, "- - 1"),
        ({"reasoning_effort": "none"}, "none False 1"),
        ({"reasoning_effort": "high"}, "high True 1"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": 7}}, "high 7 1"),
        ({"tool_choice": "none"}, "- - 0"),
    ],
)
def test_what_changes_a_chats_prompt_changes_its_tokens(
    model: ServedModel, fields: dict[str, Any], rendered: str
) -> None:
    template = (
        "{{ reasoning_effort | default('-') }} {{ enable_thinking | default('-') }} "
        "{{ tools | default([], true) | length }}"
        "{# <tool_call> #}"
    )
    model_format = find_model_format(template, model.tokenizer)
    script = Script(["hi"])
    app = app_over(script, replace(model, chat_template=template, model_format=model_format))
    body = {"messages": ASK, "tools": [{"type": "function", "function": {"name": "f"}}], **fields}
    assert post(app, "/apply-template", body).json() == {"prompt": rendered}
    assert post(app, "/v1/chat/completions", {**body, "max_tokens": 5}).status_code == 200
    assert post(app, "/tokenize", body).json()["tokens"] == script.submitted[0][0]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {"messages": ASK, "chat_template": "x"}, "chat_template is not taken"),
        ("/tokenize", {"messages": ASK, "tool_choice": "required"}, "no tools"),
        ("/detokenize", {"tokens": [49152]}, "ids run from 0 to 49151"),
        ("/detokenize", {"tokens": [-1]}, "no token -1"),
        ("/detokenize", {"tokens": [10**40]}, "no token"),
        ("/detokenize", {}, "tokens"),
        ("/tokenize", {}, "prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": ASK}, "not both"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/apply-template", {"messages": [{"role": "user"}]}, "content"),
        ("/apply-template", {"messages": ASK, "chat_template_kwargs": {"tools": []}}, "tools"),
    ],
)
def test_invalid_requests_are_refused_with_a_reason(
    http: httpx.Client, path: str, body: dict[str, object], words: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_the_tokenizer_is_described(http: httpx.Client) -> None:
    response = http.get("/tokenizer_info").json()
    assert response["eos_token"] == "<|im_end|>"
    assert http.post("/tokenize", json={"prompt": response["eos_token"]}).json()["tokens"] == [response["eos_token_id"]]
    assert "im_start" in response["chat_template"]


def test_models_are_listed_by_name_and_alias(model: ServedModel) -> None:
    app = app_over(Script(["x"]), model)

    async def check(client: httpx.AsyncClient) -> None:
        prompt_list = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in prompt_list] == ["org/model", "other"]
        assert {(card["root"], card["max_model_len"], card["object"]) for card in prompt_list} == {
            ("org/model", 1024, "model")
        }
        for name in ("org/model", "other", "org%2Fmodel"):
            assert (await client.get(f"/v1/models/{name}")).status_code == 200
        missing = await client.get("/v1/models/org")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
        assert "'org/model', 'other'" in missing.json()["error"]["message"]
        for name, status in (("org/model", 200), ("other", 200), (None, 200), ("gpt", 404)):
            answer = await client.post("/v1/chat/completions", json={"messages": ASK, "model": name})
            assert answer.status_code == status
            assert status != 200 or answer.json()["model"] == "org/model"

    events(app, check)


def test_a_model_without_a_tokenizer_takes_only_ids(model: ServedModel) -> None:
    app = app_over(Script([""]), replace(model, tokenizer=None))
    assert post(app, "/v1/completions", {"prompt": [1, 2], "echo": True}).status_code == 200
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": ASK})):
        refused = post(app, path, body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_tokenizer")


@pytest.mark.parametrize(("has_text", "counting", "num_sent"), [(True, False, 2), (False, False, 3), (True, True, 3)])
def test_deltas_without_text_are_streamed_only_where_they_matter(
    model: ServedModel, has_text: bool, counting: bool, num_sent: int
) -> None:
    """Else a benchmark with dummy weights, whose tokens have no text, would receive nothing until the end."""
    generation = GenerationRequest(SamplingParams(), RequestOptions(), None, stream=True, continuous_usage=counting)
    token_text = TokenText(model.tokenizer if has_text else None, as_ids=False)
    answer = CompletionResponse(ChunkHeader("m", "cmpl"), [CompletionPrompt([1], None)], generation, token_text)
    chunks = [answer.chunk(0, Delta("0", 0, text, [7])) for text in ("", "a")]
    chunks.append(answer.chunk(0, Delta("0", 0, "", [7], "stop")))
    assert sum(chunk != b"" for chunk in chunks) == num_sent and chunks[-1] != b""


def test_the_version(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": __version__}


def test_routers_are_told_the_model_and_the_load(http: httpx.Client) -> None:
    """As SGLang's server says it, under the new paths and the old ones."""
    model = http.get("/v1/models").json()["data"][0]
    server = http.get("/server_info").json()
    assert server == http.get("/get_server_info").json()
    assert (server["served_model_name"], server["context_length"]) == (model["id"], model["max_model_len"])
    assert (server["tp_size"], server["dp_size"], server["version"]) == (1, 1, __version__)
    assert server["max_total_num_tokens"] % server["page_size"] == 0 and server["max_running_requests"] > 0
    described = http.get("/model_info").json()
    assert described == http.get("/get_model_info").json()
    assert (described["model_path"], described["is_generation"], described["model_type"]) == (
        model["id"],
        True,
        "llama",
    )
    [load] = http.get("/get_load").json()
    assert load.keys() == {"dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens"} and load["num_waiting_reqs"] == 0


def test_every_endpoint_and_its_body_are_in_the_openapi_schema(http: httpx.Client) -> None:
    response = http.get("/openapi.json").json()
    assert set(response["paths"]) == {
        *(each.path.replace(":path", "") for each in ENDPOINTS if each.in_schema and each.path[:4] in ("/v1/", "/api")),
        "/", "/generate", "/generate_stream", "/info", "/api/chat", "/completion", "/infill", "/props", "/slots",
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}", "/tokenize", "/detokenize",
        "/tokenizer_info", "/apply-template", "/health", "/ready", "/load", "/metrics", "/version", "/engine/state",
        "/engine/events",
        "/server_info", "/get_server_info", "/model_info", "/get_model_info", "/get_load",
        "/requests/{request_id}/explain", "/engine/requests/{number}/explain",
        "/abort_requests", "/reset_prefix_cache", "/rolling_restart", "/pause", "/resume",
    }  # fmt: skip
    schemas = response["components"]["schemas"]
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(response)))
    assert references <= set(schemas)
    chat = schemas["ChatBody"]["properties"]
    assert {"messages", "temperature", "structured_outputs", "stream_options"} <= set(chat)
    assert chat["guided_json"]["deprecated"] is True
    body = response["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/CompletionBody"}


def test_a_wrong_method_is_a_405(http: httpx.Client) -> None:
    answer = http.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["type"] == "invalid_request_error"

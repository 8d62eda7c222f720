"""The text-generation-inference API: huggingface_hub's client, and plain HTTP."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason, TopLogprobs
from quire.engine.request_state import SequenceOutput
from quire.server.context import ServedModel
from quire.server.tgi.generate import TgiParameters, TgiResponse
from quire.text.stop_strings import StopStrings
from tests.server.api_server import MODEL, PLAIN, scripted_server


@pytest.fixture(scope="module")
def url(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_server(tmp_path_factory.mktemp("tgi")) as url:
        yield url


def events_of(text: str) -> list[dict[str, Any]]:
    blocks = text.strip().split("\n\n")
    assert all(block.startswith("data:") for block in blocks)
    return [json.loads(block.removeprefix("data:")) for block in blocks]


def test_huggingfaces_client(url: str) -> None:
    client = InferenceClient(model=url, timeout=60)
    assert client.text_generation("hi") == PLAIN
    assert "".join(client.text_generation("hi", stream=True)) == PLAIN
    whole = client.text_generation("hi", details=True, max_new_tokens=50, decoder_input_details=True)
    assert whole.details is not None and whole.details.finish_reason == "eos_token"
    assert whole.details.generated_tokens == len(whole.details.tokens) and whole.details.tokens[-1].special
    assert [token.text for token in whole.details.prefill] == ["hi"]
    *_, last = client.text_generation("hi", details=True, stream=True)
    assert last.generated_text == whole.generated_text == PLAIN
    assert last.details is not None and last.details.generated_tokens == whole.details.generated_tokens
    assert last.details.input_length == 1


def test_post_root_returns_a_list_and_get_root_the_page(http: httpx.Client) -> None:
    assert http.post("/", json={"inputs": "hi"}).json() == [{"generated_text": PLAIN}]
    assert http.post("/generate", json={"inputs": "hi"}).json() == {"generated_text": PLAIN}
    assert http.get("/").headers["content-type"].startswith("text/html")


def test_one_event_per_token(http: httpx.Client) -> None:
    for path, body in (("/", {"stream": True}), ("/generate_stream", {})):
        answer = http.post(path, json={"inputs": "hi", "parameters": {"seed": 7}, **body})
        assert answer.headers["content-type"].startswith("text/event-stream")
        response = events_of(answer.text)
        assert [event["index"] for event in response] == list(range(1, len(response) + 1))
        assert "".join(event["token"]["text"] for event in response) == PLAIN
        assert all(event["generated_text"] is None and event["details"] is None for event in response[:-1])
        assert response[-1]["generated_text"] == PLAIN
        assert response[-1]["details"] == {
            "finish_reason": "eos_token", "generated_tokens": len(response), "seed": 7, "input_length": 1,
        }  # fmt: skip
        assert all(isinstance(event["token"]["logprob"], float) for event in response)


@pytest.mark.parametrize(
    ("parameters", "reason", "text"),
    [
        ({"max_new_tokens": 3}, "length", "on and on"),
        ({"stop": ["n and"]}, "stop_sequence", "o"),
        ({"max_new_tokens": 3, "return_full_text": True}, "length", "endlesson and on"),
        ({"max_new_tokens": 3, "truncate": 5, "top_n_tokens": 2, "do_sample": True, "seed": 1}, "length", "on and on"),
    ],
)
def test_parameters(http: httpx.Client, parameters: dict[str, Any], reason: str, text: str) -> None:
    body = {"inputs": "endless", "parameters": {**parameters, "details": True}}
    whole = http.post("/generate", json=body).json()
    assert (whole["details"]["finish_reason"], whole["generated_text"]) == (reason, text)
    *_, last = events_of(http.post("/generate_stream", json=body).text)
    assert (last["details"]["finish_reason"], last["generated_text"]) == (reason, text)
    assert last["details"]["generated_tokens"] == whole["details"]["generated_tokens"]
    if "top_n_tokens" in parameters:
        assert len(whole["details"]["top_tokens"]) == 3 and last["top_tokens"]


@pytest.mark.parametrize(
    ("grammar", "text"),
    [({"type": "regex", "value": "on and on[.]"}, "on and on."), ({"type": "json", "value": {"const": 7}}, "7")],
)
def test_output_follows_a_grammar(http: httpx.Client, grammar: dict[str, Any], text: str) -> None:
    body = {"inputs": "endless", "parameters": {"grammar": grammar}}
    assert http.post("/generate", json=body).json() == {"generated_text": text}


def test_the_default_length(http: httpx.Client) -> None:
    body = {"inputs": "endless", "parameters": {"details": True}}
    assert http.post("/generate", json=body).json()["details"]["generated_tokens"] == 100


@pytest.mark.parametrize(
    "parameters",
    [
        {"best_of": 2},
        {"typical_p": 0.5},
        {"watermark": True},
        {"adapter_id": "a"},
        {"max_new_tokens": 0},
        {"max_new_tokens": 100000},
        {"temperature": -1},
        {"truncate": 0},
        {"grammar": {"type": "poem", "value": "x"}},
        {"grammar": {"type": "json"}},
        {"grammar": {"type": "json", "value": False}},
        {"grammar": {"type": "json_schema", "value": {"name": "x"}}},
        {"grammar": {"type": "regex"}},
        {"stop": 5},
    ],
)
def test_unsupported_parameters_are_a_422_in_tgi_shape(http: httpx.Client, parameters: dict[str, Any]) -> None:
    for path in ("/", "/generate", "/generate_stream"):
        answer = http.post(path, json={"inputs": "hi", "parameters": parameters})
        assert answer.status_code == 422, answer.text
        response = answer.json()
        assert set(response) == {"error", "error_type"} and response["error_type"] == "validation"


def test_other_errors(http: httpx.Client, url: str) -> None:
    body = {"inputs": "boom"}
    failed = http.post("/generate", json=body)
    assert (failed.status_code, failed.json()["error_type"]) == (424, "generation")
    *response, last = events_of(http.post("/generate_stream", json=body).text)
    assert response and last["error_type"] == "generation" and last["error"]
    unread = http.post("/generate_stream", json={"inputs": "x", "parameters": {"decoder_input_details": True}})
    assert unread.status_code == 422
    with pytest.raises(ValidationError):
        InferenceClient(model=url).text_generation("hi", best_of=3)


def test_info(http: httpx.Client) -> None:
    response = http.get("/info").json()
    assert (response["model_id"], response["max_total_tokens"], response["router"]) == (MODEL, 1024, "quire")


def streamed_texts(model: ServedModel, text: str, stop: tuple[str, ...], at_once: int) -> tuple[list[str], list[int]]:
    """The texts of the token events, and the tokens, where a reader gets `at_once` tokens in a delta."""
    tokenizer = model.text()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    output = SequenceOutput("1", 0, SamplingParams(logprobs=0), tokenizer, prompt_ids=[1],
                            stop_strings=StopStrings(stop), streaming=True)  # fmt: skip
    empty = np.zeros(0, dtype=np.int64)
    deltas = []
    for token in tokens:
        deltas.append(output.push(token, TopLogprobs(token, -1.0, 1, empty, empty.astype(np.float32)), None))
        if output.stopped:
            break
    deltas[-1] = deltas[-1].then(output.close(FinishReason.STOP if output.stopped else FinishReason.LENGTH))
    response = TgiResponse("x", [1], TgiParameters(), tokenizer)
    events = []
    for start in range(0, len(deltas), at_once):
        merged = functools.reduce(lambda before, later: before.then(later), deltas[start : start + at_once])
        if written := response.events(merged):
            events += events_of(written.decode())
    assert [event["token"]["id"] for event in events] == tokens[: len(events)] and len(events) == len(deltas)
    texts = [event["token"]["text"] for event in events]
    assert "".join(texts) == events[-1]["generated_text"]
    return texts, tokens


@pytest.mark.parametrize("stop", [(), ("o", "never"), (" friend.!",), ("naïve friend. 🙂 you",)])
@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_each_token_has_its_own_text(model: ServedModel, stop: tuple[str, ...], at_once: int) -> None:
    """However late the reader is, and while a stop string may be beginning: no text moves to a later token."""
    texts, tokens = streamed_texts(model, PLAIN + " 🙂 yes.", stop, at_once)
    spelled = list(map(model.text().spell, tokens))
    if "o" in stop:
        assert "".join(texts) == "B"
        return
    assert len(texts) == len(tokens)
    for text, alone in zip(texts, spelled, strict=True):
        assert text == alone or "\ufffd" in alone
    assert sum("\ufffd" in alone for alone in spelled) >= 4, "characters of several tokens were among them"


def test_a_stream_whose_stop_string_begins_often(http: httpx.Client) -> None:
    body = {"inputs": "endless", "parameters": {"max_new_tokens": 9, "stop": ["on and on and on but"]}}
    texts = [event["token"]["text"] for event in events_of(http.post("/generate_stream", json=body).text)]
    assert len(texts) == 9 and all(texts), "no token without its text"

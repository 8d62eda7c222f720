"""Responses to the OpenAI client: whole and streamed, chat and completion."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.scripted_app import bodies

MODEL = "smollm2-135m-instruct"
FRANCE = "The capital of France is"
LINE: dict[str, Any] = {"temperature": 0, "extra_body": {"structured_outputs": {"regex": "[a-z ]{20}"}}}  # an end
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.models.retrieve("another")


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=FRANCE, max_tokens=3, temperature=0)
    [choice] = answer.choices
    assert choice.text and choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 3, 8)


def test_a_chat_completion(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, **LINE)  # type: ignore[call-overload]
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert len(choice.message.content or "") == 20
    assert choice.finish_reason == "stop"


def test_a_completion_has_sixteen_tokens_by_default(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": [FRANCE], "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 16


def test_token_ids_are_accepted_as_a_prompt(http: httpx.Client) -> None:
    said = [
        http.post("/v1/completions", json={"prompt": prompt, "temperature": 0, "max_tokens": 2}).json()
        for prompt in (FRANCE, [504, 3575, 282, 4649, 314])
    ]
    assert said[0]["choices"] == said[1]["choices"] and said[0]["choices"][0]["text"]


def test_a_stop_string_ends_the_output_and_is_omitted(client: openai.OpenAI) -> None:
    said = client.completions.create(model=MODEL, prompt=FRANCE, max_tokens=4, temperature=0).choices[0].text
    stop = said[2:5]
    answer = client.completions.create(model=MODEL, prompt=FRANCE, max_tokens=50, temperature=0, stop=[stop])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (said.partition(stop)[0], "stop")


def test_a_streamed_chat_equals_the_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, **LINE)  # type: ignore[call-overload]
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            stream=True,
            stream_options={"include_usage": True},
            **LINE,  # type: ignore[call-overload]
        )
    )
    *response, last = chunks
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert response[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in response[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in response) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in response if chunk.choices[0].finish_reason] == ["stop"]
    assert last.choices == [] and last.usage is not None and whole.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens


def test_each_choice_ends_once(client: openai.OpenAI) -> None:
    generation = {
        "model": MODEL,
        "prompt": FRANCE,
        "n": 3,
        "seed": 7,
        "max_tokens": 6,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**generation)  # type: ignore[call-overload]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage.completion_tokens == 18
    texts = ["", "", ""]
    ends = []
    for chunk in client.completions.create(**generation, stream=True):  # type: ignore[call-overload]
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        ends += [(choice.index, choice.finish_reason)] if choice.finish_reason else []
    assert texts == [choice.text for choice in whole.choices]
    assert sorted(ends) == [(0, "length"), (1, "length"), (2, "length")]


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", {"prompt": FRANCE}), ("/v1/chat/completions", {"messages": QUESTION})],
)
def test_the_bytes_of_a_stream(http: httpx.Client, path: str, fields: dict[str, object]) -> None:
    answer = http.post(path, json={**fields, "max_tokens": 3, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    *events, done, after = answer.text.split("\n\n")
    assert (done, after) == ("data: [DONE]", "")
    bodies = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all("usage" not in body for body in bodies), "only on request"
    assert [body["choices"][0]["finish_reason"] for body in bodies].count("length") == 1


def test_a_failed_sequence_is_an_error_and_not_a_finish(http: httpx.Client) -> None:
    """A bad word of two tokens leaves no allowed token after its first one."""
    fields = {"prompt": "a", "max_tokens": 9, "allowed_token_ids": [260], "bad_words": ["the the"]}
    whole = http.post("/v1/completions", json=fields)
    assert whole.status_code == 400
    assert whole.json()["error"]["code"] == "nothing_left"
    streamed = http.post("/v1/completions", json={**fields, "stream": True}).text
    assert "nothing_left" in streamed
    assert "[DONE]" not in streamed and '"finish_reason":"' not in streamed
    assert '"finish_reason":null' in streamed, "the spelling that the line above looks for"
    assert http.get("/health").status_code == 200


def test_beams_come_best_first_whole_or_streamed(http: httpx.Client) -> None:
    beams = {"prompt": "The sky is", "max_tokens": 4, "use_beam_search": True, "n": 2, "priority": -1}
    choices = http.post("/v1/completions", json=beams).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1] and choices[0]["text"] != choices[1]["text"]
    streamed = bodies(http.post("/v1/completions", json={**beams, "stream": True}).text)
    assert [body["choices"][0]["text"] for body in streamed] == [choice["text"] for choice in choices]


def test_usage_counts_cached_tokens(http: httpx.Client) -> None:
    body = {"prompt": "word " * 40, "max_tokens": 1, "cache_salt": "usage"}
    cached = [
        http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert cached[0] == 0 and cached[1] >= 39

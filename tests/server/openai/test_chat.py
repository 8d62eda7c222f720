"""POST /v1/chat/completions against the real server, through OpenAI's client and bare."""

from typing import Any

import httpx
import openai
import pytest

from tests.server.scripted_app import bodies

MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_completion_tokens": 12}


def chat(http: httpx.Client, **body: object) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json={"messages": QUESTION, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def streamed(http: httpx.Client, **body: object) -> list[dict[str, Any]]:
    answer = http.post("/v1/chat/completions", json={"messages": QUESTION, **body, "stream": True})
    assert answer.status_code == 200, answer.text
    return bodies(answer.text)


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def prompt_of(http: httpx.Client, messages: list[dict[str, Any]], **body: object) -> str:
    response = http.post("/apply-template", json={"messages": messages, **body})
    assert response.status_code == 200, response.text
    return str(response.json()["prompt"])


def test_the_fields_of_a_chat_completion(http: httpx.Client) -> None:
    answer = chat(http, **GREEDY)
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": text_of(answer), "refusal": None}
    assert choice["logprobs"] is None and choice["stop_reason"] is None
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert "completion_tokens_details" not in usage, "there was no reasoning"


def test_max_completion_tokens_and_max_tokens_are_equivalent(http: httpx.Client) -> None:
    for body in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 9, "max_completion_tokens": 3}):
        answer = chat(http, ignore_eos=True, **body)
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["finish_reason"] == "length"


def test_streamed_choices_interleave_and_each_starts_and_ends_once(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"n": 3, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
    whole = chat(http, **fields)
    chunks = [chunk["choices"][0] for chunk in streamed(http, **fields)]
    texts = ["".join(c["delta"].get("content", "") for c in chunks if c["index"] == i) for i in range(3)]
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    for index in range(3):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in chunk["delta"] for chunk in mine[1:])
        assert [chunk["finish_reason"] for chunk in mine] == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1]["delta"] == {}
    order = [chunk["index"] for chunk in chunks]
    assert order != sorted(order)
    drawn = chat(http, **{**fields, "temperature": 1, "seed": 5})["choices"]
    assert len({choice["message"]["content"] for choice in drawn}) > 1


def test_logprobs_whole_and_streamed(client: openai.OpenAI, http: httpx.Client) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "logprobs": True, "top_logprobs": 3, **GREEDY}
    [choice] = client.chat.completions.create(**fields).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    content = choice.logprobs.content
    for scored in content:
        assert [top.logprob for top in scored.top_logprobs] == sorted(
            (t.logprob for t in scored.top_logprobs), reverse=True
        )
        assert len(scored.top_logprobs) == 3
        assert (scored.token, scored.logprob) == (scored.top_logprobs[0].token, scored.top_logprobs[0].logprob)
    spoken = b"".join(bytes(scored.bytes or []) for scored in content)
    assert spoken.decode().removesuffix("<|im_end|>") == choice.message.content
    chunks = client.chat.completions.create(**fields, stream=True)
    streams = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    assert [scored for response in streams if response is not None for scored in response.content or []] == content
    alone = chat(http, logprobs=True, **GREEDY)["choices"][0]["logprobs"]["content"]
    assert all(scored["top_logprobs"] == [] for scored in alone)


def test_token_ids_and_logprobs_of_the_prompt(http: httpx.Client) -> None:
    answer = chat(http, return_token_ids=True, prompt_logprobs=0, **GREEDY)
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"] == len(answer["prompt_logprobs"])
    chunks = streamed(http, return_token_ids=True, **GREEDY)
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    response = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert response == answer["choices"][0]["token_ids"]


def test_continuous_usage(http: httpx.Client) -> None:
    chunks = streamed(http, stream_options={"continuous_usage_stats": True, "include_usage": True}, **GREEDY)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == chat(http, **GREEDY)["usage"]["completion_tokens"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_roles_and_content_parts_are_rendered(http: httpx.Client) -> None:
    plain = [{"role": "system", "content": "Be brief."}, *QUESTION]
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]},
    ]
    assert prompt_of(http, plain) == prompt_of(http, parts)
    counts = {chat(http, messages=response, max_tokens=1)["usage"]["prompt_tokens"] for response in (plain, parts)}
    assert counts == {http.post("/tokenize", json={"messages": plain}).json()["count"]}


def test_a_final_assistant_message_is_continued(http: httpx.Client) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    fields = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False, **GREEDY}
    answer = text_of(chat(http, **fields))
    assert answer
    assert text_of(chat(http, **fields, echo=True)) == "The capital of France is" + answer
    chunks = streamed(http, **fields, echo=True)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == (
        "The capital of France is" + answer
    )
    parts = [{"type": "text", "text": "The capital"}, {"type": "text", "text": "of France is"}]
    in_parts = {**fields, "messages": [*QUESTION, {"role": "assistant", "content": parts}]}
    assert text_of(chat(http, **in_parts, echo=True)) == "The capital\nof France is" + text_of(chat(http, **in_parts))
    assert prompt_of(http, begun, continue_final_message=True).endswith("The capital of France is")
    assert prompt_of(http, QUESTION, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_a_chat_prompt_may_be_truncated(http: httpx.Client) -> None:
    long = [{"role": "user", "content": "word " * 1500}]
    refused = http.post("/v1/chat/completions", json={"messages": long, "stream": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert chat(http, messages=long, truncate_prompt_tokens=10, max_tokens=1)["usage"]["prompt_tokens"] == 10


@pytest.mark.parametrize("ask", ["Repeat after me: 🙂🎉👩‍🚀", "重复: 你好,世界。", "Write the word naïve."])
def test_a_streamed_chat_of_any_script_equals_the_whole(http: httpx.Client, ask: str) -> None:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": ask}], "temperature": 0, "max_tokens": 24}
    chunks = streamed(http, **fields)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text_of(chat(http, **fields))


def test_fields_without_effect_are_accepted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,  # type: ignore[arg-type]
        max_tokens=1,
        user="me",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="y",
        verbosity="low",
        reasoning_effort="low",
        parallel_tool_calls=False,
        logit_bias={"5": 1},
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 1

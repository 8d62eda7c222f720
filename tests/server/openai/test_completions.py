"""POST /v1/completions against the real server: prompts of all kinds, echo, logprobs, several prompts in one stream."""

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import httpx
import openai
import pytest

from tests.server.local_server import local_server
from tests.server.scripted_app import bodies
from tests.tiers import long_only

MODEL = "smollm2-135m-instruct"
FRANCE = "The capital of France is"
FRANCE_IDS = [504, 3575, 282, 4649, 314]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}


def complete(http: httpx.Client, **body: object) -> dict[str, Any]:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def streamed(http: httpx.Client, **body: object) -> list[dict[str, Any]]:
    answer = http.post("/v1/completions", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    return bodies(answer.text)


def test_the_four_kinds_of_prompt_agree(http: httpx.Client) -> None:
    kinds = (FRANCE, [FRANCE], FRANCE_IDS, [FRANCE_IDS])
    texts = {complete(http, prompt=kind, **GREEDY)["choices"][0]["text"] for kind in kinds}
    assert len(texts) == 1 and texts != {""}


def test_choices_are_numbered_across_prompts(client: openai.OpenAI) -> None:
    prompts = [FRANCE, "One, two, three,"]
    fields: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompts,
        "n": 2,
        "echo": True,
        "temperature": 0,
        "max_tokens": 5,
    }
    whole = client.completions.create(**fields)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text.startswith(prompts[0]) for choice in whole.choices] == [True, True, False, False]
    assert [choice.text.startswith(prompts[1]) for choice in whole.choices] == [False, False, True, True]
    alone = [client.completions.create(**{**fields, "prompt": prompt}) for prompt in prompts]
    assert [choice.text for choice in whole.choices] == [c.text for answer in alone for c in answer.choices]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone if answer.usage)
    texts, ends, order = [""] * 4, [], []
    for chunk in client.completions.create(**fields, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        order.append(choice.index)
        ends += [choice.index] if choice.finish_reason else []
    assert texts == [choice.text for choice in whole.choices]
    assert sorted(ends) == [0, 1, 2, 3]
    assert order != sorted(order), "the streams of the prompts interleave"


def test_one_invalid_prompt_fails_the_request(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": [FRANCE, "word " * 2000], "max_tokens": 4})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert http.post("/v1/completions", json={"prompt": FRANCE, "max_tokens": 1}).status_code == 200


def test_echo_repeats_the_prompt(http: httpx.Client) -> None:
    alone = complete(http, prompt=FRANCE, **GREEDY)["choices"][0]["text"]
    for prompt in (FRANCE, FRANCE_IDS):
        whole = complete(http, prompt=prompt, echo=True, **GREEDY)["choices"][0]["text"]
        assert whole == FRANCE + alone
        chunks = streamed(http, prompt=prompt, echo=True, **GREEDY)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


def test_logprobs_of_a_completion(http: httpx.Client) -> None:
    [choice] = complete(http, prompt=FRANCE, logprobs=2, **GREEDY)["choices"]
    scores = choice["logprobs"]
    assert len(scores["tokens"]) == 4
    assert "".join(scores["tokens"]) == choice["text"]
    assert scores["text_offset"] == [0, *accumulate(map(len, scores["tokens"][:-1]))]
    for token, value, top in zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True):
        assert value < 0 and len(top) == 2
        assert top[token] == value == max(top.values()), "greedy, and one number in both places"
    chunks = [chunk["choices"][0]["logprobs"] for chunk in streamed(http, prompt=FRANCE, logprobs=2, **GREEDY)]
    assert {name: [item for chunk in chunks for item in chunk[name]] for name in scores} == scores


def nearly(value: Any) -> Any:
    """Equal to values whose numbers differ in the last digits: two prompts may be in one step or in two."""
    match value:
        case float():
            return pytest.approx(value, abs=1e-3)
        case list():
            return [nearly(each) for each in value]
        case dict():
            return {name: nearly(each) for name, each in value.items()}
    return value


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompt_logprobs_as_lm_eval_requests_them(http: httpx.Client, max_tokens: int) -> None:
    fields = {"prompt": [FRANCE_IDS, FRANCE_IDS[:2]], "max_tokens": max_tokens, "logprobs": 1, "echo": True,
             "temperature": 0, "seed": 1234}  # fmt: skip
    answer = complete(http, **fields)
    for choice, ids in zip(answer["choices"], fields["prompt"], strict=True):  # type: ignore[call-overload]
        scores = choice["logprobs"]
        assert {len(column) for column in scores.values()} == {len(ids) + max_tokens}
        assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
        for value, top in list(zip(scores["token_logprobs"], scores["top_logprobs"], strict=True))[1:]:
            assert value in top.values() and value <= max(top.values())
        assert choice["finish_reason"] == "length"
        assert "".join(scores["tokens"]) == choice["text"]
    assert answer["usage"]["completion_tokens"] == 2 * max_tokens
    expected = nearly(answer["choices"])
    again = complete(http, **fields)
    assert [choice["logprobs"] for choice in again["choices"]] == [choice["logprobs"] for choice in expected]
    chunks = streamed(http, **fields)
    assert [chunk["choices"][0] for chunk in chunks] == expected


def test_prompt_logprobs_equal_those_of_generating_it(http: httpx.Client) -> None:
    """Teacher forcing equals generation: the output evaluated as a prompt."""
    output = complete(http, prompt=FRANCE_IDS, logprobs=0, return_token_ids=True, **GREEDY)["choices"][0]
    whole = FRANCE_IDS + output["token_ids"]
    scored = complete(http, prompt=whole, logprobs=0, echo=True, max_tokens=0)["choices"][0]["logprobs"]
    for one, other in zip(scored["token_logprobs"][5:], output["logprobs"]["token_logprobs"], strict=True):
        assert math.isclose(one, other, abs_tol=0.05)


@pytest.fixture(scope="module", params=["script", *long_only(["shallow model"])])
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Where numbers do not matter, a script's are enough: the scores of a long prompt take a model seconds."""
    if request.param == "script":
        folder = tmp_path_factory.mktemp("script")
        with local_server(folder, [{"say": "Hi."}], "--max-model-len", "1k") as server, server.client() as client:
            yield client
    else:
        yield request.getfixturevalue("http")


def test_a_prompt_without_generation_may_fill_the_context(any_model: httpx.Client) -> None:
    http = any_model
    ids = [5 + place % 1000 for place in range(1025)]
    fields = {"logprobs": 0, "echo": True, "max_tokens": 0}
    scored = complete(http, prompt=ids[:1024], **fields)
    assert scored["usage"] == scored["usage"] | {"prompt_tokens": 1024, "completion_tokens": 0}
    shorter = complete(http, prompt=ids[:1023], **fields)
    whole, part = (each["choices"][0]["logprobs"]["token_logprobs"] for each in (scored, shorter))
    assert len(whole) == 1024 and whole[1:1023] == pytest.approx(part[1:], abs=1e-2)
    for prompt, more in ((ids, fields), (ids[:1024], {**fields, "max_tokens": 1})):
        answer = http.post("/v1/completions", json={"prompt": prompt, **more})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    cut = complete(http, prompt=ids, truncate_prompt_tokens=-1, **fields)
    assert cut["usage"]["prompt_tokens"] == 1024


def test_max_tokens_zero_generates_nothing(http: httpx.Client) -> None:
    answer = complete(http, prompt=FRANCE, max_tokens=0)
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("", 0)
    [chunk] = streamed(http, prompt=FRANCE, max_tokens=0)
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) == ("", "length")


def test_prompt_logprobs_by_token_id(http: httpx.Client) -> None:
    [choice] = complete(http, prompt=FRANCE_IDS, prompt_logprobs=1, max_tokens=1)["choices"]
    first, *scores = choice["prompt_logprobs"]
    assert first is None
    for token, score in zip(FRANCE_IDS[1:], scores, strict=True):
        assert set(score[str(token)]) == {"logprob", "rank", "decoded_token"}
        assert min(entry["rank"] for entry in score.values()) == 1


def test_max_tokens_null_fills_the_context_and_unset_is_sixteen(http: httpx.Client) -> None:
    counts = [
        complete(http, prompt="hi", ignore_eos=True, truncate_prompt_tokens=1, **body)["usage"]["completion_tokens"]
        for body in ({}, {"max_tokens": 17})
    ]
    assert counts == [16, 17]
    filled = complete(http, prompt=[260] * 1000, max_tokens=None, ignore_eos=True)
    assert filled["usage"]["total_tokens"] == 1024


def test_return_token_ids_adds_the_token_ids(http: httpx.Client) -> None:
    [choice] = complete(http, prompt=FRANCE, return_token_ids=True, **GREEDY)["choices"]
    assert choice["prompt_token_ids"] == FRANCE_IDS and len(choice["token_ids"]) == 4
    chunks = [chunk["choices"][0] for chunk in streamed(http, prompt=FRANCE, return_token_ids=True, **GREEDY)]
    assert chunks[0]["prompt_token_ids"] == FRANCE_IDS
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert [token for chunk in chunks for token in chunk["token_ids"]] == choice["token_ids"]


def test_logprobs_may_name_tokens_by_id(http: httpx.Client) -> None:
    fields = {"prompt": FRANCE, "logprobs": 0, "echo": True, "return_tokens_as_token_ids": True, "max_tokens": 0}
    scores = complete(http, **fields)["choices"][0]["logprobs"]
    assert scores["tokens"] == [f"token_id:{token}" for token in FRANCE_IDS]


def test_a_prompt_may_be_truncated_at_its_end(http: httpx.Client) -> None:
    cut = {"truncate_prompt_tokens": 3, "return_token_ids": True, "max_tokens": 1}
    for side, kept in ((None, FRANCE_IDS[-3:]), ("left", FRANCE_IDS[-3:]), ("right", FRANCE_IDS[:3])):
        [choice] = complete(http, prompt=FRANCE, truncation_side=side, **cut)["choices"]
        assert choice["prompt_token_ids"] == kept
    messages = [{"role": "user", "content": FRANCE}]
    whole = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    chat = http.post("/v1/chat/completions", json={"messages": messages, "truncation_side": "right", **cut}).json()
    assert chat["prompt_token_ids"] == whole[:3]


@pytest.mark.parametrize(("cut", "kept"), [(2, 2), (-1, 1020), (None, 1100)])
def test_a_prompt_may_be_truncated_at_the_front(http: httpx.Client, cut: int | None, kept: int) -> None:
    ids = [260] * 1099 + [314]
    answer = http.post(
        "/v1/completions", json={"prompt": ids, "truncate_prompt_tokens": cut, "return_token_ids": True, **GREEDY}
    )
    if cut is None:
        assert answer.status_code == 400
    else:
        assert answer.json()["choices"][0]["prompt_token_ids"] == ids[-kept:]


def test_stop_reason_is_the_matched_stop(http: httpx.Client) -> None:
    [said] = complete(http, prompt=FRANCE, return_token_ids=True, **GREEDY)["choices"]
    stop, token = said["text"][2:5], said["token_ids"][1]
    text = said["text"].partition(stop)[0]
    [choice] = complete(http, prompt=FRANCE, stop=[stop], temperature=0)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["text"]) == ("stop", stop, text)
    chunks = streamed(http, prompt=FRANCE, stop=[stop], include_stop_str_in_output=True, temperature=0)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text + stop
    assert chunks[-1]["choices"][0]["stop_reason"] == stop
    assert not any("stop_reason" in chunk["choices"][0] for chunk in chunks[:-1])
    [ended] = complete(http, prompt=FRANCE, stop_token_ids=[token], temperature=0)["choices"]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", token)


def test_the_finish_reason_comes_with_the_last_text(http: httpx.Client) -> None:
    *_, last = streamed(http, prompt=FRANCE, **GREEDY)
    assert last["choices"][0]["text"] != "" and last["choices"][0]["finish_reason"] == "length"


CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


def test_usage_is_streamed_on_request(http: httpx.Client) -> None:
    fields = {"prompt": [FRANCE, "hi"], "ignore_eos": True, **GREEDY}
    assert not any("usage" in chunk for chunk in streamed(http, **fields))
    *chunks, last = streamed(http, **fields, stream_options={"include_usage": True})
    assert last["choices"] == [] and all(chunk["choices"] for chunk in chunks)
    whole = complete(http, **fields)["usage"]
    assert {k: v for k, v in last["usage"].items() if k != "prompt_tokens_details"} == {
        k: v for k, v in whole.items() if k != "prompt_tokens_details"
    }
    assert "cached_tokens" in last["usage"]["prompt_tokens_details"]
    *running, total = streamed(http, **fields, stream_options=CONTINUOUS)
    assert total["choices"] == [] and total["usage"]["total_tokens"] == whole["total_tokens"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in running]
    assert counts == sorted(counts) and counts[-1] == 8 and counts[0] >= 1
    assert {chunk["usage"]["prompt_tokens"] for chunk in running} == {whole["prompt_tokens"]}
    *at_once, _ = streamed(http, **fields, echo=True, logprobs=0, stream_options=CONTINUOUS)
    assert [chunk["usage"]["completion_tokens"] for chunk in at_once] == [4, 8]
    assert {chunk["usage"]["prompt_tokens"] for chunk in at_once} == {whole["prompt_tokens"]}


@pytest.mark.parametrize("prompt", ["🙂🙃 emoji: 😀😁", "日本語の文章を続けて:", "naïve ✓ – “x”"])
def test_a_stream_of_any_script_equals_the_whole(http: httpx.Client, prompt: str) -> None:
    fields: dict[str, Any] = {"prompt": prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    whole = complete(http, **fields)["choices"][0]["text"]
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed(http, **fields)) == whole


def test_partial_characters_are_named_by_their_bytes(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"prompt": "🦕a", "logprobs": 0, "echo": True, "max_tokens": 0}
    [choice] = complete(http, **fields)["choices"]
    *parts, letter = choice["logprobs"]["tokens"]
    assert choice["text"] == "🦕a" and letter == "a" and len(parts) > 1
    decoded = "".join(part.removeprefix("bytes:\\x") if part.startswith("bytes:") else "?" for part in parts)
    assert bytes.fromhex(decoded.replace("\\x", "")).decode() == "🦕"
    assert choice["logprobs"]["text_offset"] == [0] * len(parts) + [1]
    [chunk] = streamed(http, **fields)
    assert chunk["choices"][0] == choice


def test_a_character_that_the_prompt_starts_belongs_to_the_output(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "a🦕", "add_special_tokens": False}).json()["tokens"]
    rest: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "allowed_token_ids": ids[-1:], "logprobs": 0}
    [choice] = complete(http, prompt=ids[:-1], **rest)["choices"]
    [echoed] = complete(http, prompt=ids[:-1], echo=True, **rest)["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("🦕", [0])
    assert echoed["text"] == "a🦕" and echoed["logprobs"]["text_offset"] == [0] + [1] * (len(ids) - 1)

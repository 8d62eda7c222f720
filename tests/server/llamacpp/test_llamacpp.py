"""llama.cpp's API: /completion, /infill, /props, /slots; the middle of a text by other APIs; -1 as no limit."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Backend

from quire.server.context import ServedModel
from quire.text.tokenizer import Tokenizer
from tests.llm.tiny import write_tokenizer
from tests.server.api_server import MODEL, PLAIN, scripted_server
from tests.server.scripted_app import Script, app_over, post

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@pytest.fixture(scope="module")
def url(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_server(tmp_path_factory.mktemp("llamacpp")) as url:
        yield url


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(block.removeprefix("data: ")) for block in text.strip().split("\n\n")]


def test_a_completion_whole_and_streamed(http: httpx.Client) -> None:
    body = {"prompt": "hi", "cache_prompt": True, "seed": -1, "id_slot": -1, "return_tokens": True}
    whole = http.post("/completion", json=body).json()
    assert (whole["content"], whole["stop"], whole["stop_type"], whole["model"]) == (PLAIN, True, "eos", MODEL)
    assert whole["tokens_evaluated"] == 1 and whole["tokens_predicted"] == len(whole["tokens"]) > 1
    assert whole["timings"]["predicted_n"] == whole["tokens_predicted"] and whole["truncated"] is False
    assert whole["generation_settings"]["n_predict"] == -1
    *parts, last = events_of(http.post("/completion", json={**body, "stream": True}).text)
    assert "".join(part["content"] for part in parts) == PLAIN and not any(part["stop"] for part in parts)
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert (last["stop"], last["content"], last["tokens_predicted"]) == (True, "", whole["tokens_predicted"])


@pytest.mark.parametrize(
    ("parameters", "kind", "text"),
    [
        ({"n_predict": 3}, "limit", "on and on"),
        ({"n_predict": 0}, "limit", ""),
        ({"stop": ["n and"], "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.1,
          "mirostat": 0, "typical_p": 1.0, "dry_multiplier": 0.0}, "word", "o"),
        ({"n_predict": 1 << 20, "stop": ["n and"]}, "word", "o"),
        ({"n_predict": 4, "json_schema": {"const": 7}}, "eos", "7"),
    ],
)  # fmt: skip
def test_parameters(http: httpx.Client, parameters: dict[str, Any], kind: str, text: str) -> None:
    for prompt in ("endless", ["end", "less"]):
        body = {"prompt": prompt, **parameters}
        whole = http.post("/completion", json=body).json()
        assert (whole["stop_type"], whole["content"]) == (kind, text)
        *parts, last = events_of(http.post("/completion", json={**body, "stream": True}).text)
        assert ("".join(part["content"] for part in parts), last["stop_type"]) == (text, kind)
        assert last["tokens_predicted"] == whole["tokens_predicted"]
    assert whole["stopping_word"] == ("n and" if kind == "word" else "")


def test_probabilities(http: httpx.Client) -> None:
    whole = http.post("/completion", json={"prompt": "hi", "n_probs": 2, "logit_bias": [[5, 1.0]]}).json()
    entries = whole["completion_probabilities"]
    assert len(entries) == whole["tokens_predicted"] and all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert all(isinstance(entry["id"], int) and entry["logprob"] <= 0 for entry in entries)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/completion", {"prompt": "x", "grammar": 'root ::= "x"'}, 400, "grammar is in GBNF"),
        ("/completion", {"prompt": "x", "mirostat": 2}, 400, "mirostat is not served here"),
        ("/completion", {"prompt": "x", "model": "other"}, 404, "There is no model 'other'"),
        ("/completion", {"prompt": []}, 400, "there is nothing to continue"),
        ("/completion", {"prompt": "x", "repeat_penalty": -1}, 400, "repeat_penalty must be"),
        ("/completion", {"prompt": "word " * 2000}, 400, "maximum context length is 1024"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, 400, "needs a model with fill-in-the-middle tokens"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix needs a model with fill-in-the-middle"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix needs a model with fill-in-the-middle"),
    ],
)
def test_refusals(http: httpx.Client, path: str, body: dict[str, Any], status: int, words: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status and words in answer.text, answer.text


def test_properties_and_slots(http: httpx.Client) -> None:
    props = http.get("/props").json()
    slots = http.get("/slots").json()
    assert props["default_generation_settings"]["n_ctx"] == 1024 and props["total_slots"] == len(slots) > 0
    assert props["infill"] is False and "<|im_start|>" in props["chat_template"]
    assert [slot["id"] for slot in slots] == list(range(len(slots)))
    assert not any(slot["is_processing"] for slot in slots)


def test_minus_one_is_the_rest_of_the_context(http: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for path, body in (("chat/completions", chat), ("completions", {"prompt": "hi"})):
        answer = http.post(f"/v1/{path}", json={**body, "max_tokens": -1}).json()
        assert answer["choices"][0]["finish_reason"] == "stop", answer
        assert http.post(f"/v1/{path}", json={**body, "max_tokens": -2}).status_code == 400
    assert http.post("/v1/chat/completions", json={**chat, "max_completion_tokens": -1}).status_code == 200


def test_the_middle_of_a_text(model: ServedModel, tmp_path: Path) -> None:
    """Prefix, suffix and middle tokens around the parts, by all three APIs."""
    write_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens([*MARKS, "<|file_sep|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    coder = replace(model, tokenizer=(tokenizer := Tokenizer.from_folder(tmp_path)))
    first, second, third, file = (tokenizer.token_to_id(mark) for mark in (*MARKS, "<|file_sep|>"))
    before, after = tokenizer.encode("a(", False), tokenizer.encode(")b", False)
    wanted = [first, *before, second, *after, third]
    script = Script(["x"])
    app = app_over(script, coder)
    for path, body in (
        ("/infill", {"input_prefix": "a", "prompt": "(", "input_suffix": ")b"}),
        ("/v1/completions", {"prompt": "a(", "suffix": ")b"}),
        ("/api/generate", {"prompt": "a(", "suffix": ")b", "stream": False}),
    ):
        assert post(app, path, body).status_code == 200
        assert script.submitted[-1][0] == wanted, path
    extra = [{"filename": "c.py", "text": "c"}]
    assert post(app, "/infill", {"input_prefix": "a(", "input_suffix": ")b", "input_extra": extra}).status_code == 200
    assert script.submitted[-1][0] == [file, *tokenizer.encode("c.py\nc\n", False), *wanted]
    ids = post(app, "/v1/completions", {"prompt": [1, 2], "suffix": "b"})
    assert ids.status_code == 400 and "not of token ids" in ids.text

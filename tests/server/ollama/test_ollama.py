"""The Ollama API: chats and generations, streamed and whole, options, tools, thinking, embeddings, models, refusals.

Ollama's own client is tried in tests/clients.
"""

import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.core.errors import EngineFailed
from quire.server.context import ServedModel
from tests.server.api_server import MODEL, PLAIN, scripted_server
from tests.server.chat_templates import QWEN_3
from tests.server.scripted_app import Script, app_over, events

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo 🙂"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
LINES: tuple[dict[str, Any], ...] = (
    {"say": "Bang bang bang", "break": True, "when": "boom"},
    {"say": "on and on and ", "end": False, "when": "endless"},
    {"say": "and so on.", "when": "assistant\nOnce upon a time"},
    {"say": "It rains at noon.", "when": "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_resp"},
    {"say": f"<think>\nHm, let me see.\n</think>\n\nI will look.\n{WEATHER}\n{CLOCK}", "when": "weather?"},
    {"say": "The first turn is there.", "when": "The first turn."},
    {"say": "Not thinking.", "when": "<think>\n\n</think>\n\n"},
    {"say": PLAIN},
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "clock")
]
COUNTS = {
    "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration",
}  # fmt: skip


@pytest.fixture(scope="module")
def url(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("ollama")
    (folder / "template.jinja").write_text(QWEN_3)
    with scripted_server(folder, LINES, "--chat-template", str(folder / "template.jinja")) as url:
        yield url


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def whole(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post(path, json={**body, "stream": False})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = http.post(path, json=body)
    assert response.headers["content-type"] == "application/x-ndjson", response.text
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_chat_and_a_generation_whole_and_streamed(http: httpx.Client) -> None:
    for path, body in (("/api/chat", {"messages": user("hi")}), ("/api/generate", {"prompt": "hi", "system": "Be."})):

        def text(part: dict[str, Any]) -> str:
            return str(part["response"] if "response" in part else part["message"]["content"])

        answer = whole(http, path, {"model": f"{MODEL}:latest", **body})
        assert (text(answer), answer["model"], answer["done"]) == (PLAIN, f"{MODEL}:latest", True)
        assert answer["done_reason"] == "stop" and set(answer) > COUNTS
        assert all(isinstance(answer[name], int) and answer[name] >= 0 for name in COUNTS)
        *lines, last = streamed(http, path, body)
        assert "".join(map(text, lines)) == PLAIN and len(lines) > 1 and not any(line["done"] for line in lines)
        assert (last["done"], text(last), last["model"]) == (True, "", MODEL)
        for name in ("prompt_eval_count", "eval_count"):
            assert last[name] == answer[name] > 0


def test_curl_without_a_content_type_but_no_form_of_a_page(http: httpx.Client) -> None:
    body, form = json.dumps({"model": MODEL, "prompt": "hi", "stream": False}), "application/x-www-form-urlencoded"
    assert http.post("/api/generate", content=body, headers={"content-type": form}).status_code == 200
    for name, value in {"origin": str(http.base_url).rstrip("/"), "sec-fetch-site": "cross-site"}.items():
        assert http.post("/api/generate", content=body, headers={"content-type": form, name: value}).status_code == 415
    assert http.post("/api/generate", content=body, headers={"content-type": "text/plain"}).status_code == 415
    assert http.post("/v1/completions", content=body, headers={"content-type": form}).status_code == 415


def test_a_prompt_without_the_template(http: httpx.Client) -> None:
    answer = whole(http, "/api/generate", {"prompt": "hi", "raw": True})
    assert (answer["response"], answer["prompt_eval_count"]) == (PLAIN, 1)
    *lines, last = streamed(http, "/api/generate", {"prompt": "endless", "raw": True, "options": {"num_predict": 3}})
    assert "".join(line["response"] for line in lines) == "on and on"
    assert (last["done_reason"], last["eval_count"]) == ("length", 3)


OPEN_WEBUI = {  # what it forwards with each request, where it is set to
    "authorization": "Bearer anything", "x-openwebui-user-name": "Ada%20L", "x-openwebui-user-id": "1",
    "x-openwebui-user-email": "ada@example.org", "x-openwebui-user-role": "admin",
}  # fmt: skip


def test_open_webui_as_with_ollama(http: httpx.Client) -> None:
    """Its requests, as its source makes them: versions, models, chats, titles, unloading, embeddings."""
    got = {name: http.get(f"/api/{name}", headers=OPEN_WEBUI).json() for name in ("version", "tags", "ps")}
    assert tuple(map(int, re.sub(r"^v|-.*", "", got["version"]["version"]).split("."))) >= (0, 1, 0)
    names = {model["model"] for model in got["tags"]["models"]}
    assert f"{MODEL}:latest" in names, "a name without a tag is completed by it, and must be listed so"
    assert all(datetime.fromisoformat(model["expires_at"]) and model["name"] for model in got["ps"]["models"])
    named = {"model": f"{MODEL}:latest"}
    options = {"temperature": 0.8, "num_ctx": 2048, "stop": ["###"], "num_keep": 24, "repeat_penalty": 1.1}
    chat = {**named, "messages": user("hi"), "options": options, "stream": True, "keep_alive": "5m"}
    *lines, last = streamed(http, "/api/chat", chat)
    assert "".join(line["message"]["content"] for line in lines) == PLAIN and last["done"] and set(last) > COUNTS
    title = {**named, "messages": user("### Task:\nGenerate a title."), "options": {"num_predict": 1000}}
    assert whole(http, "/api/chat", title)["message"]["content"] == PLAIN
    schema = {"type": "object", "properties": {"tags": {"type": "array", "items": {"enum": ["a"]}, "maxItems": 1}}}
    tags = whole(http, "/api/chat", {**named, "messages": user("tags"), "format": {**schema, "required": ["tags"]}})
    assert set(json.loads(tags["message"]["content"])["tags"]) <= {"a"}
    unloaded = whole(http, "/api/generate", {**named, "keep_alive": 0, "prompt": ""})
    assert (unloaded["done"], unloaded["response"]) == (True, "")
    embedded = http.post("/api/embed", json={**named, "input": ["one", "two"], "truncate": True}, headers=OPEN_WEBUI)
    assert len(embedded.json()["embeddings"]) == 2
    assert http.post("/api/show", json=named).json()["capabilities"]


def test_open_webui_as_with_openai(http: httpx.Client) -> None:
    models = http.get("/v1/models", headers=OPEN_WEBUI).json()["data"]
    assert [model["id"] for model in models] and all(model["object"] == "model" for model in models)
    body = {"model": models[0]["id"], "messages": user("hi"), "stream": True, "stream_options": {"include_usage": True}}
    *data, done = re.findall(r"^data: (.+)$", http.post("/v1/chat/completions", json=body).text, re.MULTILINE)
    got = list(map(json.loads, data))
    assert done == "[DONE]"
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in got if each["choices"]) == PLAIN
    assert got[-1]["choices"] == [] and got[-1]["usage"]["completion_tokens"] > 0
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]  # as it sends text beside files
    title = {"model": MODEL, "messages": parts, "stream": False, "max_completion_tokens": 1000, "max_tokens": None}
    answer = http.post("/v1/chat/completions", json=title, headers=OPEN_WEBUI)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == PLAIN


@pytest.mark.parametrize(
    ("options", "reason", "text"),
    [
        ({"num_predict": 3}, "length", "on and on"),
        ({"stop": ["n and"], "num_predict": -1}, "stop", "o"),
        ({"stop": "n and", "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": -1,
          "repeat_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "num_ctx": 1 << 20,
          "num_gpu": 99, "mirostat": 0, "typical_p": 1.0}, "stop", "o"),
        ({"num_predict": 1 << 20, "stop": ["n and"], "repeat_last_n": 0}, "stop", "o"),
        # What clients send that means nothing.
        ({"stop": ["", "n and"], "mirostat": False, "mirostat_eta": 0.1, "mirostat_tau": 5.0, "tfs_z": 1,
          "typical_p": 2, "penalize_newline": False, "num_keep": 24, "num_batch": 512, "num_thread": 8, "main_gpu": 0,
          "low_vram": False, "f16_kv": True, "vocab_only": False, "use_mmap": None, "use_mlock": False, "numa": False},
         "stop", "o"),
        ({"stop": "", "num_predict": 3, "mirostat": 0.0, "penalize_newline": True, "repeat_last_n": 64}, "length",
         "on and on"),
        ({"stop": [""], "num_predict": 3, "penalize_newline": False, "repeat_penalty": 1.2, "repeat_last_n": 0},
         "length", "on and on"),
    ],
)  # fmt: skip
def test_options(http: httpx.Client, options: dict[str, Any], reason: str, text: str) -> None:
    answer = whole(http, "/api/chat", {"messages": user("endless"), "options": options, "keep_alive": "5m"})
    assert (answer["done_reason"], answer["message"]["content"]) == (reason, text)


def test_sampling_options_reach_the_engine(model: ServedModel) -> None:
    script = Script(["Hi"])
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 7, "repeat_penalty": 1.2,
               "presence_penalty": 0.3, "frequency_penalty": 0.4, "num_predict": 5}  # fmt: skip
    body = {"messages": user("hi"), "stream": False, "options": options}
    assert events(app_over(script, model), lambda client: client.post("/api/chat", json=body)).status_code == 200
    [(_, params, _)] = script.submitted
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 40, 0.1, 7)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.3, 0.4)
    assert params.max_tokens == 5


def test_output_follows_a_format(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}  # as pydantic writes it
    answer = whole(http, "/api/chat", {"messages": user("endless"), "format": schema, "options": {"num_predict": 40}})
    assert set(json.loads(answer["message"]["content"])) == {"on"}
    raw = {"prompt": "endless", "raw": True, "format": {"const": 7}}
    assert whole(http, "/api/generate", raw)["response"] == "7"
    free = whole(http, "/api/generate", {"prompt": "hi", "format": "json", "options": {"num_predict": 9}})
    assert free["response"].lstrip().startswith("{")


def test_thinking_text_and_calls(http: httpx.Client) -> None:
    body = {"messages": user("weather?"), "tools": TOOLS, "think": True}
    message = whole(http, "/api/chat", body)["message"]
    assert (message["thinking"], message["content"]) == ("Hm, let me see.", "I will look.")
    calls = [call["function"] for call in message["tool_calls"]]
    assert calls == [
        {"index": 0, "name": "weather", "arguments": {"city": "Oslo 🙂"}},
        {"index": 1, "name": "clock", "arguments": {}},
    ]
    *lines, last = [line["message"] for line in streamed(http, "/api/chat", body)]
    assert "".join(line.get("thinking", "") for line in lines) == "Hm, let me see."
    assert "".join(line["content"] for line in lines) == "I will look."
    single = [line["tool_calls"] for line in lines if "tool_calls" in line]
    assert [call["function"] for [call] in single] == calls and "tool_calls" not in last
    results = [  # of tools by name, in the order of the calls
        {"role": "tool", "tool_name": "weather", "content": "rain"},
        {"role": "tool", "tool_name": "clock", "content": "noon"},
    ]
    bare = [{"function": {"name": call["name"], "arguments": call["arguments"]}} for call in calls]
    said = {"role": "assistant", "content": "I will look.", "thinking": "Hm.", "tool_calls": bare}
    body = {"messages": [*user("weather?"), said, *results], "tools": TOOLS}
    assert whole(http, "/api/chat", body)["message"]["content"] == "It rains at noon."
    answer = whole(http, "/api/generate", {"prompt": "hi", "think": False})
    assert (answer["response"], "thinking" in answer) == ("Not thinking.", False)


def test_a_last_message_of_the_assistant_is_continued(http: httpx.Client) -> None:
    messages = [*user("Tell."), {"role": "assistant", "content": "Once upon a time"}]
    assert whole(http, "/api/chat", {"messages": messages})["message"]["content"] == "and so on."


def test_log_probabilities_are_with_the_text(http: httpx.Client) -> None:
    body = {"prompt": "hi", "logprobs": True, "top_logprobs": 2}
    for answer in ([whole(http, "/api/generate", body)], streamed(http, "/api/generate", body)):
        tokens = [entry for line in answer for entry in line.get("logprobs", ())]
        assert len(tokens) == answer[-1]["eval_count"]
        assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in tokens)


def test_turns_that_do_not_fit_are_dropped(http: httpx.Client) -> None:
    """As Ollama does: from the whole context of 1,024 tokens, and from `num_ctx`."""
    old = [*user("The first turn."), {"role": "assistant", "content": "word " * 150}]
    recent = [*user("word " * 150), {"role": "assistant", "content": "yes"}, *user("hi")]
    body = {"messages": [*old, *recent]}
    assert whole(http, "/api/chat", body)["message"]["content"] == "The first turn is there."
    assert whole(http, "/api/chat", {**body, "options": {"num_ctx": 300}})["message"]["content"] == PLAIN
    longer = {"messages": [*old, *recent[:-1], *user("word " * 700)]}
    assert whole(http, "/api/chat", longer)["message"]["content"] == PLAIN
    refused = http.post("/api/chat", json={**longer, "truncate": False})
    assert refused.status_code == 400 and "maximum context length is 1024" in refused.json()["error"]


def test_a_request_without_a_prompt_loads_the_model(http: httpx.Client) -> None:
    for path, content in (("/api/chat", {"role": "assistant", "content": ""}), ("/api/generate", "")):
        answer = http.post(path, json={"model": MODEL}).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")
        assert answer["message" if path == "/api/chat" else "response"] == content
    assert http.post("/api/embeddings", json={"model": MODEL}).json() == {"embedding": []}


def test_embeddings(http: httpx.Client) -> None:
    answer = http.post("/api/embed", json={"input": ["rain", "snow"]}).json()
    openai = http.post("/v1/embeddings", json={"input": ["rain", "snow"]}).json()
    assert answer["embeddings"] == [entry["embedding"] for entry in openai["data"]]
    assert (answer["prompt_eval_count"], answer["load_duration"]) == (openai["usage"]["prompt_tokens"], 0)
    assert http.post("/api/embeddings", json={"prompt": "snow"}).json()["embedding"] == answer["embeddings"][1]
    assert http.post("/api/embed", json={"input": []}).json()["embeddings"] == []
    assert len(http.post("/api/embed", json={"input": "rain", "dimensions": 3}).json()["embeddings"][0]) == 3
    long = http.post("/api/embed", json={"input": "rain " * 2000})
    assert long.json()["prompt_eval_count"] == 1024
    assert http.post("/api/embed", json={"input": "rain " * 2000, "truncate": False}).status_code == 400
    assert "dimensions is 0" in http.post("/api/embed", json={"input": "rain", "dimensions": 0}).json()["error"]


def test_the_models(http: httpx.Client) -> None:
    [model] = http.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == f"{MODEL}:latest" and len(model["digest"]) == 64 and model["size"] > 0
    assert model["details"]["family"] == "llama" and model["details"]["parameter_size"] == "134.5M"
    [loaded] = http.get("/api/ps").json()["models"]
    assert loaded["context_length"] == 1024 and loaded["digest"] == model["digest"] and loaded["size_vram"] == 0
    shown = http.post("/api/show", json={"name": MODEL}).json()
    assert set(shown["capabilities"]) == {"completion", "tools", "thinking"}
    assert shown["model_info"]["llama.context_length"] == 1024 and "temperature" in shown["parameters"]
    assert http.get("/api/version").json()["version"].count(".") == 2
    assert http.post("/api/pull", json={"model": f"{MODEL}:latest"}).json() == {"status": "success"}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/chat", {"model": "other", "messages": user("hi")}, 404, f"this server has '{MODEL}'"),
        ("/api/show", {"model": "other"}, 404, "There is no model 'other'"),
        ("/api/embed", {"model": "other", "input": "x"}, 404, "There is no model 'other'"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "reads text only"),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}, 400, "reads text only"),
        ("/api/generate", {"prompt": "x", "context": [1]}, 400, "context is not served here; send the conversation"),
        ("/api/chat", {"messages": user("x"), "options": {"temperature": 9}}, 400, "options.temperature must be"),
        ("/api/chat", {"messages": user("x"), "options": {"mirostat": 2}}, 400, "options.mirostat is not served here"),
        (
            "/api/chat",
            {"messages": user("x"), "options": {"mirostat": 1.0}},
            400,
            "is not served here; use options.top_p",
        ),
        ("/api/chat", {"messages": user("x"), "options": {"tfs_z": 0.5}}, 400, "options.tfs_z is not served here"),
        (
            "/api/chat",
            {"messages": user("x"), "options": {"typical_p": 0}},
            400,
            "options.typical_p is not served here",
        ),
        (
            "/api/chat",
            {"messages": user("x"), "options": {"penalize_newline": False, "presence_penalty": 1}},
            400,
            "options.penalize_newline is not served here; penalties count newlines",
        ),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, 400, "system has no place in a raw prompt"),
        ("/api/chat", {"messages": user("x"), "format": "xml"}, 400, "format is 'xml'"),
        ("/api/chat", {"messages": user("x"), "format": [1]}, 400, "format is [1]"),
        ("/api/chat", {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role is 'king'"),
        ("/api/chat", {"messages": 5}, 400, "messages must be a list of objects or left out, not 5"),
        ("/api/pull", {"model": "other"}, 403, "Models are not pulled over HTTP"),
        ("/api/create", {"model": "other"}, 403, "managed on the server's own machine"),
        ("/api/nothing", {}, 404, "POST /api/nothing is not served here"),
    ],
)
def test_refusals_have_ollamas_shape(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    answer = http.post(path, json=body)
    assert (answer.status_code, set(answer.json())) == (status, {"error"}), answer.text
    assert words in answer.json()["error"]


def test_a_model_without_thinking_refuses_to(model: ServedModel) -> None:
    body = {"messages": user("hi"), "think": True}
    answer = events(app_over(Script(["Hi"]), model), lambda client: client.post("/api/chat", json=body))
    assert (answer.status_code, answer.json()) == (400, {"error": "'org/model' does not support thinking; omit think."})


def test_deleting_is_refused(http: httpx.Client) -> None:
    answer = http.request("DELETE", "/api/delete", json={"model": MODEL})
    assert answer.status_code == 403 and "/api/delete is not served here" in answer.json()["error"]


def test_a_failure_in_a_stream_is_a_line(http: httpx.Client) -> None:
    *lines, last = streamed(http, "/api/chat", {"messages": user("boom")})
    assert lines and set(last) == {"error"}
    assert http.post("/api/chat", json={"messages": user("boom"), "stream": False}).status_code == 500


def test_a_failure_before_the_first_token_keeps_its_status(model: ServedModel) -> None:
    script = Script(failure=EngineFailed("The engine is lost."))
    body = {"messages": user("hi")}
    answer = events(app_over(script, model), lambda client: client.post("/api/chat", json=body))
    assert (answer.status_code, answer.json()) == (500, {"error": "The engine is lost."})

"""Log-probabilities that a response keeps to its end: bounded for each response and in all, by client."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.server import async_engine, context
from quire.server.context import TextThreads
from quire.server.fair_shares import ResponseBytes
from quire.server.request_stream import _scored_bytes
from tests.server.local_server import LocalServer
from tests.server.many_clients import fetch_all, request
from tests.server.scripted_servers import check_control, completion_body, scripted_here
from tests.server.server_process import wait_until_at_rest

USER = [{"role": "user", "content": "endless"}]
INCLUDED = ["message.output_text.logprobs"]
NUM_KEPT = 400  # tokens with five log-probabilities that the patched limit allows


@pytest.fixture(scope="module")
def server(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with scripted_here(tmp_path_factory.mktemp("kept")) as server:
        yield server


@pytest.fixture
def limited(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    monkeypatch.setattr(async_engine, "MAX_KEPT_BYTES", _scored_bytes(NUM_KEPT, 5))
    with server.client() as client:
        yield client
        wait_until_at_rest(client)
        check_control(client)


def ask(client: httpx.Client, **fields: object) -> httpx.Response:
    return client.post("/v1/completions", json=completion_body("endless", logprobs=5, **fields))


def assert_too_large(response: httpx.Response) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("response_too_large", "logprobs")
    assert "stream it" in error["message"]


def test_a_response_within_the_limit_is_whole(limited: httpx.Client) -> None:
    choices = ask(limited, n=4, max_tokens=NUM_KEPT // 4).json()["choices"]
    assert [len(each["logprobs"]["top_logprobs"]) for each in choices] == [NUM_KEPT // 4] * 4


@pytest.mark.parametrize("fields", [{"max_tokens": NUM_KEPT + 1}, {"n": 4, "max_tokens": NUM_KEPT // 4 + 1}])
def test_a_response_beyond_the_limit_is_refused(limited: httpx.Client, fields: dict[str, Any]) -> None:
    assert_too_large(ask(limited, **fields))


def test_all_prompts_of_a_body_count_together(limited: httpx.Client) -> None:
    """Also those that have ended: their log-probabilities are kept until the response is written."""
    few = {"prompt": [[5] * 90] * 4, "echo": True, "max_tokens": 1}
    assert ask(limited, **few).status_code == 200
    assert_too_large(ask(limited, **few | {"prompt": [[5] * 90] * 5}))


def test_a_chat_is_bounded_too(limited: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "endless"}], "logprobs": True, "top_logprobs": 5}
    assert_too_large(limited.post("/v1/chat/completions", json={**body, "max_tokens": NUM_KEPT + 1}))


def test_a_stream_keeps_nothing(limited: httpx.Client) -> None:
    response = ask(limited, max_tokens=3 * NUM_KEPT, stream=True)
    assert response.text.endswith("data: [DONE]\n\n") and '"error"' not in response.text


def test_if_all_take_too_much_the_client_with_the_most_gives_way(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keys all requests from here are of one client: some fail, and some are answered."""
    monkeypatch.setattr(async_engine, "MAX_ALL_KEPT_BYTES", _scored_bytes(4 * NUM_KEPT, 5))
    sent = request(completion_body("endless", logprobs=5, max_tokens=NUM_KEPT))
    responses = asyncio.run(fetch_all(server.port, [sent] * 16))
    assert {each.status for each in responses} == {200, 503}
    assert all(b"too_many_logprobs" in each.body and each.retry_after_s for each in responses if each.status == 503)
    with server.client() as client:
        wait_until_at_rest(client)
        assert ask(client, max_tokens=NUM_KEPT).status_code == 200, "nothing is held any more"


def test_the_largest_response_of_the_client_with_the_most_ranks_first() -> None:
    held = ResponseBytes()
    for client, response, num_bytes in (("a", "1", 5), ("b", "2", 4), ("b", "3", 3), ("a", "1", -1)):
        held.add(client, response, num_bytes)
    assert held.num_bytes == 11
    assert max([("a", "1"), ("b", "2"), ("b", "3")], key=lambda each: held.rank(*each)) == ("b", "2")
    held.add("a", "1", -4)
    assert "a" not in held.by_client and "1" not in held.by_response


SCORED: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "endless", "max_tokens": 4, "logprobs": 2}),
    "chat": ("/v1/chat/completions", {"messages": USER, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}),
    "responses": ("/v1/responses", {"input": "endless", "max_output_tokens": 4, "include": INCLUDED}),
    "background": (
        "/v1/responses",
        {"input": "endless", "max_output_tokens": 4, "include": INCLUDED, "background": True},
    ),
    "TGI": ("/generate", {"inputs": "endless", "parameters": {"max_new_tokens": 4, "details": True}}),
    "Ollama": ("/api/chat", {"messages": USER, "stream": False, "options": {"num_predict": 4}, "logprobs": True}),
}


@pytest.mark.parametrize("api", SCORED)
def test_many_log_probabilities_are_written_on_a_thread(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    """On the event loop, those of 7,000 tokens kept all other requests waiting for seconds."""
    monkeypatch.setattr(context, "_FEW_SCORES", 0)
    written: list[str] = []
    run_long = TextThreads._run_long

    async def noted(threads: TextThreads, client: str, work: Callable[[], Any]) -> Any:
        written.append(client)
        return await run_long(threads, client, work)

    monkeypatch.setattr(TextThreads, "_run_long", noted)
    path, body = SCORED[api]
    with server.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        response = client.post(path, json={"model": model, **body} if api == "Ollama" else body)
        assert response.status_code == 200, response.text
        wait_until_at_rest(client)
        if api == "background":
            response = client.get(f"/v1/responses/{response.json()['id']}")
    assert len(written) == 1 and response.text.count('"logprob"') + response.text.count('"token_logprobs"') > 0

"""Stored responses through OpenAI's own client: continue, retrieve, list, delete, background, cancel; their owners."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseItemList

from quire.server.openai import responses
from tests.server.api_server import MODEL, named_events
from tests.server.local_server import LocalServer, local_server
from tests.server.server_process import counted, load, wait_until, wait_until_at_rest

LINES: list[dict[str, Any]] = [
    {"step_ms": 2},
    {"say": "Bang bang bang", "break": True, "when": "boom"},
    {"say": "on and on and ", "end": False, "when": "endless"},
    {"say": "It is Ada.", "when": "My name is Ada<|im_end|>\n<|im_start|>assistant\nHello."},
    {"say": "Forgotten.", "when": "Say my name"},
    {"say": "Hello."},
]
KEYS = "sk-a name=a\nsk-b name=b max_open=1\n"


@pytest.fixture(scope="module")
def served(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = tmp_path_factory.mktemp("stored")
    (folder / "keys").write_text(KEYS, encoding="ascii")
    (folder / "admin").write_text("sk-admin\n", encoding="ascii")
    keys = ("--api-key-file", str(folder / "keys"), "--admin-key-file", str(folder / "admin"))
    with local_server(folder, LINES, "--max-model-len", "8k", *keys) as server:
        yield server


def client_of(server: LocalServer, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(served: LocalServer) -> Iterator[openai.OpenAI]:
    with client_of(served, "sk-a") as client:
        yield client


@pytest.fixture(scope="module")
def other(served: LocalServer) -> Iterator[openai.OpenAI]:
    with client_of(served, "sk-b") as client:
        yield client


@pytest.fixture(scope="module")
def http(served: LocalServer) -> Iterator[httpx.Client]:
    with served.client(headers={"authorization": "Bearer sk-a"}) as client:
        yield client


def ask(client: openai.OpenAI, text: Any, **fields: Any) -> Response:
    response = client.responses.create(model=MODEL, input=text, **fields)
    assert isinstance(response, Response)
    return response


def ended(client: openai.OpenAI, response_id: str) -> Response:
    """A background response when it has ended, and its statuses on the way in their order."""
    seen = []

    def is_over() -> bool:
        seen.append(client.responses.retrieve(response_id).status)
        return seen[-1] not in ("queued", "in_progress")

    wait_until(is_over)
    order = ["queued", "in_progress", seen[-1]]
    assert [order.index(str(status)) for status in seen] == sorted(order.index(str(status)) for status in seen)
    return client.responses.retrieve(response_id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_continues_from_its_last_response(client: openai.OpenAI, stream: bool) -> None:
    if stream:
        with client.responses.stream(model=MODEL, input="My name is Ada", instructions="Rule.") as events:
            events.until_done()
            first = events.get_final_response()
    else:
        first = ask(client, "My name is Ada", instructions="Rule.")
    assert first.store is True
    second = ask(client, "Say my name", previous_response_id=first.id)
    assert second.output_text == "It is Ada." and second.previous_response_id == first.id
    assert second.instructions is None, "instructions are not carried over"
    assert ask(client, "Say my name").output_text == "Forgotten."
    third = ask(client, [{"role": "user", "content": "Say my name"}], previous_response_id=second.id)
    assert third.output_text == "It is Ada.", "with the turns before the previous one"
    assert third.usage is not None and second.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens


def test_a_stored_response_is_retrieved_and_deleted(client: openai.OpenAI, http: httpx.Client) -> None:
    made = http.post("/v1/responses", json={"input": "hi", "metadata": {"a": "b"}}).json()
    assert http.get(f"/v1/responses/{made['id']}").json() == made
    events = named_events(http.post("/v1/responses", json={"input": "hi", "stream": True}).text)
    final = events[-1]["response"]
    assert http.get(f"/v1/responses/{final['id']}").json() == final
    assert http.delete(f"/v1/responses/{made['id']}").json() == {
        "id": made["id"], "object": "response", "deleted": True,
    }  # fmt: skip
    with pytest.raises(openai.NotFoundError, match="lost when the server restarts"):
        client.responses.retrieve(made["id"])
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made["id"])
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, "hi", previous_response_id=made["id"])
    assert (error.value.code, error.value.param) == ("previous_response_not_found", "previous_response_id")


def test_store_false_stores_nothing(client: openai.OpenAI, http: httpx.Client) -> None:
    before = counted(http, "stored_responses"), counted(http, "stored_response_bytes")
    assert before[0] < before[1]
    made = ask(client, "hi", store=False)
    assert made.store is False
    assert before == (counted(http, "stored_responses"), counted(http, "stored_response_bytes"))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_failed_stream_is_stored_as_failed(client: openai.OpenAI, http: httpx.Client) -> None:
    *_, last = named_events(http.post("/v1/responses", json={"input": "boom", "stream": True}).text)
    stored = client.responses.retrieve(last["response"]["id"])
    assert stored.status == "failed" and stored.error is not None and stored.error.code == "server_error"


def test_a_response_belongs_to_its_key(client: openai.OpenAI, other: openai.OpenAI) -> None:
    made = ask(client, "hi", background=True)
    for call in (
        lambda: other.responses.retrieve(made.id),
        lambda: other.responses.delete(made.id),
        lambda: other.responses.cancel(made.id),
        lambda: other.responses.input_items.list(made.id),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            call()
        assert error.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError):
        ask(other, "hi", previous_response_id=made.id)
    final = ended(client, made.id)
    assert final.status == "completed"
    item = final.output[0].id
    assert ask(client, [{"type": "item_reference", "id": item}]).output_text == "Hello."
    with pytest.raises(openai.BadRequestError, match="not a stored output item"):
        ask(other, [{"type": "item_reference", "id": item}])


def test_the_input_items_of_a_conversation(client: openai.OpenAI, http: httpx.Client) -> None:
    first = ask(client, "one")
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "7"}
    second = ask(client, [{"role": "assistant", "content": "two"}, call, result], previous_response_id=first.id)
    listed = http.get(f"/v1/responses/{second.id}/input_items", params={"order": "asc"}).json()
    ResponseItemList.model_validate(listed, strict=True)
    assert [item["type"] for item in listed["data"]] == [
        "message", "message", "message", "function_call", "function_call_output",
    ]  # fmt: skip
    texts = [part["text"] for item in listed["data"] for part in item.get("content", ())]
    assert texts == ["one", "Hello.", "two"]
    assert listed["data"][1]["id"] == first.output[0].id and not listed["has_more"]
    ids = [item["id"] for item in listed["data"]]
    assert len(set(ids)) == 5 and (listed["first_id"], listed["last_id"]) == (ids[0], ids[-1])
    paged = client.responses.input_items.list(second.id, limit=2)
    assert [item.id for item in paged] == ids[::-1], "latest first, over three pages"
    for query in ({"limit": "0"}, {"limit": "x"}, {"limit": "101"}, {"order": "up"}, {"after": "msg_x"}):
        answer = http.get(f"/v1/responses/{second.id}/input_items", params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(query)))


def test_a_background_response_is_polled(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = http.post("/v1/responses", json={"input": "hi", "background": True})
    made = Response.model_validate(answer.json(), strict=True)
    assert made.status in ("queued", "in_progress") and made.background is True and made.output == []
    final = ended(client, made.id)
    assert final.status == "completed" and final.output_text == "Hello." and final.usage is not None
    assert ask(client, "more", previous_response_id=made.id).output_text == "Hello."
    assert client.responses.cancel(made.id).status == "completed", "it has ended before"
    failed = ended(client, ask(client, "boom", background=True).id)
    assert failed.status == "failed" and failed.error is not None and failed.error.message
    cut = ended(client, ask(client, "endless", background=True, max_output_tokens=5).id)
    assert cut.status == "incomplete"
    wait_until_at_rest(http)


def test_a_background_response_outlives_its_connection_and_counts_as_open(
    served: LocalServer, other: openai.OpenAI, http: httpx.Client
) -> None:
    wait_until_at_rest(http)
    with served.client(headers={"authorization": "Bearer sk-b"}) as gone:
        made = gone.post("/v1/responses", json={"input": "endless", "background": True}).json()
    wait_until(lambda: other.responses.retrieve(made["id"]).status == "in_progress")
    assert load(http)["server_load"] == 1
    with pytest.raises(openai.RateLimitError) as error:
        ask(other, "hi")
    assert error.value.code == "share_exhausted", "this key may have one request open"
    with pytest.raises(openai.BadRequestError, match="still being generated"):
        other.responses.input_tokens.count(model=MODEL, input="hi", previous_response_id=made["id"])
    assert other.responses.cancel(made["id"]).status == "cancelled"
    wait_until_at_rest(http)
    assert other.responses.retrieve(made["id"]).status == "cancelled"
    assert ask(other, "hi").output_text == "Hello."


def test_a_background_response_fails_with_its_request(
    served: LocalServer, client: openai.OpenAI, http: httpx.Client
) -> None:
    answer = http.post("/v1/responses", json={"input": "endless", "background": True})
    aborted = {"request_ids": [answer.headers["x-quire-request-id"]]}
    with served.client(headers={"authorization": "Bearer sk-admin"}) as admin:
        assert admin.post("/abort_requests", json=aborted).json() == {"aborted": 1}
    failed = ended(client, answer.json()["id"])
    assert failed.status == "failed" and failed.error is not None and "operator" in failed.error.message
    wait_until_at_rest(http)


def test_a_deleted_background_response_ends(client: openai.OpenAI, http: httpx.Client) -> None:
    made = ask(client, "endless", background=True)
    client.responses.delete(made.id)
    wait_until_at_rest(http)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_background_response_is_streamed(client: openai.OpenAI, http: httpx.Client) -> None:
    events = list(client.responses.create(model=MODEL, input="hi", background=True, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    created, last = events[0], events[-1]
    assert created.type == "response.created" and created.response.status == "queued"
    assert last.type == "response.completed" and last.response.output_text == "Hello."
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello."
    stored = client.responses.retrieve(last.response.id)
    assert (stored.status, stored.background, stored.output) == ("completed", True, last.response.output)
    wait_until_at_rest(http)


def test_a_background_stream_goes_on_without_its_client_and_is_followed_again(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    begun = client.responses.create(model=MODEL, input="endless", background=True, stream=True, max_output_tokens=1500)
    with begun:
        first = [next(begun) for _ in range(6)]
    assert first[0].type == "response.created"
    response_id = first[0].response.id
    assert client.responses.retrieve(response_id).status == "in_progress"
    with client.responses.retrieve(response_id, stream=True, starting_after=3) as again:
        rest = list(again)
    assert [event.sequence_number for event in rest] == list(range(4, 4 + len(rest)))
    assert rest[:2] == first[4:]
    assert rest[-1].type == "response.incomplete" and rest[-1].response.status == "incomplete"
    assert client.responses.retrieve(response_id).output == rest[-1].response.output
    wait_until_at_rest(http)
    with client.responses.retrieve(response_id, stream=True, starting_after=3) as replayed:
        assert list(replayed) == rest, "it has ended"
    with client.responses.retrieve(response_id, stream=True, starting_after=10**6) as nothing:
        assert not list(nothing)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("text", ["hi", "boom"])
def test_a_stream_is_replayed_to_the_byte(http: httpx.Client, text: str, background: bool) -> None:
    body = {"input": text, "stream": True, "background": background, "metadata": {"number": "10", "ä": "🙂"}}
    sent = http.post("/v1/responses", json=body).text
    events = sent.split("\n\n")
    response_id = json.loads(events[0].partition("data: ")[2])["response"]["id"]
    path = f"/v1/responses/{response_id}"
    assert http.get(path, params={"stream": "true"}).text == sent
    for after in range(len(events)):
        replayed = http.get(path, params={"stream": "true", "starting_after": after})
        assert (replayed.status_code, replayed.text) == (200, "\n\n".join(events[after + 1 :]))
    wait_until_at_rest(http)


def test_a_response_that_was_not_streamed_is_replayed_in_one_delta(client: openai.OpenAI) -> None:
    made = ask(client, "hi")
    with client.responses.retrieve(made.id, stream=True) as replayed:
        events = list(replayed)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == ["Hello."]
    assert events[-1].type == "response.completed" and events[-1].response.output == made.output


def test_a_cancelled_response_has_no_events(client: openai.OpenAI, http: httpx.Client) -> None:
    made = ask(client, "endless", background=True)
    answer = http.get(f"/v1/responses/{made.id}", params={"stream": "true"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream"), "it is generated without stream"
    client.responses.cancel(made.id)
    answer = http.get(f"/v1/responses/{made.id}", params={"stream": "true"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "response_cancelled")
    wait_until_at_rest(http)


@pytest.mark.parametrize("end", ["cancel", "delete"])
def test_followers_of_a_cancelled_response_get_an_error(client: openai.OpenAI, http: httpx.Client, end: str) -> None:
    body = {"input": "endless", "background": True, "stream": True}
    with http.stream("POST", "/v1/responses", json=body) as answer:
        lines = answer.iter_lines()
        created = json.loads(next(line for line in lines if line.startswith("data: ")).removeprefix("data: "))
        getattr(client.responses, end)(created["response"]["id"])
        last = json.loads([line for line in lines if line.startswith("data: ")][-1].removeprefix("data: "))
    assert (last["type"], last["code"]) == ("error", "response_cancelled")
    wait_until_at_rest(http)


def test_a_background_stream_fails_as_a_response(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input="boom", background=True, stream=True))
    assert events[-1].type == "response.failed" and events[-1].response.status == "failed"
    assert client.responses.retrieve(events[-1].response.id).status == "failed"


@pytest.mark.parametrize("after", ["-1", "x", "1" * 10])
def test_a_wrong_starting_after(client: openai.OpenAI, http: httpx.Client, after: str) -> None:
    with client.responses.create(model=MODEL, input="endless", background=True, stream=True) as begun:
        created = next(begun)
    assert created.type == "response.created"
    path = f"/v1/responses/{created.response.id}"
    answer = http.get(path, params={"stream": "true", "starting_after": after})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "starting_after")
    client.responses.cancel(created.response.id)
    wait_until_at_rest(http)


def test_what_cannot_be_combined(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = http.post("/v1/responses", json={"input": "hi", "background": True, "store": False})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "store")
    made = ask(client, "hi")
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(made.id)


def test_input_tokens_are_counted_as_they_are_used(client: openai.OpenAI, http: httpx.Client) -> None:
    tools: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    first = ask(client, "hi")
    for fields in (
        {"input": "hi"},
        {"input": [{"role": "user", "content": "hi"}], "instructions": "Be brief."},
        {"input": "hi", "tools": tools},
        {"input": "more", "previous_response_id": first.id},
    ):
        counted = client.responses.input_tokens.count(model=MODEL, **fields)  # type: ignore[arg-type]
        used = client.responses.create(model=MODEL, max_output_tokens=1, **fields).usage  # type: ignore[call-overload]
        assert counted.object == "response.input_tokens" and counted.input_tokens == used.input_tokens
    answer = http.post("/v1/responses/input_tokens", json={"model": MODEL})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    assert http.post("/v1/responses/input_tokens", json={"input": "hi", "model": "x"}).status_code == 404
    assert json.loads(http.get("/openapi.json").content)["paths"]["/v1/responses/input_tokens"]["post"]


def test_streams_of_stored_responses_are_bounded_by_client(
    served: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are not read hold copies of the response."""
    monkeypatch.setattr(responses, "_FOLLOWED_BYTES", 3 << 20)
    ended = http.post("/v1/responses", json={"input": "hi"}).json()["id"]
    path = f"/v1/responses/{ended}"
    with contextlib.ExitStack() as streams:
        body = {"input": "endless", "background": True, "stream": True}
        lines = streams.enter_context(http.stream("POST", "/v1/responses", json=body)).iter_lines()
        made = next(json.loads(line[6:]) for line in lines if line.startswith("data: "))["response"]["id"]
        for _ in range(3):
            followed = streams.enter_context(http.stream("GET", f"/v1/responses/{made}", params={"stream": "true"}))
            assert followed.status_code == 200
        refused = http.get(path, params={"stream": "true"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_streams")
        assert http.get(path).status_code == 200, "without stream it is not held"
        http.post(f"/v1/responses/{made}/cancel")
    wait_until(lambda: http.get(path, params={"stream": "true"}).status_code == 200)

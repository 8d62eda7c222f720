"""POST /v1/responses over HTTP, through OpenAI's own client and bare."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.api_server import MODEL, PLAIN, named_events, scripted_server

F = {"type": "function", "name": "f", "parameters": {}}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def url(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_server(tmp_path_factory.mktemp("responses")) as url:
        yield url


def streamed(http: httpx.Client, **body: object) -> list[dict[str, Any]]:
    answer = http.post("/v1/responses", json={"stream": True, **body})
    assert answer.status_code == 200, answer.text
    return named_events(answer.text)


def refused(http: httpx.Client, status: int = 400, **body: object) -> dict[str, Any]:
    for stream in (False, True):
        answer = http.post("/v1/responses", json={"input": "hi", "stream": stream, **body})
        assert answer.status_code == status, answer.text
    return answer.json()["error"]  # type: ignore[no-any-return]


def allowed(*names: str, kind: str = "function") -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": "auto", "tools": [{"type": kind, "name": name} for name in names]}


def test_a_minimal_request(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="hi")
    assert answer.output_text == PLAIN
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.id.startswith("resp_") and answer.output[0].id is not None and answer.output[0].id.startswith("msg_")
    usage = answer.usage
    assert usage is not None and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens >= 0 and usage.output_tokens_details.reasoning_tokens == 0


def test_the_object_validates_against_the_clients_type(http: httpx.Client) -> None:
    """Validated, not only constructed: the client itself lets anything through."""
    tools = [
        {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True},
        {"type": "web_search"},
    ]
    response = http.post(
        "/v1/responses", json={"input": "hi", "metadata": {"a": "b"}, "tools": tools, "temperature": 0.5}
    )
    body = response.json()
    answer = Response.model_validate(body, strict=True)
    assert answer.metadata == {"a": "b"} and answer.temperature == 0.5 and answer.store is True
    assert [tool.name for tool in answer.tools if tool.type == "function"] == ["f"] and len(answer.tools) == 1
    demanded = {name for name, field in Response.model_fields.items() if field.is_required()}
    assert demanded <= set(body)


def test_the_events_of_a_text_in_order(http: httpx.Client) -> None:
    events = streamed(http, input="hi")
    kinds = [event["type"] for event in events]
    num_deltas = kinds.count("response.output_text.delta")
    assert num_deltas >= 1, "a reader that is late gets several in one"
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * num_deltas,
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == PLAIN
    final = events[-1]["response"]
    [item] = final["output"]
    assert item["content"][0]["text"] == PLAIN and events[-4]["text"] == PLAIN
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}
    assert events[2]["item"]["id"] == item["id"] and events[-2]["item"] == item
    assert {event["response"]["id"] for event in events if "response" in event} == {final["id"]}


def test_a_stream_assembles_to_the_whole_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=[{"role": "user", "content": "hi"}]) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    whole = client.responses.create(model=MODEL, input="hi")
    assert text == final.output_text == whole.output_text
    assert final.usage is not None and whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_truncated_output_is_incomplete(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = client.responses.create(model=MODEL, input="endless", max_output_tokens=5)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]
    *_, item, last = streamed(http, input="endless", max_output_tokens=5)
    assert last["type"] == "response.incomplete" and last["response"]["output"] == [item["item"]]
    assert item["item"]["status"] == "incomplete"


def test_empty_output(client: openai.OpenAI, http: httpx.Client) -> None:
    assert client.responses.create(model=MODEL, input="nothing").output_text == ""
    [item] = streamed(http, input="nothing")[-1]["response"]["output"]
    assert item["content"][0]["text"] == ""


def test_a_failure_after_the_first_token_is_a_failed_response(http: httpx.Client) -> None:
    events = streamed(http, input="boom")
    last = events[-1]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    EVENT.validate_python(last)
    assert last["response"]["error"]["code"] == "server_error" and last["response"]["id"] == events[0]["response"]["id"]
    assert http.post("/v1/responses", json={"input": "boom"}).status_code == 500


def test_instructions_are_one_leading_message(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL,
        instructions="Rule one.",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rule two."}]},
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        ],
    )
    assert answer.output_text == "Rules heard."


def test_output_items_are_accepted_as_input(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="hi")
    items: list[Any] = [{"role": "user", "content": "hi"}, *first.output, {"role": "user", "content": "more"}]
    second = client.responses.create(model=MODEL, input=items)
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens - 2
    assert second.usage.input_tokens_details.cached_tokens > 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True, "store": False}, "store"),
        ({"truncation": "sometimes"}, "truncation"),
        ({"tool_choice": {"type": 7}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "absent"}}, "tool_choice"),
        ({"tools": [F], "tool_choice": allowed("f", "absent")}, "tool_choice"),
        ({"top_logprobs": 101}, "top_logprobs"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": {}}]}, "input[0]"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"temperature": -1}, "temperature"),
        ({"metadata": {"k": "v" * (1 << 20)}}, "metadata"),  # a response would repeat it in each event
    ],
)
def test_unsupported_requests_are_refused_before_the_first_byte(
    http: httpx.Client, body: dict[str, Any], param: str
) -> None:
    error = refused(http, **body)
    assert error["param"] == param and error["type"] == "invalid_request_error"


def test_other_errors_of_responses(http: httpx.Client, client: openai.OpenAI) -> None:
    assert refused(http, 404, model="other")["code"] == "model_not_found"
    assert refused(http, input="word " * 2000)["code"] == "context_length_exceeded"
    assert "lost when the server restarts" in http.get("/v1/responses/resp_1").json()["error"]["message"]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_1")
    with pytest.raises(openai.NotFoundError):
        client.responses.delete("resp_1")


def test_truncation_auto_drops_the_oldest_turns(http: httpx.Client) -> None:
    turns: list[dict[str, Any]] = [{"role": "system", "content": "Rule one.\n\nRule two."}]
    for _ in range(8):
        turns += [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "yes"}]
    turns.append({"role": "user", "content": "hi"})
    assert refused(http, input=turns)["code"] == "context_length_exceeded"
    answer = http.post("/v1/responses", json={"input": turns, "truncation": "auto"}).json()
    assert answer["output"][0]["content"][0]["text"] == "Rules heard.", "instructions stay"
    assert 600 < answer["usage"]["input_tokens"] <= 1024 - 128
    assert answer["truncation"] == "auto"


@pytest.mark.parametrize(
    "body",
    [
        {"input": [{"type": None, "role": "user", "content": "hi"}]},
        {"top_logprobs": 0, "include": []},
        {"tools": [F, {"type": "web_search"}], "tool_choice": allowed("search", kind="web_search")},
    ],
)
def test_empty_values_of_unsupported_fields_are_accepted(http: httpx.Client, body: dict[str, Any]) -> None:
    answer = http.post("/v1/responses", json={"input": "hi", **body})
    assert answer.status_code == 200, answer.text


def test_fields_without_effect_are_accepted(client: openai.OpenAI) -> None:
    """What Codex sends, and more."""
    answer = client.responses.create(
        model=MODEL,
        input="hi",
        store=False,
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto", "effort": "low"},
        parallel_tool_calls=True,
        tool_choice="auto",
        tools=[{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {}, "strict": False}],
        prompt_cache_key="k",
        service_tier="auto",
        text={"verbosity": "low"},
        extra_body={"client_metadata": {"a": 1}, "top_k": 5},
    )
    assert answer.output_text == PLAIN and answer.reasoning is not None and answer.reasoning.effort == "low"

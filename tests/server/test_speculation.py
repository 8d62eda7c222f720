"""Drafts behind HTTP: the same text, several tokens a step, counted in the usage and in the metrics."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.local_server import LocalServer
from tests.server.scripted_servers import completion_body, scripted_here
from tests.server.server_process import counted, wait_until


@pytest.fixture(scope="module")
def drafting(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A script drafts from itself: its drafts are always right."""
    with scripted_here(tmp_path_factory.mktemp("drafts"), "--speculative", "ngram") as running:
        yield running


def test_the_text_is_the_same_and_drafts_are_in_usage_and_metrics(
    drafting: LocalServer, scripted_server: LocalServer
) -> None:
    body = completion_body("secret", logprobs=1)
    with drafting.client() as client, scripted_server.client() as plain:
        steps = counted(client, "spec_decode_num_draft_tokens_total")
        drafted, right = (each.post("/v1/completions", json=body).json() for each in (client, plain))
        assert drafted["choices"] == right["choices"]
        details = drafted["usage"].pop("completion_tokens_details")
        assert drafted["usage"] == right["usage"] and "completion_tokens_details" not in right["usage"]
        accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        assert 0 < accepted < drafted["usage"]["completion_tokens"]
        assert rejected <= 1, "a draft that is the end token gains nothing"
        wait_until(lambda: counted(client, "spec_decode_num_draft_tokens_total") - steps == accepted + rejected)
        assert counted(client, "spec_decode_num_accepted_tokens_total") >= accepted
        metrics = client.get("/metrics").text
        assert 'quire_spec_decode_num_accepted_tokens_per_pos_total{position="0"}' in metrics
        assert counted(plain, "spec_decode_num_draft_tokens_total") == 0


def test_a_stream_has_every_token_and_stops_at_a_stop_string(drafting: LocalServer) -> None:
    with drafting.client() as client:
        for fields, text in (({}, "Nobody knows. 🙂 日本語"), ({"stop": "knows"}, "Nobody ")):
            body = completion_body("secret", stream=True, stream_options={"include_usage": True}, **fields)
            lines = client.post("/v1/completions", json=body).text.split("\n\n")
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == text
            assert chunks[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_chat_counts_drafts_too(drafting: LocalServer) -> None:
    with drafting.client() as client:
        messages = [{"role": "user", "content": "a secret"}]
        usage = client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0}).json()["usage"]
        assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0

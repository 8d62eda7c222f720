"""POST /v1/embeddings: the openai client, every form of input, and errors."""

import base64
import json
import math
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.server.conftest import Running

MODEL = "smollm2-135m-instruct"
FRANCE = "The capital of France is"
FRANCE_IDS = [504, 3575, 282, 4649, 314]
TEXTS = ["A cat sat on the mat.", "Kittens sleep on rugs.", "Interest rates rose by a quarter point. 📈"]


def embed(http: httpx.Client, **body: object) -> dict[str, Any]:
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def vectors(answer: dict[str, Any]) -> np.ndarray:
    return np.array([each["embedding"] for each in answer["data"]], dtype=np.float32)


def test_the_openai_client_and_plain_http_agree(client: openai.OpenAI, http: httpx.Client) -> None:
    """The client requests base64 by default."""
    response = client.embeddings.create(model=MODEL, input=TEXTS)
    assert [each.index for each in response.data] == [0, 1, 2] and response.model == MODEL
    assert response.usage.prompt_tokens == response.usage.total_tokens > 0
    plain = vectors(embed(http, input=TEXTS))
    np.testing.assert_allclose(np.array([each.embedding for each in response.data]), plain, atol=2e-3)
    assert np.linalg.norm(plain, axis=1) == pytest.approx([1.0] * 3, abs=1e-5)


def test_base64_holds_the_same_values(server: Running, http: httpx.Client) -> None:
    """One text alone in the engine: its numbers do not depend on the batch."""
    plain = embed(http, input=TEXTS[0], encoding_format="float")["data"][0]["embedding"]
    packed = embed(http, input=TEXTS[0], encoding_format="base64")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), dtype="<f4").tolist() == plain


def test_the_four_kinds_of_input_agree(http: httpx.Client) -> None:
    for kind in (FRANCE, [FRANCE], FRANCE_IDS, [FRANCE_IDS]):
        answer = embed(http, input=kind)
        assert answer["object"] == "list" and answer["data"][0]["object"] == "embedding"
        assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
        np.testing.assert_allclose(vectors(answer), vectors(embed(http, input=FRANCE)), atol=1e-6)


def test_many_inputs_keep_their_order(http: httpx.Client) -> None:
    words = [f"{number} sheep" for number in range(36)]  # more than are with the engine at once
    together = embed(http, input=words)
    assert [each["index"] for each in together["data"]] == list(range(36))
    found = vectors(together)
    for place in (0, 17, 35):
        alone = vectors(embed(http, input=words[place]))[0]
        assert int(np.argmax(found @ alone)) == place


def test_fewer_dimensions_are_the_first_ones_normalized(http: httpx.Client) -> None:
    whole = vectors(embed(http, input=FRANCE))[0]
    short = vectors(embed(http, input=FRANCE, dimensions=64))[0]
    assert len(short) == 64 and math.isclose(float(np.linalg.norm(short)), 1.0, abs_tol=1e-5)
    np.testing.assert_allclose(short, whole[:64] / np.linalg.norm(whole[:64]), atol=1e-6)


def test_a_cached_prompt_gives_the_same_vector(http: httpx.Client) -> None:
    text = "Once upon a time there was a village by the sea. " * 8
    before = vectors(embed(http, input=text))
    http.post("/v1/completions", json={"prompt": text, "max_tokens": 2})
    np.testing.assert_allclose(vectors(embed(http, input=text)), before, atol=1e-6)


def test_a_long_input_may_be_truncated(http: httpx.Client) -> None:
    answer = embed(http, input="word " * 3000, truncate_prompt_tokens=100)
    assert answer["usage"]["prompt_tokens"] == 100


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": ["a", ""]}, 400, "input"),
        ({"input": [[]]}, 400, "input"),
        ({"input": ["a", 5]}, 400, "input"),
        ({"input": [1, -1]}, 400, "input"),
        ({"input": [10**9]}, 400, "input"),
        ({"input": 7}, 400, "input"),
        ({"input": ["x"] * 2049}, 400, "input"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions"),
        ({"input": "a", "dimensions": 100_000}, 400, "dimensions"),
        ({"input": "a", "priority": 1000}, 400, "priority"),
        ({"input": "a", "model": "gpt-5"}, 404, "model"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)
def test_errors_name_the_field(http: httpx.Client, body: dict[str, object], status: int, param: str) -> None:
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


def test_an_input_beyond_the_context_is_refused(http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"input": ["fine", "word " * 3000]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_an_input_may_fill_the_context(http: httpx.Client) -> None:
    ids = [5 + place % 1000 for place in range(1025)]
    assert embed(http, input=ids[:1024])["usage"]["prompt_tokens"] == 1024
    answer = http.post("/v1/embeddings", json={"input": ids})
    assert "1025 in the messages, 0 in the completion" in answer.json()["error"]["message"]
    cut = embed(http, input=ids, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 1024
    np.testing.assert_allclose(vectors(cut), vectors(embed(http, input=ids[1:])), atol=1e-6)


def test_embeddings_are_counted_as_requests_and_not_as_tokens(http: httpx.Client) -> None:
    def counted(name: str) -> float:
        page = http.get("/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in page if line.startswith(name))

    generated = counted("quire_generation_tokens_total")
    ended = counted('quire_request_success_total{finished_reason="stop"}')
    embed(http, input=TEXTS)
    assert counted("quire_generation_tokens_total") == generated
    assert counted('quire_request_success_total{finished_reason="stop"}') == ended + 3

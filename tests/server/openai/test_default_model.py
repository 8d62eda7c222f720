"""The default model as it is served: what it says makes sense, and it ends by itself.

Everything else is tested with fewer layers (conftest.py).
"""

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.server.conftest import SMALL
from tests.server.server_process import serving

pytestmark = pytest.mark.long  # 17 CPU seconds; README and `quire run` show the whole model in every run
FRANCE = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
TEXTS = ["A cat sat on the mat.", "Kittens sleep on rugs.", "Interest rates rose by a quarter point. 📈"]


@pytest.fixture(scope="module")
def http(default_model_path: Path) -> Iterator[httpx.Client]:
    with serving(*SMALL) as server, server.client() as client:
        yield client


def test_a_completion_knows_its_capitals(http: httpx.Client) -> None:
    body = {"prompt": FRANCE, "temperature": 0, "max_tokens": 4, "logprobs": 2}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" Paris.\n\n", "length")
    assert choice["logprobs"]["tokens"] == [" Paris", ".", "\n", "\n"]
    assert choice["logprobs"]["text_offset"] == [0, 6, 7, 8]


def test_a_chat_ends_by_itself(http: httpx.Client) -> None:
    body = {"messages": QUESTION, "temperature": 0}
    [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert "Paris" in choice["message"]["content"] and choice["finish_reason"] == "stop"


def test_embeddings_of_similar_texts_are_near(http: httpx.Client) -> None:
    data = http.post("/v1/embeddings", json={"input": TEXTS}).json()["data"]
    cat, kittens, rates = (np.array(each["embedding"]) for each in data)
    assert cat @ kittens > cat @ rates, "cats are closer to kittens than to interest rates"

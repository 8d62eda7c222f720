"""A scripted model has no limit on positions: agents with long prompts are tested on any context length."""

from pathlib import Path

import httpx

from tests.clients.client_server import scripted


def test_a_script_goes_beyond_its_models_context(tmp_path: Path, default_model_path: Path) -> None:
    with scripted(tmp_path, [{"say": "hi"}], "--max-model-len", "32k") as url:
        (model,) = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
        body = {"prompt": "word " * 20_000, "max_tokens": 1}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert model["max_model_len"] == 32768
    assert response.status_code == 200 and response.json()["usage"]["prompt_tokens"] > 8192

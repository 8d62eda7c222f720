"""A scripted model has no limit on positions: agents with long prompts are tested on any context length."""

from pathlib import Path

from tests.server.local_server import local_server


def test_a_script_goes_beyond_its_models_context(tmp_path: Path, default_model_path: Path) -> None:
    with local_server(tmp_path, [{"say": "hi"}], "--max-model-len", "32k") as server, server.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        response = client.post("/v1/completions", json={"prompt": "word " * 20_000, "max_tokens": 1})
    assert model["max_model_len"] == 32768
    assert response.status_code == 200 and response.json()["usage"]["prompt_tokens"] > 8192

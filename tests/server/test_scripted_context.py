"""A scripted model has no limit on positions: agents with long prompts are tested on any context length."""

from pathlib import Path

from tests.server.server_process import serving


def test_a_script_goes_beyond_its_models_context(tmp_path: Path, default_model_path: Path) -> None:
    """By the command, which opens the model before the engine does."""
    script = tmp_path / "script.jsonl"
    script.write_text('{"say": "hi"}')
    flags = ("--script", str(script), "--max-model-len", "32k", "--kv-cache-memory", "3GiB")
    with serving(*flags) as server, server.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        response = client.post("/v1/completions", json={"prompt": "word " * 20_000, "max_tokens": 1})
    assert model["max_model_len"] == 32768
    assert response.status_code == 200 and response.json()["usage"]["prompt_tokens"] > 8192

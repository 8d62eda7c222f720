"""Every request of docs/apis.md works."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.api_server import scripted_server

PAGE = (Path(__file__).parents[2] / "docs" / "apis.md").read_text()
COMMANDS = re.findall(r"^curl .*$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def url(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_server(tmp_path_factory.mktemp("page")) as url:
        yield url


def test_each_endpoint_has_an_example() -> None:
    paths = {re.sub(r"https?://[^/]*", "", word) for command in COMMANDS for word in command.split() if "://" in word}
    assert paths >= {
        "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show", "/api/tags", "/api/ps",
        "/completion", "/props", "/slots",
        "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/", "/generate", "/generate_stream", "/info",
    }  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_each_example_works(http: httpx.Client, command: str) -> None:
    words = shlex.split(command)
    path = next(word for word in words if "://" in word).removeprefix("http://127.0.0.1:8000")
    headers = dict(words[place + 1].split(": ") for place, word in enumerate(words) if word == "-H")
    body = words[words.index("-d") + 1] if "-d" in words else None
    response = http.request("GET" if body is None else "POST", path, content=body, headers=headers)
    assert response.status_code == 200, response.text
    streamed = response.headers["content-type"].startswith(("text/event-stream", "application/x-ndjson"))
    assert streamed == ("-sN" in words)

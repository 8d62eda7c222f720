"""A scripted server as a user starts it, with any chat template."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import openai

from quire.catalog.names import DEFAULT_MODEL
from tests.server.local_server import local_server

MODEL = DEFAULT_MODEL.name


@contextmanager
def speaking(
    folder: Path, lines: Sequence[Mapping[str, object]], template: str | None = None, *options: str
) -> Iterator[tuple[openai.OpenAI, str]]:
    """A client of the server, and what the server said of chats at its start."""
    if template is not None:
        (folder / "template.jinja").write_text(template, encoding="utf-8")
        options = ("--chat-template", str(folder / "template.jinja"), *options)
    with (
        local_server(folder, lines, *options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client, server.chat_support

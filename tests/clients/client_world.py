"""The server that clients are tried on: it says what scripts/cases.py expects, in the format of a model with tools."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.clients.client_server import SMALL, scripted

FOLDER = Path(__file__).parent
KEY = "sk-client"
MODEL = "quire/scripted"
PERSON = {"name": "Ada", "age": 36}

# The first line whose text is in the prompt is said.
LINES: tuple[dict[str, object], ...] = (
    {"when": "<tool_response>", "say": "It is 21 degrees in Paris."},
    {
        "when": "What is the weather",
        "say": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    },
    {
        "when": "Hand Ada to the tool.",
        "say": f'<tool_call>\n{{"name": "Person", "arguments": {json.dumps(PERSON)}}}\n</tool_call>',
    },
    {"when": "How old is Ada?", "say": json.dumps(PERSON)},
    {"when": "Who is she?", "say": json.dumps(PERSON)},  # as docs/clients/instructor.md asks
    {"say": "Hello! Grüße, 你好, 🙂👩‍🚀."},
)


@contextmanager
def world(folder: Path) -> Iterator[str]:
    keys = folder / "keys"
    keys.write_text(f"{KEY} name=client\n")
    flags = ("--api-key-file", str(keys), "--chat-template", str(FOLDER / "tools.jinja"), "--served-model-name", MODEL)
    with scripted(folder, LINES, *SMALL, *flags) as url:
        yield url

"""Runs what a page shows, as a user would."""

import shlex
from contextlib import redirect_stdout
from io import StringIO

import httpx

SHOWN_ADDRESS = "http://127.0.0.1:8000"


def output_of(code: str) -> str:
    """What it prints, run in this process: torch is imported once for all tests."""
    with redirect_stdout(StringIO()) as output:
        exec(compile(code, "page", "exec"), {"__name__": "__main__"})
    return output.getvalue()


def answer_to(curl: str, address: str) -> httpx.Response:
    """The answer to a curl command with a JSON body, from a server at another address than the one it shows."""
    words = shlex.split(curl)
    url = next(word for word in words if word.startswith(SHOWN_ADDRESS)).replace(SHOWN_ADDRESS, address)
    headers = dict(words[place + 1].split(": ") for place, word in enumerate(words) if word == "-H")
    return httpx.post(url, content=words[words.index("-d") + 1], headers=headers, timeout=60)

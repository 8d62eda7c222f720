"""Many cheap, mixed requests over connections that are kept: what the front process holds after each round.

`python -m tests.chaos.memory_growth 200000` prints a line per 10,000 requests.
"""

import itertools
import json
import socket
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.server.scripted_servers import completion_body, scripted
from tests.server.server_process import Running

ROUND = 10_000
_NUM_CLIENTS = 16

Sent = tuple[str, str, dict[str, Any] | None]


def mixed(number: int) -> Sent:
    """Answers, streams, refusals and pages, in turn. Half of the prompts are new."""
    text = f"hi {number}" if number % 2 else "hi"
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    return (
        ("POST", "/v1/completions", completion_body(text, max_tokens=1)),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/chat/completions", {**chat, "stream": True}),
        ("POST", "/v1/completions", completion_body(text, max_tokens=-1)),
        ("POST", "/tokenize", {"prompt": text}),
        ("GET", f"/nothing/{number}", None),
        ("GET", "/v1/models", None),
    )[number % 7]


def exchange(port: int, numbers: Iterator[int], count: int) -> None:
    """One client: each request is sent when the response to the one before it was read."""
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rb") as reader:
        for number in itertools.islice(numbers, count):
            method, path, fields = mixed(number)
            body = b"" if fields is None else json.dumps(fields).encode()
            head = f"{method} {path} HTTP/1.1\r\nhost: localhost:{port}\r\ncontent-type: application/json\r\n"
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            status = int(reader.readline().split()[1])
            assert status in (200, 400, 404), status
            headers = dict(line.lower().split(b": ", 1) for line in iter(reader.readline, b"\r\n"))
            if b"content-length" in headers:
                reader.read(int(headers[b"content-length"]))
                continue
            while size := int(reader.readline(), 16):
                reader.read(size + 2)
            reader.readline()


def rounds(server: Running, num_rounds: int) -> Iterator[int]:
    """RssAnon in bytes after each round."""
    numbers = iter(range(num_rounds * ROUND))
    for _ in range(num_rounds):
        with ThreadPoolExecutor(_NUM_CLIENTS) as clients:
            for done in [
                clients.submit(exchange, server.port, numbers, ROUND // _NUM_CLIENTS) for _ in range(_NUM_CLIENTS)
            ]:
                done.result()
        yield server.resident_bytes


def main(num_requests: int) -> None:
    with tempfile.TemporaryDirectory() as folder, scripted(Path(folder), step_ms=0) as server:
        for number, held in enumerate(rounds(server, num_requests // ROUND), 1):
            print(f"{number * ROUND:>9,} requests   {held >> 10:>9,} KiB", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""`python -m quire.bench.stream_client`: many HTTP streams at once, with as little client work as asyncio allows.

Nothing is parsed while a response arrives: bytes are kept, and parsed after the last stream has ended.
"""

import asyncio
import json
import re
import time
from typing import Any

from quire.bench.serving import serve_stdin
from quire.core.errors import EngineFailed

_READ_BYTES = 1 << 16
_TOKENS = re.compile(rb'"completion_tokens":(\d+)')


def handle(request: Any) -> dict[str, object]:
    """`{"host", "port", "prompts", "num_output"}`: all prompts at once, one connection each, to the last byte."""
    requests = [_request(prompt, request["num_output"]) for prompt in request["prompts"]]
    started_s = time.perf_counter()
    responses = asyncio.run(_send_all(request["host"], request["port"], requests))
    seconds = time.perf_counter() - started_s
    num_chunks = sum(response.count(b"data: ") - 1 for response in responses)
    return {"seconds": seconds, "tokens": sum(map(_num_tokens, responses)), "chunks": num_chunks}


def _request(prompt: str, num_output: int) -> bytes:
    body = {
        "prompt": prompt,
        "max_tokens": num_output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def _send_all(host: str, port: int, requests: list[bytes]) -> list[bytes]:
    return await asyncio.gather(*(_send(host, port, request) for request in requests))


async def _send(host: str, port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    received = bytearray()
    while piece := await reader.read(_READ_BYTES):
        received += piece
    writer.close()
    return bytes(received)


def _num_tokens(response: bytes) -> int:
    """The usage that the server sends at the end of a stream."""
    found = _TOKENS.search(response)
    if found is None or b"data: [DONE]" not in response:
        raise EngineFailed(f"The server did not complete a stream; it sent {response[:600]!r}.")
    return int(found[1])


if __name__ == "__main__":
    serve_stdin(handle)

"""`python -m quire.bench.stream_client`: many streams over HTTP, read by as little code as asyncio allows.

Nothing is parsed while an answer comes: bytes are kept, and read when the last stream has ended.
"""

import asyncio
import json
import re
import time
from typing import Any

from quire.bench.serving import answer_all
from quire.core.errors import EngineFailed

_READ_BYTES = 1 << 16
_TOKENS = re.compile(rb'"completion_tokens":(\d+)')


def answer(question: Any) -> dict[str, object]:
    """`{"host", "port", "prompts", "num_output"}`: all prompts at once, a connection each, to the last byte."""
    requests = [_request(prompt, question["num_output"]) for prompt in question["prompts"]]
    began_s = time.perf_counter()
    answers = asyncio.run(_ask_all(question["host"], question["port"], requests))
    seconds = time.perf_counter() - began_s
    return {"seconds": seconds, "tokens": sum(map(_num_tokens, answers)), "chunks": sum(map(_num_chunks, answers))}


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


async def _ask_all(host: str, port: int, requests: list[bytes]) -> list[bytes]:
    return await asyncio.gather(*(_ask(host, port, request) for request in requests))


async def _ask(host: str, port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    heard = bytearray()
    while piece := await reader.read(_READ_BYTES):
        heard += piece
    writer.close()
    return bytes(heard)


def _num_tokens(answer: bytes) -> int:
    """As the server counts them at the end of a stream."""
    found = _TOKENS.search(answer)
    if found is None or b"data: [DONE]" not in answer:
        raise EngineFailed(f"The server did not answer a stream to its end; it said {answer[:600]!r}.")
    return int(found[1])


def _num_chunks(answer: bytes) -> int:
    return answer.count(b"data: ") - 1


if __name__ == "__main__":
    answer_all(answer)

"""Open-loop HTTP load on an OpenAI-style server: each request is sent at its time, whatever became of the others.

Prompts are token ids, outputs have forced lengths. Only asyncio is needed. Nothing is parsed while responses arrive:
each piece of bytes is kept with its time, and parsed after the last stream has ended.
`python -m quire.bench.load_client` is the client process of `quire bench overhead`.
"""

import asyncio
import json
import re
import resource
import ssl
import time
import urllib.error
import urllib.request
from bisect import bisect_right
from collections.abc import Sequence as Many
from http.client import HTTPException
from itertools import accumulate
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from quire.bench.service_levels import ServedRequest, TokenArrival
from quire.bench.serving import serve_stdin
from quire.core.errors import ConfigError, EngineFailed
from quire.core.process import gc_undisturbed
from quire.workload.traces import TraceRow, prompt_of

_WARM_UP = TraceRow(0.0, 64, 8)
_WARM_UP_SEED = 1_000_003
_LAST_CHUNK = b"0\r\n\r\n"
_HEAD_END = b"\r\n\r\n"
_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
_CACHED = re.compile(rb'"cached_tokens": ?(\d+)')
_NO_CHOICE = re.compile(rb'"choices": ?\[\]')
_ASK_S = 10.0  # for the list of models


class TargetServer(NamedTuple):
    """Where requests go."""

    host: str
    port: int
    path: str
    tls: bool
    model: str | None = None
    api_key: str | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}{self.path}"


def endpoint(url: str, model: str | None, api_key: str | None) -> TargetServer:
    """The completions endpoint of a server. Without a model, the first that the server lists."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is not an address: {error}.", param="url") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not an address such as http://127.0.0.1:8000.", param="url")
    tls = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/completions"
    found = TargetServer(parts.hostname, port or (443 if tls else 80), path, tls, model, api_key)
    return found if model is not None else found._replace(model=_first_model(found))


def _first_model(server: TargetServer) -> str:
    url = server.url.removesuffix("completions") + "models"
    headers = {} if server.api_key is None else {"Authorization": f"Bearer {server.api_key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_ASK_S) as answer:
            return str(json.loads(answer.read())["data"][0]["id"])
    except urllib.error.HTTPError as error:
        hint = " Give its key with --api-key-file." if error.code in (401, 403) else ""
        raise ConfigError(f"{url} answered {error.code}.{hint}", param="url") from None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        reason = getattr(reason, "strerror", None) or reason
        raise ConfigError(f"No server answers at {url}: {reason}.", param="url") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise ConfigError(f"{url} lists no model. Name one with --model.", param="url") from None


class LoadSettings(NamedTuple):
    """How a load is sent."""

    vocab_size: int
    seed: int = 0
    num_warm_up: int = 8  # short requests before the first, all at once
    patience_s: float = 600.0  # after the last request was sent


def send_load(rows: Many[TraceRow], server: TargetServer, settings: LoadSettings) -> list[ServedRequest]:
    """Send each request at its time; one record for each, in order."""
    requests = [
        _completion(server, prompt_of(row, number, settings.vocab_size, settings.seed).tolist(), row.num_output)
        for number, row in enumerate(rows)
    ]
    others = settings.seed + _WARM_UP_SEED
    warm_up = [
        _completion(server, prompt_of(_WARM_UP, number, settings.vocab_size, others).tolist(), _WARM_UP.num_output)
        for number in range(settings.num_warm_up)
    ]
    _allow_connections(len(rows))
    with gc_undisturbed():
        if warm_up:
            asyncio.run(_send_all(server, warm_up, [0.0] * len(warm_up), settings.patience_s))
        responses = asyncio.run(_send_all(server, requests, [row.arrived_s for row in rows], settings.patience_s))
    return [_record(number, row, response) for number, (row, response) in enumerate(zip(rows, responses, strict=True))]


def _allow_connections(count: int) -> None:
    """An overloaded server may hold every connection open at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 64
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _completion(server: TargetServer, prompt: list[int] | str, num_output: int, *, counted: bool = True) -> bytes:
    """`counted`: the server counts tokens on the way, which costs it time."""
    body: dict[str, object] = {
        "prompt": prompt,
        "max_tokens": num_output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, **({"continuous_usage_stats": True} if counted else {})},
    }
    if server.model is not None:
        body["model"] = server.model
    content = json.dumps(body, separators=(",", ":")).encode()
    key = "" if server.api_key is None else f"Authorization: Bearer {server.api_key}\r\n"
    head = (
        f"POST {server.path} HTTP/1.1\r\nHost: {server.host}:{server.port}\r\nConnection: close\r\n{key}"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class _Response(NamedTuple):
    """What came back, in pieces. Times are since the start of the load."""

    sent_s: float
    ended_s: float
    pieces: list[tuple[float, bytes]]
    error: str | None


class _Connection(asyncio.Protocol):
    """One request and its response."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = None
        self.pieces: list[tuple[float, bytes]] = []
        self.closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self.pieces.append((time.perf_counter(), data))
        if data.endswith(_LAST_CHUNK):
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(exc)


async def _send_all(
    server: TargetServer, requests: Many[bytes], times_s: Many[float], patience_s: float
) -> list[_Response]:
    started_s = time.perf_counter()
    context = ssl.create_default_context() if server.tls else None
    tasks = []
    for request, at_s in zip(requests, times_s, strict=True):
        if (ahead_s := at_s - (time.perf_counter() - started_s)) > 0:
            await asyncio.sleep(ahead_s)
        tasks.append(asyncio.create_task(_send(server, request, started_s, context, patience_s)))
    return await asyncio.gather(*tasks)


async def _send(
    server: TargetServer, request: bytes, started_s: float, context: ssl.SSLContext | None, patience_s: float
) -> _Response:
    sent_s = time.perf_counter()
    loop = asyncio.get_running_loop()
    pieces: list[tuple[float, bytes]] = []
    error: str | None = None
    transport: asyncio.BaseTransport | None = None
    try:
        transport, connection = await loop.create_connection(
            lambda: _Connection(request), server.host, server.port, ssl=context
        )
        pieces = connection.pieces
        lost = await asyncio.wait_for(connection.closed, patience_s)
        error = None if lost is None else f"the connection was lost: {lost}"
    except TimeoutError:
        error = f"not finished after {patience_s:g} s"
    except OSError as failed:
        error = f"no connection: {failed.strerror or failed}"
    finally:
        if transport is not None:
            transport.close()
    ended_s = time.perf_counter() - started_s
    return _Response(sent_s - started_s, ended_s, [(at_s - started_s, data) for at_s, data in pieces], error)


# Parsing, after the load.


def _record(number: int, row: TraceRow, response: _Response) -> ServedRequest:
    record = ServedRequest(number, row.arrived_s, response.sent_s, row.num_prompt, row.num_output)
    content = b"".join(data for _, data in response.pieces)
    head, _, _ = content.partition(_HEAD_END)
    status = int(head[9:12]) if head.startswith(b"HTTP/1.") and head[9:12].isdigit() else 0
    if response.error is not None or status != 200:
        words = content[len(head) :].decode(errors="replace").split()
        error = response.error or f"status {status}: {' '.join(words)[:200]}"
        return record._replace(ended_s=response.ended_s, error=error)
    chunked = b"transfer-encoding: chunked" in head.lower()
    try:
        stream = _stream(content, len(head) + len(_HEAD_END), chunked=chunked)
    except ValueError:
        return record._replace(ended_s=response.ended_s, error="the chunked encoding of the response is damaged")
    return _read_events(record._replace(ended_s=response.ended_s), response, stream)


class _Stream(NamedTuple):
    """The body of a response, without its transfer encoding."""

    body: bytes
    starts: list[int]  # of each chunk in the body
    raw_starts: list[int]  # of the same in the bytes that came

    def raw_position(self, position: int) -> int:
        chunk = bisect_right(self.starts, position) - 1
        return self.raw_starts[chunk] + position - self.starts[chunk]


def _stream(content: bytes, start: int, *, chunked: bool) -> _Stream:
    if not chunked:
        return _Stream(content[start:], [0], [start])
    parts, starts, raw_starts, length = [], [0], [start], 0
    while (line_end := content.find(b"\r\n", start)) >= 0:
        size = int(content[start:line_end].partition(b";")[0] or b"0", 16)
        if size == 0:
            break
        begin = line_end + 2
        parts.append(content[begin : begin + size])
        starts.append(length)
        raw_starts.append(begin)
        length += size
        start = begin + size + 2
    return _Stream(b"".join(parts), starts, raw_starts)


def _read_events(record: ServedRequest, response: _Response, stream: _Stream) -> ServedRequest:
    """The tokens of a stream with the times of the pieces in which their events ended."""
    ends = list(accumulate(len(data) for _, data in response.pieces))
    arrivals: list[TokenArrival] = []
    num_tokens, cached, done, position = 0, None, False, 0
    while not done and (position := stream.body.find(b"data:", position)) >= 0:
        stop = stream.body.find(b"\n", position)
        stop = len(stream.body) if stop < 0 else stop
        event, position = stream.body[position + 5 : stop].strip(), stop
        if event.startswith(b'{"error"'):
            return record._replace(arrivals=tuple(arrivals), error=event.decode(errors="replace")[:200])
        done = event == b"[DONE]"
        total, hit = _TOKENS.search(event), _CACHED.search(event)
        cached = cached if hit is None else int(hit[1])
        last = _NO_CHOICE.search(event) is not None  # the usage at the end
        count = (int(total[1]) if total is not None else num_tokens + (not last and not done)) - num_tokens
        if count <= 0:
            continue
        num_tokens += count
        if last and arrivals:  # a server that does not count on the way: its last event held the rest
            arrivals[-1] = TokenArrival(arrivals[-1].at_s, arrivals[-1].num_tokens + count)
        else:
            piece = bisect_right(ends, stream.raw_position(stop - 1))
            arrivals.append(TokenArrival(response.pieces[piece][0], count))
    error = None if done else "the stream ended without [DONE]"
    return record._replace(arrivals=tuple(arrivals), num_cached=cached, error=error)


# The client process of `quire bench overhead`: all prompts at once, one connection each, to the last byte.


def handle(request: Any) -> dict[str, object]:
    """`{"host", "port", "prompts", "num_output"}`."""
    server = TargetServer(request["host"], request["port"], "/v1/completions", tls=False)
    requests = [_completion(server, prompt, request["num_output"], counted=False) for prompt in request["prompts"]]
    started_s = time.perf_counter()
    responses = asyncio.run(_send_all(server, requests, [0.0] * len(requests), LoadSettings(1).patience_s))
    seconds = time.perf_counter() - started_s
    row = TraceRow(0.0, 1, request["num_output"])
    records = [_record(number, row, response) for number, response in enumerate(responses)]
    for record in records:
        if record.error is not None:
            raise EngineFailed(f"The server did not complete a stream: {record.error}.")
    return {"seconds": seconds, "tokens": sum(record.num_received for record in records)}


if __name__ == "__main__":
    serve_stdin(handle)

"""Many concurrent clients over bare sockets on one event loop: each sends one request and reads its response."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Mapping
from typing import NamedTuple


class RawResponse(NamedTuple):
    """All that one client received until the connection closed."""

    status: int  # 0 if nothing came
    head: bytes
    body: bytes
    seconds: float  # from the first byte sent to the last heard

    @property
    def complete(self) -> bool:
        """Whether the response ended as a whole."""
        return b"[DONE]" in self.body or b'"finish_reason":"' in self.body

    @property
    def failed(self) -> bool:
        """Whether the response ended with an error."""
        return b'"error":' in self.body

    @property
    def retry_after_s(self) -> int | None:
        found = re.search(rb"\r\nretry-after: (\d+)\r\n", self.head)
        return None if found is None else int(found[1])


def request(
    body: Mapping[str, object] | bytes, path: str = "/v1/completions", headers: Mapping[str, str] | None = None
) -> bytes:
    """The bytes of a request with `Connection: close`."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: here", "Connection: close", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(content)}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    return "\r\n".join([*lines, "", ""]).encode() + content


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.received = bytearray()
        self.began_s = time.monotonic()

    @classmethod
    async def connect(cls, port: int, sent: bytes) -> "RawClient":
        raw_client = cls(*await asyncio.open_connection("127.0.0.1", port))
        raw_client._writer.write(sent)
        with contextlib.suppress(ConnectionError):  # refused before all was sent: the response may be there
            await raw_client._writer.drain()
        return raw_client

    async def receive_until(self, words: bytes) -> None:
        """Read until these bytes came."""
        while words not in self.received:
            piece = await self._reader.read(1 << 16)
            assert piece, f"closed before {words!r}: {bytes(self.received)!r}"
            self.received += piece

    async def receive_some(self) -> None:
        """The next bytes; empty if the connection was closed."""
        self.received += await self._reader.read(1 << 16)

    def end(self) -> None:
        """Close the sending side."""
        self._writer.write_eof()

    async def receive_all(self) -> RawResponse:
        try:
            while piece := await self._reader.read(1 << 16):
                self.received += piece
        except ConnectionError:
            pass
        seconds = time.monotonic() - self.began_s
        self.disconnect()
        head, _, body = bytes(self.received).partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/1.1 ") else 0
        return RawResponse(status, head.lower() + b"\r\n", body, seconds)

    def disconnect(self) -> None:
        """Reset the connection."""
        self._writer.transport.abort()


async def fetch(port: int, sent: bytes) -> RawResponse:
    return await (await RawClient.connect(port, sent)).receive_all()


async def fetch_all(port: int, sent: list[bytes], at_once: int = 10**6) -> list[RawResponse]:
    """The responses in order, with so many requests at once."""
    starts = asyncio.Semaphore(at_once)

    async def one(each: bytes) -> RawResponse:
        async with starts:
            return await fetch(port, each)

    return list(await asyncio.gather(*map(one, sent)))

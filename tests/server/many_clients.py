"""Many clients at once, over bare sockets on one event loop: each says one request and hears what it is told."""

import asyncio
import json
import re
import time
from collections.abc import Mapping
from typing import NamedTuple


class Told(NamedTuple):
    """All that one client heard until the connection closed."""

    status: int  # 0 if nothing came
    head: bytes
    body: bytes
    seconds: float  # from the first byte sent to the last heard

    @property
    def complete(self) -> bool:
        """It was told that this is the whole answer."""
        return b"[DONE]" in self.body or b'"finish_reason":"' in self.body

    @property
    def failed(self) -> bool:
        """It was told that it is not."""
        return b'"error":' in self.body

    @property
    def retry_after_s(self) -> int | None:
        found = re.search(rb"\r\nretry-after: (\d+)\r\n", self.head)
        return None if found is None else int(found[1])


def request(
    body: Mapping[str, object] | bytes, path: str = "/v1/completions", headers: Mapping[str, str] | None = None
) -> bytes:
    """The bytes of a request after which the connection is closed."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: here", "Connection: close", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(content)}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    return "\r\n".join([*lines, "", ""]).encode() + content


class Visitor:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.heard = bytearray()
        self.began_s = time.monotonic()

    @classmethod
    async def ask(cls, port: int, said: bytes) -> "Visitor":
        visitor = cls(*await asyncio.open_connection("127.0.0.1", port))
        visitor._writer.write(said)
        await visitor._writer.drain()
        return visitor

    async def hear(self, words: bytes) -> None:
        """Until these came."""
        while words not in self.heard:
            piece = await self._reader.read(1 << 16)
            assert piece, f"closed before {words!r}: {bytes(self.heard)!r}"
            self.heard += piece

    async def hear_some(self) -> None:
        """Whatever comes next; nothing, if the connection was closed."""
        self.heard += await self._reader.read(1 << 16)

    def end(self) -> None:
        """Nothing more will be said."""
        self._writer.write_eof()

    async def hear_all(self) -> Told:
        try:
            while piece := await self._reader.read(1 << 16):
                self.heard += piece
        except ConnectionError:
            pass
        seconds = time.monotonic() - self.began_s
        self.leave()
        head, _, body = bytes(self.heard).partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/1.1 ") else 0
        return Told(status, head.lower() + b"\r\n", body, seconds)

    def leave(self) -> None:
        """Without a word."""
        self._writer.transport.abort()


async def tell(port: int, said: bytes) -> Told:
    return await (await Visitor.ask(port, said)).hear_all()


async def tell_all(port: int, said: list[bytes], at_once: int = 10**6) -> list[Told]:
    """One answer for each, in their order; so many ask at once."""
    starts = asyncio.Semaphore(at_once)

    async def one(each: bytes) -> Told:
        async with starts:
            return await tell(port, each)

    return list(await asyncio.gather(*map(one, said)))

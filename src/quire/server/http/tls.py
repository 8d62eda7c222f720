"""TLS handshakes, bounded in number and time. Does not depend on HTTP.

With `ssl=` an event loop tells a protocol of a connection when its handshake is complete. Connections that never
complete one then count nowhere, and took all files of the process for a minute. So a listener accepts plain
connections, and each is upgraded here; the protocol behind gets it afterwards.
"""

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import cast

from quire.server.http.auth import network_of


class EarlyInput(asyncio.Protocol):
    """Keeps what a client sends with the end of its handshake, until the protocol behind is attached."""

    def __init__(self) -> None:
        self._data = b""
        self._at_end = False

    def data_received(self, data: bytes) -> None:
        self._data += data

    def eof_received(self) -> None:
        self._at_end = True

    def attach(self, behind: asyncio.Protocol, transport: asyncio.Transport) -> None:
        behind.connection_made(transport)
        transport.set_protocol(behind)
        if self._data:
            behind.data_received(self._data)
        if self._at_end:
            behind.eof_received()


class TlsHandshakes:
    """The handshakes of one server that are not complete."""

    def __init__(self, context: ssl.SSLContext, *, limit: int, timeout_s: float) -> None:
        self.context = context
        self.timeout_s = timeout_s
        self._limit = limit
        self._open: dict[TlsHandshake, None] = {}  # the oldest first
        self._networks: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, handshake: "TlsHandshake") -> None:
        """A new one begins. Above the limit, that of the network which has most is dropped that is oldest: one under
        way takes milliseconds, and one that stands still is old."""
        self._open[handshake] = None
        self._networks[handshake.network] += 1
        while len(self._open) > self._limit:
            [(network, _)] = self._networks.most_common(1)
            oldest = next(each for each in self._open if each.network == network)
            self.remove(oldest)
            oldest.drop()

    def remove(self, handshake: "TlsHandshake") -> None:
        """It is complete, has failed, or was dropped; it may be removed twice."""
        if handshake in self._open:
            del self._open[handshake]
            self._networks[handshake.network] -= 1
            if not self._networks[handshake.network]:
                del self._networks[handshake.network]


class TlsHandshake(asyncio.Protocol):
    """One connection until its handshake is complete."""

    def __init__(self, handshakes: TlsHandshakes, behind: Callable[[], asyncio.Protocol]) -> None:
        self._all = handshakes
        self._behind = behind
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._early = b""
        self.network = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        address = transport.get_extra_info("peername")
        self.network = network_of(str(address[0])) if address else ""
        self._all.add(self)
        self._task = asyncio.get_running_loop().create_task(self._shake_hands(self._transport))

    def data_received(self, data: bytes) -> None:
        """uvloop reads a connection before `start_tls` can take it over."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Before anything took its place."""
        self._all.remove(self)
        if self._task is not None:
            self._task.cancel()

    def drop(self) -> None:
        assert self._transport is not None
        self._transport.abort()

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        early, loop = EarlyInput(), asyncio.get_running_loop()

        async def upgrade() -> asyncio.Transport | None:
            timeout_s = self._all.timeout_s
            return await loop.start_tls(
                transport, early, self._all.context, server_side=True, ssl_handshake_timeout=timeout_s
            )

        try:
            upgrading = loop.create_task(upgrade())
            loop.call_soon(loop.call_soon, self._pass_on, transport)  # after what `start_tls` calls soon
            secured = await upgrading
        except Exception:  # no TLS, no common version, too slow, gone: whatever it was, the client knows
            transport.abort()
            return
        finally:
            self._all.remove(self)
        if secured is not None and not transport.is_closing():
            early.attach(self._behind(), secured)

    def _pass_on(self, transport: asyncio.Transport) -> None:
        """What was read too early, to the protocol that takes part in the handshake; it has not read anything yet."""
        protocol = transport.get_protocol()
        while self._early and protocol is not self and not transport.is_closing():
            shaking = cast(asyncio.BufferedProtocol, protocol)
            buffer = memoryview(shaking.get_buffer(len(self._early)))
            count = min(len(buffer), len(self._early))
            buffer[:count], self._early = self._early[:count], self._early[count:]
            shaking.buffer_updated(count)


def behind_tls(
    protocol: Callable[..., asyncio.Protocol], certificate: Path, key: Path | None, *, limit: int, timeout_s: float
) -> Callable[..., asyncio.Protocol]:
    """The same protocol with TLS before it, for uvicorn's `http=`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    handshakes = TlsHandshakes(context, limit=limit, timeout_s=timeout_s)

    def accept(**made_with: object) -> asyncio.Protocol:
        return TlsHandshake(handshakes, lambda: protocol(**made_with))

    return accept

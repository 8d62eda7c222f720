"""TLS handshakes that never end take a bounded part of the server, and nothing of other clients."""

import asyncio
import contextlib
import shutil
import ssl
from pathlib import Path
from typing import cast

import pytest
import uvloop

from quire.server.http.protocol import connection_limits
from quire.server.http.tls import EarlyInput, TlsHandshake, TlsHandshakes, behind_tls
from tests import children
from tests.server.http.test_access_served import CERTIFY

LIMIT = 4
TEXT = b"hello " * 10_000


class Echo(asyncio.Protocol):
    """Sends back what it gets; a stand-in for HTTP."""

    def __init__(self, made_with: str) -> None:
        self._made_with = made_with

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert self._made_with == "these arguments" and transport.get_extra_info("sslcontext") is not None
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    children.run([*CERTIFY, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


async def listening(files: tuple[Path, Path], timeout_s: float = 60.0) -> tuple[asyncio.Server, int]:
    accept = behind_tls(Echo, *files, limit=LIMIT, timeout_s=timeout_s)
    server = await asyncio.get_running_loop().create_server(lambda: accept(made_with="these arguments"), "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def echoed(port: int, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(TEXT)
    received = await reader.readexactly(len(TEXT))
    writer.transport.abort()
    return received


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_silent_handshakes_leave_room_for_others(files: tuple[Path, Path], make_loop: object) -> None:
    """Those above the limit are dropped, the oldest first; without a limit each was held for a minute."""

    async def attack() -> None:
        server, port = await listening(files)
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * LIMIT)]
        silent[-1][1].write(b"\x16\x03\x01")
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            assert await echoed(port, version) == TEXT
        for reader, _ in silent[: 2 * LIMIT]:
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        for _, writer in silent:
            writer.transport.abort()
        server.close()

    with asyncio.Runner(loop_factory=make_loop) as runner:  # type: ignore[arg-type]
        runner.run(attack())


def test_a_handshake_that_takes_too_long_or_is_none_ends(files: tuple[Path, Path]) -> None:
    async def attack() -> None:
        server, port = await listening(files, timeout_s=0.05)
        for sent in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            writer.transport.abort()
        server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(attack())


class Dropped(TlsHandshake):
    """Of a network; it notes that it was dropped."""

    def __init__(self, handshakes: TlsHandshakes, network: str) -> None:
        super().__init__(handshakes, lambda: Echo("these arguments"))
        self.network = network
        self.is_dropped = False

    def drop(self) -> None:
        self.is_dropped = True


def test_the_network_with_the_most_handshakes_loses_its_oldest() -> None:
    handshakes = TlsHandshakes(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), limit=LIMIT, timeout_s=1.0)
    made = [Dropped(handshakes, network) for network in ("b", "a", "a", "a", "a", "b", "b", "a")]
    for each in made:
        handshakes.add(each)
        assert len(handshakes) <= LIMIT
    left = [each for each in made if not each.is_dropped]
    assert sorted(each.network for each in left) == ["a", "a", "b", "b"]
    for each in (*left, *left[:1], *[each for each in left if each.network == "a"]):
        handshakes.remove(each)  # some twice
    assert len(handshakes) == 0
    more = [Dropped(handshakes, network) for network in ("b", "a", "a", "a", "b")]
    for each in more:
        handshakes.add(each)
    assert [each.is_dropped for each in more] == [False, True, False, False, False], "those removed twice count once"


class Attached(asyncio.Transport):
    """A transport that knows its protocol."""

    protocol: asyncio.BaseProtocol | None = None

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol


class Recorded(asyncio.Protocol):
    """What a connection told its protocol."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.told.append("made")

    def data_received(self, data: bytes) -> None:
        self.told.append(data)

    def eof_received(self) -> None:
        self.told.append("end")


@pytest.mark.parametrize("at_end", [False, True])
def test_what_comes_with_the_end_of_a_handshake_is_passed_on_in_order(at_end: bool) -> None:
    early, behind, transport = EarlyInput(), Recorded(), Attached()
    early.data_received(b"GET / HT")
    early.data_received(b"TP/1.1")
    if at_end:
        early.eof_received()
    early.attach(behind, transport)
    assert behind.told == ["made", b"GET / HTTP/1.1", *(["end"] if at_end else [])]
    assert transport.protocol is behind


@pytest.mark.parametrize("soft", [64, 1024, 4096, 20_000, -1])
def test_all_connections_together_leave_files_for_others(soft: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are turned away and handshakes are connections, too."""
    monkeypatch.setattr("resource.getrlimit", lambda which: (soft, soft))
    limits = connection_limits(1 << 20)
    together = limits.connections + limits.turned_away + limits.handshakes
    assert min(limits.connections, limits.turned_away, limits.handshakes) >= 1
    assert together <= (max(soft - 128, 8) if soft >= 0 else 1 << 20)
    assert limits.connections == (4096 if soft in (20_000, -1) else limits.connections)

"""HTTP/1.1 with limits: uvicorn's httptools protocol, with bounds on size and time that act while bytes arrive.

Against slow loris clients, a head must be complete within seconds and a body must keep a minimum rate. A connection has
one request at a time; malformed bytes get an error reply and a close. A request that the access checks refuse by its
head alone is answered here: no task is made and no body is kept. Otherwise the application gets the request when its
body is complete: a client that never sends it holds a connection and bytes of its own allowance, nothing else. The body
of an upload is not kept: the application reads it as it arrives. A client that does not read its response is cut off
(`slow_readers.py`). Does not depend on keys or routes.

HTTP/1.0 has no chunks: a response without a length is sent unframed, and the end of the connection ends it. uvicorn
would chunk it for every client.
"""

import asyncio
import itertools
import logging
import resource
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import cast

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from quire.core.errors import QuireError
from quire.server.http.auth import UNAUTHENTICATED, client_name, network_of
from quire.server.http.body_budget import BodyBudget, PendingBody
from quire.server.http.errors import BodyTooLarge, ErrorReply, InternalError, Stopping, log_failure, reply_to
from quire.server.http.middleware import RequestLogger, RequestObserver, response_headers
from quire.server.http.request_context import OTHER, RequestRecord, context_of, new_request_id
from quire.server.http.slow_readers import ReaderLimits, ReaderWatch, UnreadOutput


def unframed(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """The application, with its response in this cycle sent without chunks. The connection must close after it."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        measured = True

        async def send_unframed(message: Message) -> None:
            nonlocal measured
            if message["type"] == "http.response.start":
                measured = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not measured:
                    cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
            elif not measured and not message.get("more_body", False):
                cycle.expected_content_length = len(message.get("body", b""))  # the last piece
            await send(message)

        await app(scope, receive, send_unframed)

    return respond


_MAX_CONNECTIONS = 4096
_FILES_KEPT = 128  # descriptors for other uses than connections
_log = logging.getLogger(__name__)

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing drops unsent bytes
_WHOLE_BODIES = 4  # of the largest size, that all clients together may have at least


class MalformedHttp(QuireError):
    """Not an HTTP/1.1 request, or an ambiguous one (request smuggling)."""

    code = "malformed_http"


class HeadTooLarge(QuireError):
    """A request line and headers above the limits."""

    status = 431
    code = "headers_too_large"


class TooSlow(QuireError):
    """A request that was not complete in time (slow loris)."""

    status = 408
    code = "request_timeout"


class TooManyConnections(QuireError):
    """More connections than the limit."""

    status = 503
    code = "too_many_connections"
    retry_after_s = 1.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds on one connection, and on their number."""

    head_bytes: int = 16 << 10  # request line and headers; also the framing around a chunk
    headers: int = 64
    head_s: float = 10.0
    body_s: float = 30.0  # for a body; then received bytes extend the deadline, by at most as much again
    body_bytes_per_s: int = 64 << 10  # by this rate
    body_bytes: int = 16 << 20  # of one body
    body_pieces: int = 1 << 16  # chunks, or reads of the socket; each takes some microseconds, however short
    all_bodies_bytes: int = 256 << 20  # of all requests that are not answered yet
    client_bodies_bytes: int = 192 << 20  # of those of one client: what is left is for the others
    client_incomplete_bodies: int = 2048  # half of the connections
    linger_s: float = 2.0  # input after a refusal is discarded for so long: a reset would discard the reply
    linger_bytes: int = 16 << 20
    buffered_bytes: int = 16 << 10  # of a response, here and unsent in the kernel: then the application waits
    readers: ReaderLimits = field(default_factory=ReaderLimits)
    connections: int = _MAX_CONNECTIONS
    turned_away: int = 256  # connections above the limit that still get an error reply
    handshakes: int = 256  # of TLS, which are not complete


def _parser_error(error: httptools.HttpParserError) -> Exception:
    """What a failure of the parser means: malformed input, unless a callback failed for another reason."""
    cause = error.__context__
    if not isinstance(cause, Exception) or isinstance(cause, httptools.HttpParserError | UnicodeError):
        return MalformedHttp("This is not a valid HTTP/1.1 request.")
    return cause


class ConnectionPhase(Enum):
    """What a connection is waiting for."""

    HEAD = auto()
    BODY = auto()
    RESPONSE = auto()  # the request is complete; its response is under way
    LAST_RESPONSE = auto()  # the client sent bytes out of turn: input is ignored
    END = auto()  # the reply is sent; input is discarded
    TURNED_AWAY = auto()  # above the limit; its first bytes get an error reply


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Made by uvicorn; see `guarded` for how it gets its limits."""

    limits: ConnectionLimits
    observe: RequestObserver
    requests: RequestLogger
    replies_early: bool
    bodies: BodyBudget  # of all connections
    networks: Counter[str]  # connections by network
    numbers: Iterator[int]  # of connections, as they arrive: times of one iteration of the loop are equal
    unread: UnreadOutput  # of all connections
    slow_reader: Callable[[str], None]  # for metrics: why one was cut off

    _phase = ConnectionPhase.HEAD
    _network = ""
    _number = 0
    _timer: asyncio.Handle | None = None
    _num_head_bytes = 0
    _num_framing_bytes = 0  # since the last byte of a body
    _num_body_bytes = 0
    _num_body_pieces = 0
    _num_credited_bytes = 0  # of the body: those that have extended the deadline
    _num_discarded_bytes = 0
    _refusal: QuireError | None = None
    _early_reply: ErrorReply | None = None
    _pending: ASGI3Application | None = None  # gets the request when it is complete
    _body: PendingBody | None = None  # until the response is complete
    _streams = False  # the application reads the body as it arrives
    _reader: ReaderWatch

    # Called by the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=self.limits.buffered_bytes)
        transport.get_extra_info("socket").setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, self.limits.buffered_bytes
        )
        self._reader = ReaderWatch(self.unread, transport, self.call_later, self._cut_reader)
        self._network = "" if self.client is None else network_of(self.client[0])
        self._number = next(self.numbers)
        self.networks[self._network] += 1
        num_others = len(self.connections) - 1
        if num_others < self.limits.connections or self._make_room():
            self._await_head()
        elif num_others < self.limits.connections + self.limits.turned_away:
            self._enter(ConnectionPhase.TURNED_AWAY, self.limits.linger_s, self._close)
        else:
            transport.abort()

    def _make_room(self) -> bool:
        """Close the oldest connection without a request of the network that has the most, if that is another one."""
        network, most = max(self.networks.items(), key=lambda each: each[1])
        if most <= self.networks[self._network]:
            return False
        others = [cast(GuardedProtocol, each) for each in self.connections]
        unused = [each for each in others if each._network == network and each._is_unused]
        if unused:
            min(unused, key=lambda each: each._number)._close()
        return bool(unused)

    @property
    def _is_unused(self) -> bool:
        """It has no complete request, or its response is sent."""
        is_incomplete = self._phase in (ConnectionPhase.HEAD, ConnectionPhase.BODY)
        return is_incomplete or (self.cycle is not None and self.cycle.response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.networks[self._network] -= 1
        if not self.networks[self._network]:
            del self.networks[self._network]
        if self._pending is not None:
            self._pending = None
            self.requests.abandoned(cast(Scope, self.cycle.scope))
        self._forget_body()
        self._reader.close()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._phase is ConnectionPhase.LAST_RESPONSE:
            return
        if self._phase is ConnectionPhase.END:
            self._discard(len(data))
            return
        if self._phase is ConnectionPhase.TURNED_AWAY:
            self._refuse(TooManyConnections("This server has too many connections; try again soon."))
            return
        if self._phase is ConnectionPhase.RESPONSE and self.cycle.response_complete:
            self._await_head()
        rest = self._take_head(data) if self._phase is ConnectionPhase.HEAD else data
        if rest:
            self._take_rest(rest)

    def _take_head(self, data: bytes) -> bytes:
        """Feed at most the limit of a head; the rest belongs to the body, if there is one."""
        room = self.limits.head_bytes - self._num_head_bytes
        self._num_head_bytes += len(data[:room])
        self._feed(data[:room])
        if self._phase is ConnectionPhase.HEAD and self._num_head_bytes >= self.limits.head_bytes:
            self._refuse(HeadTooLarge(f"Request line and headers are larger than {self.limits.head_bytes} bytes."))
        return data[room:] if self._phase in (ConnectionPhase.BODY, ConnectionPhase.RESPONSE) else b""

    def _take_rest(self, data: bytes) -> None:
        self._num_framing_bytes += len(data)
        self._feed(data)
        if self._phase is not ConnectionPhase.BODY:
            return
        if self.cycle.response_complete:
            self._discard(len(data))
        elif self._num_framing_bytes > self.limits.head_bytes:
            self._refuse(MalformedHttp(f"More than {self.limits.head_bytes} bytes around a chunk of the body."))

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline_upgrade(data[offer.args[0] :])
        except httptools.HttpParserError as error:
            if self._phase is ConnectionPhase.RESPONSE or self._early_reply is not None:  # the request itself was valid
                self._await_last_response()
            else:
                self._refuse(self._refusal or _parser_error(error))
        if self._early_reply is not None:
            self._reply_early(self._early_reply)

    def _decline_upgrade(self, rest: bytes) -> None:
        """Some clients offer an upgrade to HTTP/2; the parser then skips the body. Parse again without the offer."""
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self._feed(b"\r\n".join([*lines, b"", b""]) + rest)

    # Called by the parser; an exception stops it, and the error is the reply

    def on_message_begin(self) -> None:
        if self._phase is ConnectionPhase.RESPONSE:
            raise self._refused(MalformedHttp("A request came before the response to the previous one."))
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is not ConnectionPhase.HEAD:
            raise self._refused(MalformedHttp("Trailers are not supported."))
        if len(self.headers) >= self.limits.headers:
            raise self._refused(HeadTooLarge(f"There are more than {self.limits.headers} headers."))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            return
        names = [name for name, _ in self.headers]
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise self._refused(MalformedHttp("Only HTTP/1.1 and HTTP/1.0 are supported."))
        if not self.url.startswith(b"/") or self.parser.get_method() == b"CONNECT":
            raise self._refused(MalformedHttp("The target of a request must be a path, which begins with a slash."))
        if names.count(b"host") > 1 or (version == "1.1" and b"host" not in names):
            raise self._refused(MalformedHttp("A request must have one Host header."))
        if names.count(b"content-length") + names.count(b"transfer-encoding") > 1:
            raise self._refused(MalformedHttp("The length of the body is given more than once."))
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
            raise self._refused(MalformedHttp("The only Transfer-Encoding that is read is chunked."))
        super().on_headers_complete()
        self._num_framing_bytes = self._num_body_bytes = self._num_body_pieces = self._num_credited_bytes = 0
        self._enter(ConnectionPhase.BODY, self.limits.body_s, self._body_is_late)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Not yet: when the request is complete. Only a refusal that the application is to send starts at once, without
        the body: a client that does not read its responses waits for it by backpressure."""
        scope = cast(Scope, cycle.scope)
        self._streams = False
        if scope["http_version"] == "1.0":
            app = cast(ASGI3Application, unframed(cycle, cast(ASGIApp, app)))
        self._early_reply = self.requests.check(scope, replies=self._may_reply)
        if self._early_reply is not None:
            return
        if context_of(scope).refusal is not None or context_of(scope).streams_body:
            self._streams = context_of(scope).refusal is None
            super()._start_asgi_task(cycle, app)
            return
        self._pending = app
        body = PendingBody(client_name(context_of(scope).identity, self.client), self._crowd_out)
        try:
            self.bodies.add(body)
        except QuireError as error:
            raise self._refused(error) from error
        self._body = body
        if cycle.waiting_for_100_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False

    @property
    def _may_reply(self) -> bool:
        return self.replies_early and not self.flow.write_paused

    def on_body(self, body: bytes) -> None:
        self._num_framing_bytes = 0
        self._num_body_bytes += len(body)
        self._num_body_pieces += 1
        if self._num_body_pieces > self.limits.body_pieces and not self._streams:
            raise self._refused(MalformedHttp(f"The body comes in more than {self.limits.body_pieces} chunks."))
        if self._streams:
            super().on_body(body)  # with backpressure: the application counts the bytes
            return
        if self._pending is None:
            return  # it is refused
        if self._num_body_bytes > self.limits.body_bytes:
            raise self._refused(BodyTooLarge(self.limits.body_bytes))
        assert self._body is not None
        try:
            self.bodies.grow(self._body, len(body))
        except QuireError as error:
            raise self._refused(error) from error
        self.cycle.body += body

    def on_message_complete(self) -> None:
        if self._phase is ConnectionPhase.HEAD:
            return  # of an upgrade that will be declined
        super().on_message_complete()
        if self._pending is not None:
            assert self._body is not None
            self.bodies.complete(self._body)
            self._early_reply = self.requests.admit(cast(Scope, self.cycle.scope), replies=self._may_reply)
            app, self._pending = self._pending, None
            if self._early_reply is None:
                super()._start_asgi_task(self.cycle, app)
        if self.cycle.response_complete:  # the response came before the end of the body
            self._await_head()
        else:
            self._enter(ConnectionPhase.RESPONSE)

    def on_response_complete(self) -> None:
        self._forget_body()
        super().on_response_complete()
        if self.transport.is_closing():
            self._reader.start()
        if self._phase is ConnectionPhase.BODY and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._enter(ConnectionPhase.BODY, self.limits.linger_s, self._close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader.stop()
        if self.transport.is_closing():
            self._reader.start()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def shutdown(self) -> None:
        """The server stops. A request whose body is incomplete gets an error."""
        if self._pending is not None:
            self._refuse(Stopping())
        else:
            super().shutdown()

    # Timers

    def call_later(self, delay_s: float, then: Callable[[], None]) -> asyncio.Handle:
        return self.loop.call_later(delay_s, then)

    def _enter(self, phase: ConnectionPhase, delay_s: float = 0.0, then: Callable[[], None] | None = None) -> None:
        """Start a phase, or the same one anew, with its timer in place of the old one."""
        self._stop_timer()
        self._phase = phase
        if then is not None:
            self._timer = self.call_later(delay_s, then)

    def _await_head(self) -> None:
        self._num_head_bytes = self._num_discarded_bytes = 0
        self._enter(ConnectionPhase.HEAD, self.limits.head_s, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        if self._num_head_bytes == 0:
            self._close()
        else:
            self._refuse(TooSlow(f"The headers were not complete after {self.limits.head_s:g} s."))

    def _body_is_late(self) -> None:
        """Refuse the body, unless enough of it came since the last check: a trickle does not hold a connection."""
        limits, num_new = self.limits, self._num_body_bytes - self._num_credited_bytes
        if num_new:
            self._num_credited_bytes = self._num_body_bytes
            self._enter(ConnectionPhase.BODY, min(num_new / limits.body_bytes_per_s, limits.body_s), self._body_is_late)
        elif self._streams:
            self._close()  # the application receives a disconnect
        else:
            self._refuse(
                TooSlow(
                    f"The body arrived too slowly: {self._num_body_bytes} bytes in {limits.body_s:g} s or more. "
                    f"After the first {limits.body_s:g} s, send at least {limits.body_bytes_per_s} bytes/s."
                )
            )

    def _cut_reader(self, reason: str, num_unread: int) -> None:
        """The client does not read: reset the connection. The application receives a disconnect and aborts its work.

        After a mere close, the kernel would keep what it has not sent for as long as the client answers its probes.
        """
        fields: dict[str, object] = {"reason": reason, "unread_bytes": num_unread}
        if self.cycle is not None:
            context = context_of(cast(Scope, self.cycle.scope))
            fields.update(id=context.request_id, key=context.identity.name)
            context.error_code = "slow_reader"
        _log.warning("slow_reader", extra={"fields": fields})
        self.slow_reader(reason)
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    # Replies and the end

    def _reply_early(self, reply: ErrorReply) -> None:
        """Reply in place of the application. The rest of the body is discarded."""
        cycle, self._early_reply = self.cycle, None
        cycle.response_started = cycle.response_complete = True
        if cycle.waiting_for_100_continue and self._phase is ConnectionPhase.BODY:
            cycle.keep_alive = False  # with Expect: 100-continue the body will not come
        headers = [*cycle.default_headers, *reply.headers]
        if not cycle.keep_alive:
            headers.append((b"connection", b"close"))
        self._write(reply._replace(headers=headers, body=b"" if cycle.scope["method"] == "HEAD" else reply.body))
        if not cycle.keep_alive:
            self._close() if self._phase is ConnectionPhase.RESPONSE else self._linger()
        cycle.on_response()
        cycle.on_response = lambda: None  # breaks a reference cycle per refusal

    def _refused(self, error: QuireError) -> QuireError:
        self._refusal = error
        return error

    def _refuse(self, error: Exception) -> None:
        """Reply in place of the application, which has not got the request; if it is replying, that is the last."""
        cycle = self.cycle
        if self._pending is not None:
            self._pending = None
            reply = self.requests.cut_off(cast(Scope, cycle.scope), error)
            cycle.response_started = cycle.response_complete = True
            cycle.on_response = lambda: None
            self._forget_body()
        elif cycle is not None and not cycle.response_complete:
            self._await_last_response()
            return
        else:
            request_id = new_request_id()
            public = error if isinstance(error, QuireError) else InternalError(request_id)
            log_failure(error, public, None)
            reply = reply_to(public)
            reply = reply._replace(headers=[*reply.headers, *response_headers(request_id, None)])
            name = UNAUTHENTICATED.name
            self.observe(RequestRecord(OTHER, OTHER, public.status, 0.0, name, request_id, error_code=public.code))
        self._write(reply._replace(headers=[*reply.headers, (b"connection", b"close")]))
        self._linger()

    def _crowd_out(self) -> None:
        """The bodies of all requests take too much, and this client's the most."""
        self._refuse(TooSlow("The server has too many incomplete bodies, and this one was the oldest of its client."))

    def _forget_body(self) -> None:
        if self._body is not None:
            self.bodies.remove(self._body)
            self._body = None

    def _await_last_response(self) -> None:
        if self._streams and self._phase is ConnectionPhase.BODY:
            self._close()  # the application waits for the rest of the body: it receives a disconnect
            return
        self.cycle.keep_alive = False
        self._enter(ConnectionPhase.LAST_RESPONSE)

    def _write(self, reply: ErrorReply) -> None:
        lines = b"".join([name + b": " + value + b"\r\n" for name, value in reply.headers])
        self.transport.write(STATUS_LINE[reply.status] + lines + b"\r\n" + reply.body)

    def _linger(self) -> None:
        """Send nothing more; discard input for a while, then close."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._enter(ConnectionPhase.END, self.limits.linger_s, self._close)

    def _discard(self, num_bytes: int) -> None:
        self._num_discarded_bytes += num_bytes
        if self._num_discarded_bytes > self.limits.linger_bytes:
            self._close()

    def _close(self) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            self.transport.close()
            self._reader.start()


def guarded(
    limits: ConnectionLimits,
    observe: RequestObserver,
    requests: RequestLogger,
    *,
    replies_early: bool,
    slow_reader: Callable[[str], None],
) -> type[GuardedProtocol]:
    """The protocol with these limits, for uvicorn's `http=`. The observer gets records of requests that never reached
    the middleware. `replies_early`: refusals are sent here; not where another middleware must see each response."""

    class Guarded(GuardedProtocol):
        pass

    Guarded.limits = limits
    Guarded.observe = staticmethod(observe)
    Guarded.requests = requests
    Guarded.replies_early = replies_early
    Guarded.slow_reader = staticmethod(slow_reader)
    Guarded.unread = UnreadOutput(limits.readers)
    Guarded.networks = Counter()
    Guarded.numbers = itertools.count()
    Guarded.bodies = BodyBudget(
        total_bytes=limits.all_bodies_bytes,
        client_bytes=limits.client_bodies_bytes,
        client_incomplete=limits.client_incomplete_bodies,
    )
    return Guarded


def connection_limits(max_body_bytes: int, most: int = _MAX_CONNECTIONS) -> ConnectionLimits:
    """The default limits for bodies of this size. Connections also at most as the limit on open files allows, with
    those that are turned away and handshakes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    usual = ConnectionLimits()
    files = 1 << 20 if soft == resource.RLIM_INFINITY else max(soft - _FILES_KEPT, 8)
    turned_away, handshakes = min(usual.turned_away, files // 8), min(usual.handshakes, files // 8)
    connections = min(most, files - turned_away - handshakes)
    all_bytes = max(usual.all_bodies_bytes, _WHOLE_BODIES * max_body_bytes)
    return ConnectionLimits(
        connections=connections,
        turned_away=turned_away,
        handshakes=handshakes,
        body_bytes=max_body_bytes,
        all_bodies_bytes=all_bytes,
        client_bodies_bytes=all_bytes * 3 // 4,
        client_incomplete_bodies=max(connections // 2, 1),
    )

"""Between an HTTP request and an endpoint: bytes in, typed bodies out, errors and JSON back. Knows no engine."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from quire.core.errors import EngineFailed, QuireError
from quire.server.answers import error_body
from quire.server.bodies.decode import Kind, decode

MAX_BODY_BYTES = 16 << 20
_SHORT_BYTES = 1 << 16  # what is decoded faster than a thread is asked
_CLIENT_LEFT = 499  # nobody reads it; what servers write in their logs for a client that hung up

_log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


class BodyTooLarge(QuireError):
    """More bytes than any request may have."""

    status = 413
    code = "body_too_large"


async def read(request: Request, kind: type[Kind]) -> Kind:
    """The body of a request."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"The body is larger than {MAX_BODY_BYTES} bytes, the most that is read.")
    if len(body) <= _SHORT_BYTES:
        return decode(bytes(body), kind)
    return await run_in_threadpool(decode, bytes(body), kind)


def json_response(body: Mapping[str, object], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def error_response(error: QuireError) -> Response:
    return json_response(error_body(error), error.status)


def answering(endpoint: Endpoint) -> Endpoint:
    """Errors a client can cause become their own answers; our mistakes become a plain 500."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_LEFT)
        except Exception as error:
            return error_response(as_told(error))

    return answer


def as_told(error: Exception) -> QuireError:
    """What a client is told of an error: its own ones as they are, ours in fixed words."""
    if isinstance(error, QuireError):
        return error
    _log.error("an endpoint failed", exc_info=error)
    return EngineFailed("The server failed to answer this request; its log says why.")


async def unless_gone(request: Request, work: Coroutine[None, None, T]) -> T:
    """The result of some work, or `ClientDisconnect` if the client hangs up before."""
    wanted = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(hang_up(request.receive))
    try:
        await asyncio.wait({wanted, gone}, return_when=asyncio.FIRST_COMPLETED)
        if wanted.done():
            return wanted.result()
        raise ClientDisconnect
    finally:
        wanted.cancel()
        gone.cancel()


async def hang_up(receive: Receive) -> None:
    """Ends when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass

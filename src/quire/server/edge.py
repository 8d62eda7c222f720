"""Between an HTTP request and an endpoint: bytes in, typed bodies out, errors and JSON back. Knows no engine."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import ParamSpec, TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from quire.core.errors import EngineFailed, QuireError
from quire.server.bodies.decode import Kind, decode

_SHORT_BYTES = 1 << 16  # what is read faster than a thread is asked

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


async def read(request: Request, kind: type[Kind]) -> Kind:
    """The body of a request."""
    return await worked(request, decode, await request.body(), kind)  # the gate has bounded it


async def worked(request: Request, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of some work on the body of a request: done at once if it is short, else on a thread."""
    if len(await request.body()) <= _SHORT_BYTES:
        return work(*args, **kwargs)
    return await run_in_threadpool(work, *args, **kwargs)


def json_response(body: Mapping[str, object], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def as_told(error: Exception) -> QuireError:
    """What a client is told of an error: its own ones as they are, ours in fixed words."""
    if isinstance(error, QuireError):
        return error
    _log.error("an endpoint failed", exc_info=error)
    return EngineFailed("The server failed to answer this request; its log says why.")


async def unless_gone(request: Request, work: Coroutine[None, None, T], leave: Callable[[], None] = lambda: None) -> T:
    """The result of some work, or `ClientDisconnect` if the client hangs up before. Either way, then leave."""
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
        leave()


async def hang_up(receive: Receive) -> None:
    """Ends when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass

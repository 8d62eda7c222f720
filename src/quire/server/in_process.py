"""One request to an ASGI application in this process: no socket, no client that could hang up."""

import asyncio
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Scope

from quire.server.batch_lines import Reply


async def post(app: ASGIApp, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> Reply:
    """What the application answers to a JSON body."""
    unread = [body]
    status, told, pieces = 500, dict[bytes, bytes](), list[bytes]()

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # nobody hangs up

    async def send(message: Message) -> None:
        nonlocal status, told
        if message["type"] == "http.response.start":
            status, told = message["status"], dict(message["headers"])
        else:
            pieces.append(message.get("body", b""))

    await app(_scope(path, len(body), headers), receive, send)
    wait = told.get(b"retry-after-ms")
    request_id = told.get(b"x-quire-request-id", b"").decode("ascii")
    return Reply(status, request_id, b"".join(pieces), None if wait is None else int(wait) / 1000)


def _scope(path: str, num_bytes: int, headers: Sequence[tuple[bytes, bytes]]) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % num_bytes), *headers],
        "client": None,
        "server": None,
    }

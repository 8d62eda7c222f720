"""Answers without a length for clients of HTTP/1.0, which know no chunks: the end of the connection ends them.

uvicorn frames every answer without a Content-Length in chunks, whoever asked. Knows nothing of what is answered.
"""

import sys

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def unframed(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """The application, whose answer in this cycle is sent as it is. The connection must close after it."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        measured = True

        async def tell(message: Message) -> None:
            nonlocal measured
            if message["type"] == "http.response.start":
                measured = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not measured:
                    cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
            elif not measured and not message.get("more_body", False):
                cycle.expected_content_length = len(message.get("body", b""))  # this is the last of it
            await send(message)

        await app(scope, receive, tell)

    return answer

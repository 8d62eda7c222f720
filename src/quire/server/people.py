"""Pages for people: a chat at /, and the list of endpoints at /docs. They need nothing from elsewhere."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from quire.server.desk import Desk

_PAGES = Path(__file__).parent / "pages"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


async def chat_page(desk: Desk, request: Request) -> Response:
    return _page("chat.html")


async def docs_page(desk: Desk, request: Request) -> Response:
    return _page("docs.html")


def _page(name: str) -> Response:
    return Response((_PAGES / name).read_bytes(), media_type="text/html; charset=utf-8", headers=_HEADERS)

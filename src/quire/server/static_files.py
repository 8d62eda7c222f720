"""The web pages and the files they load: HTML, styles, scripts. Served without a key; the APIs they call ask for it.

Each file has its own route with an exact path, so no path of a request is ever joined to a folder. Nothing is loaded
from other hosts, and no script or style stands inline, which the content security policy states.
"""

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "pages"
PAGES = {"/": "chat.html", "/docs": "docs.html", "/engine": "engine.html"}
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; style-src 'self'; script-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",  # asked again with the ETag: a new version is used at once
}


def static_routes() -> dict[str, str]:
    """The file of every path that is served without a key: the pages, and below /pages/ what they load."""
    assets = (path for path in sorted(FOLDER.rglob("*")) if path.suffix in _MEDIA_TYPES and path.suffix != ".html")
    return PAGES | {f"/pages/{name}": name for name in (path.relative_to(FOLDER).as_posix() for path in assets)}


class _StaticFile(NamedTuple):
    content: bytes
    etag: str


@cache
def _read(name: str) -> _StaticFile:
    content = (FOLDER / name).read_bytes()
    return _StaticFile(content, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


async def static_file(name: str, request: Request) -> Response:
    """One file, or 304 where the browser has it already."""
    file = _read(name)
    headers = {**_HEADERS, "ETag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=_MEDIA_TYPES[Path(name).suffix], headers=headers)

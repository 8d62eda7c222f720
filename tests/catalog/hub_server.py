"""A hub on this machine: the few HTTP answers that downloads are made of, as the Hugging Face hub gives them.

The client is the real one; both its ways to learn a model's files are answered (the list inside the description of a
revision, and the tree).
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_a_token_of_somebody_who_accepted"


@dataclass
class Hub:
    """Models by their names, which of them want a token, and everything that was asked of it."""

    models: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    endpoint: str = ""
    asked: list[str] = field(default_factory=list)


class Refusal(Exception):
    """An answer of the hub that is none: status, and its word for the reason."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.served.asked.append(f"{self.command} {path}")
        try:
            headers, body = self._describe(path) if path.startswith("/api/models/") else self._file(path)
        except Refusal as refusal:
            self._send(refusal.status, {"X-Error-Code": refusal.code, "X-Error-Message": "The hub says no."}, b"{}")
            return
        self._send(200, headers, body)

    def _describe(self, path: str) -> tuple[dict[str, str], bytes]:
        owner, name, *rest = path.removeprefix("/api/models/").split("/")
        folder = self._folder(f"{owner}/{name}")
        self._check_revision(rest[1] if len(rest) > 1 else "main")
        if rest[:1] == ["tree"]:
            answer: object = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)}
                for file in sorted(folder.iterdir())
            ]
        else:
            siblings = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
            answer = {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
        return {"Content-Type": "application/json"}, json.dumps(answer).encode()

    def _file(self, path: str) -> tuple[dict[str, str], bytes]:
        owner, name, _, revision, file_name = path.removeprefix("/").split("/")
        file = self._folder(f"{owner}/{name}") / file_name
        self._check_revision(revision)
        if not file.is_file():
            raise Refusal(404, "EntryNotFound")
        return {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT}, file.read_bytes()

    def _folder(self, model: str) -> Path:
        if model not in self.served.models:
            raise Refusal(404, "RepoNotFound")
        if model in self.served.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refusal(403, "GatedRepo")
        return self.served.models[model]

    def _check_revision(self, revision: str) -> None:
        if revision not in ("main", COMMIT):
            raise Refusal(404, "RevisionNotFound")

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _etag(file: Path) -> str:
    """As git names a blob."""
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

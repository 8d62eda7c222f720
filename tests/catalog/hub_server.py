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
    cut: set[str] = field(default_factory=set)  # files whose next download breaks off in the middle
    damaged: set[str] = field(default_factory=set)  # files that arrive with another byte
    claimed_bytes: dict[str, int] = field(default_factory=dict)  # of large files, instead of their sizes
    commit: str = COMMIT  # of main


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
        self._send_file(path, headers, body) if "ETag" in headers else self._send(200, headers, body)

    def _send_file(self, path: str, headers: dict[str, str], body: bytes) -> None:
        """The file, or its end if a download is resumed."""
        name = path.rpartition("/")[2]
        if name in self.served.damaged:
            body = body[:-1] + bytes([body[-1] ^ 1])
        asked = self.headers.get("Range", "")
        if self.command == "GET" and asked:
            self.served.asked.append(f"{asked} {path}")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        if start:
            headers = {**headers, "Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
        rest = body[start:]
        if self.command == "GET" and name in self.served.cut:
            self.served.cut.discard(name)
            self._send(206 if start else 200, headers, rest, num_sent=len(rest) // 2)
            self.close_connection = True
            return
        self._send(206 if start else 200, headers, rest)

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
            siblings = [self._sibling(file) for file in sorted(folder.iterdir())]
            answer = {
                "id": f"{owner}/{name}",
                "sha": self.served.commit,
                "siblings": siblings,
                "private": False,
                "tags": [],
            }
        return {"Content-Type": "application/json"}, json.dumps(answer).encode()

    def _sibling(self, file: Path) -> dict[str, object]:
        size = file.stat().st_size
        described: dict[str, object] = {"rfilename": file.name, "size": size, "blobId": _etag(file)}
        if _is_large(file):
            size = self.served.claimed_bytes.get(file.name, size)
            described |= {"size": size, "lfs": {"sha256": _etag(file), "size": size, "pointerSize": 100}}
        return described

    def _file(self, path: str) -> tuple[dict[str, str], bytes]:
        parts = path.removeprefix("/").split("/")
        if len(parts) != 5:
            raise Refusal(404, "EntryNotFound")
        owner, name, _, revision, file_name = parts
        file = self._folder(f"{owner}/{name}") / file_name
        self._check_revision(revision)
        if not file.is_file():
            raise Refusal(404, "EntryNotFound")
        return {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": self.served.commit}, file.read_bytes()

    def _folder(self, model: str) -> Path:
        if model not in self.served.models:
            raise Refusal(404, "RepoNotFound")
        if model in self.served.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refusal(403, "GatedRepo")
        return self.served.models[model]

    def _check_revision(self, revision: str) -> None:
        if revision not in ("main", self.served.commit):
            raise Refusal(404, "RevisionNotFound")

    def _send(self, status: int, headers: dict[str, str], body: bytes, num_sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:num_sent])


def _is_large(file: Path) -> bool:
    """Stored with Git LFS."""
    return file.suffix in (".safetensors", ".gguf")


def _etag(file: Path) -> str:
    """As Git LFS names a file, or git a blob."""
    content = file.read_bytes()
    if _is_large(file):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

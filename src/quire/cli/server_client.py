"""HTTP to a running server, for commands that take an address: pages, JSON and streams. Needs no package."""

import json
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

from quire.core.errors import ConfigError, EngineFailed, QuireError

_PORT = 8000  # of quire serve, where only a host is given
_TIMEOUT_S = 5.0  # of a connection, and of a page
_STREAM_TIMEOUT_S = 600.0  # between two pieces of a stream: a server may queue a request
_MAX_PAGE = 16 << 20
_MAX_LINE = 4 << 20
_MAX_SHOWN = 300  # characters of a server's own words


class ServerClient:
    """The server at an address, with the key that it asks for."""

    def __init__(self, url: str, key: str | None, *, key_hint: str) -> None:
        if "//" not in url:
            url = f"http://{url}" if ":" in url or "/" in url else f"http://{url}:{_PORT}"
        if not _is_address(url):
            raise ConfigError(f"{url} is not a server address, such as http://127.0.0.1:8000.", param="url")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError("The API key has characters that a header cannot carry.", param="api_key")
        self.url = url.rstrip("/")
        self._parts = urlsplit(self.url)
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._key_hint = key_hint

    def get(self, path: str) -> str:
        with self._response("GET", path, None) as response:
            return response.read(_MAX_PAGE).decode()

    def stream(
        self, path: str, body: Mapping[str, object], interruptible: Callable[[Callable[[], None]], None]
    ) -> Iterator[str]:
        """The events of a stream. `interruptible` is called with a function that ends it at once."""
        with self._response("POST", path, body, interruptible) as response:
            if not (response.getheader("content-type") or "").startswith("text/event-stream"):
                raise ConfigError(f"{self.url}{path} does not stream: it is not an OpenAI-compatible server.")
            while line := response.readline(_MAX_LINE):
                if line.startswith(b"data:"):
                    yield line.removeprefix(b"data:").strip().decode(errors="replace")

    @contextmanager
    def _response(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        interruptible: Callable[[Callable[[], None]], None] | None = None,
    ) -> Iterator[HTTPResponse]:
        headers = {**self._headers, "accept-encoding": "identity"}
        content = None
        if body is not None:
            headers["content-type"] = "application/json"
            content = json.dumps(body).encode()
        connection = self._connection()
        try:
            connection.connect()
            if interruptible is not None:
                stream = connection.sock
                stream.settimeout(_STREAM_TIMEOUT_S)
                interruptible(lambda: _shut(stream))
            connection.request(method, self._parts.path + path, content, headers)
            response = connection.getresponse()
        except (OSError, ValueError, HTTPException) as error:
            connection.close()
            raise ConfigError(
                f"No server answers at {self.url}: {_reason(error)}. quire serve starts a server."
            ) from error
        try:
            if response.status != 200:
                raise self._refusal(path, response)
            yield response
        except (OSError, ValueError, HTTPException) as error:
            raise EngineFailed(f"{self.url} did not finish its answer: {_reason(error)}.") from error
        finally:
            connection.close()

    def _connection(self) -> HTTPConnection:
        host = self._parts.hostname or ""
        if self._parts.scheme == "https":
            context = ssl.create_default_context()
            return HTTPSConnection(host, self._parts.port, timeout=_TIMEOUT_S, context=context)
        return HTTPConnection(host, self._parts.port, timeout=_TIMEOUT_S)

    def _refusal(self, path: str, response: HTTPResponse) -> QuireError:
        text = response.read(_MAX_PAGE).decode(errors="replace")
        hint = f" Give its key with {self._key_hint}." if response.status in (401, 403) else ""
        said = error_text(text)
        message = f"{self.url}{path} answers {response.status}{': ' + said.rstrip('.') if said else ''}.{hint}"
        return EngineFailed(message) if response.status >= 500 else ConfigError(message)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error).strip() or type(error).__name__


def error_text(text: str) -> str:
    """The message of an error's JSON, in OpenAI's or Ollama's form; empty if there is none."""
    try:
        error = json.loads(text)["error"]
        said = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        return ""
    return " ".join(str(said).split())[:_MAX_SHOWN]


def _shut(stream: socket.socket) -> None:
    with suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # an unclosed bracket, or a port above 65535
        return False
    return named and url.isascii() and url.isprintable() and " " not in url and not parts.query and not parts.fragment


def first_key(path: Path) -> str:
    """The first key of a file, which may be the server's key file: one key per line, with attributes after it."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", param="api_key_file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} holds no keys: it is not UTF-8 text.", param="api_key_file") from error
    for line in lines:
        if line.strip() and not line.lstrip().startswith("#"):
            return line.split()[0]
    raise ConfigError(f"{path} has no key.", param="api_key_file")

"""Checks of `quire serve` that are answered before the web server and the engine are imported: address, keys, TLS."""

import ipaddress
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from quire.cli.options import check_tracing
from quire.core.errors import ConfigError
from quire.server.http.auth import KeyRing, is_loopback, make_key_ring


class AccessChecks(NamedTuple):
    """What the options of access name, read and checked."""

    keys: KeyRing
    max_body_bytes: int
    root_path: str
    certificate: tuple[Path, Path | None] | None


def read_access(given: Mapping[str, Any]) -> AccessChecks:
    return AccessChecks(
        make_key_ring(given["api_keys"], given["api_key_file"], given["admin_key"], given["admin_key_file"]),
        _body_limit(given["max_body_bytes"]),
        _root_path(given["root_path"]),
        _certificate(given["ssl_certfile"], given["ssl_keyfile"]),
    )


def check_address(host: str, given: Mapping[str, Any]) -> None:
    """Without keys every client that reaches the port may use the model: only on this machine, unless allowed."""
    _check_host(host)
    if read_access(given).keys.open and not given["insecure_no_key"] and not is_loopback(host):
        raise ConfigError(
            f"Serving on {host} would let every client that can reach it use the model. Give keys with --api-key-file "
            f"or --api-key, use --host 127.0.0.1, or use --insecure-no-key.",
            param="host",
        )
    _check_endpoint(given["otlp_endpoint"])


def _check_host(host: str) -> None:
    """A name is resolved when the port is opened; here, what can be neither a name nor an address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not host.strip() or set(host) & set(":/[] ") or host.replace(".", "").isdecimal():
            raise ConfigError(
                f"--host {host!r:.100} is not an address; write for example --host 127.0.0.1 --port 8000, or --host "
                f"0.0.0.0 for all addresses of this machine.",
                param="host",
            ) from None


def _body_limit(num_bytes: int | None) -> int:
    if not num_bytes:
        raise ConfigError("--max-body must be at least 1 byte.", param="max_body")
    return num_bytes


def _root_path(path: str) -> str:
    if path and (not path.isascii() or not path.startswith("/") or path.endswith("/")):
        raise ConfigError(
            f"--root-path {path!r:.100} must be empty, or begin with a slash and not end with one.", param="root_path"
        )
    return path


def _certificate(certificate: Path | None, key: Path | None) -> tuple[Path, Path | None] | None:
    if certificate is None:
        if key is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile.", param="ssl_certfile")
        return None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror or "it cannot be read"
        if isinstance(error, ssl.SSLError):
            reason = "they are not a certificate and its key in PEM form, without a password"
        raise ConfigError(f"Cannot use the certificate {certificate}: {reason}.", param="ssl_certfile") from error
    return certificate, key


def _check_endpoint(endpoint: str | None) -> None:
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        is_one = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:  # an unclosed bracket, or a port that is not a number
        is_one = False
    if not is_one:
        raise ConfigError(
            f"--otlp-endpoint {endpoint!r:.100} is not a collector URL, such as http://127.0.0.1:4318.",
            param="otlp_endpoint",
        )
    check_tracing()

"""Options of serve about access: keys, origins, sizes, files, TLS, logs, as the web server uses them."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from starlette.types import ASGIApp

from quire.cli.serve_checks import read_access
from quire.server.app import ADMIN_ROUTES, STATIC_ROUTES, UPLOAD_ROUTES, Application
from quire.server.batch.service import BatchService
from quire.server.batch_store import BatchStore
from quire.server.context import ServerState
from quire.server.file_store import MAX_FILE_BYTES, FileStore
from quire.server.http.access import AccessOptions
from quire.server.http.logs import LogFormat, LogWriter, log_request
from quire.server.http.middleware import RequestLogger, RequestObserver, secure
from quire.server.http.protocol import connection_limits, guarded
from quire.server.http.request_context import RequestRecord
from quire.server.http.tls import behind_tls
from quire.server.metrics import Metrics

_FORM_BYTES = 1 << 16  # of an upload beside its file
_KEEP_ALIVE_S = 30  # longer than clients keep an idle connection, so that the client closes it


class AccessSettings:
    """The access settings among the options of `quire serve`."""

    def __init__(self, host: str, given: Mapping[str, Any]) -> None:
        checked = read_access(given)
        self._keys = checked.keys
        self._options = AccessOptions(
            checked.max_body_bytes,
            tuple(given["allowed_origins"]),
            ADMIN_ROUTES,
            tuple(STATIC_ROUTES),
            own_host=host,
            upload_routes=UPLOAD_ROUTES,
            max_upload_bytes=None if given["files_dir"] is None else MAX_FILE_BYTES + _FORM_BYTES,
        )
        self._files_dir: Path | None = given["files_dir"]
        self._files_limit: int = given["files_limit_bytes"]
        self._batches: asyncio.Task[None] | None = None
        self._root_path = checked.root_path
        self._certificate = checked.certificate
        self._log = LogWriter(cast(LogFormat, given["log_format"]), sys.stdout)
        self._observers: list[RequestObserver] = [log_request]
        self._requests: RequestLogger
        self._metrics: Metrics

    @property
    def scheme(self) -> str:
        return "https" if self._certificate else "http"

    @property
    def weights(self) -> dict[str, float]:
        return self._keys.weights

    def secure(self, app: Application, metrics: Metrics) -> RequestLogger:
        self._metrics = metrics
        metrics.engine.num_lines_lost = lambda: self._log.handler.num_dropped
        self._observers.append(metrics.responded)
        self._requests = secure(app, keys=self._keys, options=self._options, observers=self._observers, admission=app)
        return self._requests

    def serve_files(self, states: Sequence[ServerState], app: ASGIApp) -> None:
        """Files and batches, if there is a folder for them: on the running event loop, until it ends."""
        if self._files_dir is None:
            return
        store = BatchStore(FileStore(self._files_dir, self._files_limit, time.time), time.time)
        for state in states:
            state.batches = store
        service = BatchService(store, app, self.weights, self._options.max_body_bytes)
        self._batches = asyncio.create_task(service.run())

    def uvicorn_settings(self, app: ASGIApp) -> dict[str, Any]:
        """Settings of uvicorn for an application behind the access checks."""
        limits = connection_limits(self._options.max_body_bytes)
        replies_early = app is self._requests and not self._options.allowed_origins  # neither CORS nor tracing around
        protocol: Callable[..., asyncio.Protocol] = guarded(
            limits,
            self._notify,
            self._requests,
            replies_early=replies_early,
            slow_reader=self._metrics.slow_reader,
        )
        if self._certificate is not None:
            certificate, key = self._certificate
            protocol = behind_tls(protocol, certificate, key, limit=limits.handshakes, timeout_s=limits.head_s)
        return {
            "app": app,
            "http": protocol,
            "ws": "none",
            "root_path": self._root_path,
            "proxy_headers": False,  # X-Forwarded-For: a client could claim any address
            "timeout_keep_alive": _KEEP_ALIVE_S,
            "server_header": False,
            "access_log": False,
            "log_config": None,
            "log_level": "error",
        }

    def _notify(self, record: RequestRecord) -> None:
        """Report a request that was refused before it reached the application to the same observers."""
        for observe in self._observers:
            observe(record)

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Log requests to stdout while the block runs. The report of the start goes to stderr."""
        self._log.install()
        with self._log.writing():
            yield

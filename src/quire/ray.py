"""`quire.ray.app(config)`: `quire serve --ray` as an application of Ray Serve.

    serve.run(quire.ray.app({"model": "qwen3-0.6b", "min-replicas": 2, "max-replicas": 8}))

The front, with the HTTP application, the tokenizer and the router, is one deployment; Serve's proxies bring it the
requests, check its health and replace it. The engines are actors that the front starts, as with `quire serve --ray`.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.cli.access_settings import AccessSettings
from quire.cli.main import serve as serve_command
from quire.cli.options import check_transport, engine_config, read_replica_limits
from quire.cli.serve import on_ray, open_tracer, server_config_of
from quire.core.errors import ConfigError, EngineFailed, QuireError
from quire.server.server import Server, ServerObservers, first_error

try:
    from ray import serve
except ImportError as error:
    raise ImportError('quire.ray needs Ray Serve: pip install "quire[ray]".') from error

_HOST = "127.0.0.1"  # without keys, only requests to a name of this machine are answered
_OF_SERVE = ("host", "port", "ssl-keyfile", "ssl-certfile", "config", "print-config")  # where and how HTTP is served
_MAX_ONGOING = 1 << 16  # of Serve: how many requests are open is for admission control to say

_log = logging.getLogger(__name__)


def app(config: Mapping[str, Any]) -> serve.Application:
    """An application for `serve.run`, or for a config file of Serve as `import_path: quire.ray:app`, with the options
    of `quire serve` by their names, such as {"model": "qwen3-0.6b", "max-replicas": 8}."""
    given = read_options(config)

    def build() -> ASGIApp:
        return ServeFront(given)

    class Front:
        app: ServeFront  # set by Serve

        async def check_health(self) -> None:
            self.app.check_health()

    deployed = serve.deployment(
        name="quire",
        num_replicas=1,
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=given["drain_s"],
    )
    return deployed(serve.ingress(build)(Front)).bind()


def read_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `quire serve --ray`, checked as on the command line."""
    arguments = ["--ray"]
    for key, value in config.items():
        name = key.replace("_", "-")
        if name in _OF_SERVE:
            raise ConfigError(f"{name} is for quire serve; here, Ray Serve listens: set it in its http_options.")
        if name == "model":
            arguments.append(str(value))
        elif isinstance(value, bool):
            arguments += [f"--{name}"] if value else []
        else:
            for each in value if isinstance(value, list | tuple) else [value]:
                arguments += [f"--{name}", str(each)]
    try:
        given = dict(serve_command.make_context("quire.ray.app", arguments).params)
    except click.ClickException as error:
        raise ConfigError(error.format_message()) from error
    read_replica_limits(given)
    check_transport(given)
    engine_config(given["model"], given)
    return given


class ServeFront:
    """ASGI: the front in a worker of Serve. The engines start and end with its lifespan."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self._app: ASGIApp | None = None
        self._server: Server | None = None
        self._running: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            assert self._app is not None
            await self._app(scope, receive, send)

    def check_health(self) -> None:
        """Raises if no engine makes progress, or none can be started again. One that died is started again here."""
        assert self._server is not None and self._running is not None
        if self._running.done() or self._server.supervisor.hangs:
            raise EngineFailed(self._server.supervisor.reason or "The engines have ended.")

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()  # startup
        try:
            await self._start()
        except QuireError as error:
            await send({"type": "lifespan.startup.failed", "message": error.message})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()  # shutdown
        assert self._server is not None and self._running is not None
        self._running.cancel()
        await self._server.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self) -> None:
        """Until the engines are ready."""
        given, ready = self._given, asyncio.Event()
        access = AccessSettings(_HOST, given)
        config = replace(engine_config(given["model"], given), tenant_weights=access.weights)
        server_config = await asyncio.to_thread(lambda: on_ray(server_config_of(config, given), given))
        tracing = open_tracer(given["otlp_endpoint"])
        observers = ServerObservers(
            lambda phase: _log.info("%s %.1f s %s", phase.name, phase.seconds, phase.detail),
            lambda served, info: ready.set(),
            _log.info,
            tracing,
        )
        self._server = Server(server_config, observers)
        secured = access.secure(self._server.app, self._server.metrics)
        access.serve_files([self._server.state], secured)
        self._app = secured if tracing is None else tracing.around(secured, self._server)
        self._running = asyncio.create_task(self._server.run_engine())
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([self._running, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._running.done():
            await first_error(self._running)

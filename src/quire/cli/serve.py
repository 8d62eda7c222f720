"""`quire serve`: the engine over HTTP."""

import importlib.util
import socket
import time
from collections.abc import Mapping

from quire.cli.console import err
from quire.cli.start import start
from quire.core.errors import ConfigError


def serve(model: str | None, host: str, port: int, given: Mapping[str, object]) -> None:
    started_s = time.monotonic()
    _check_port(host, port)
    if importlib.util.find_spec("starlette") is None or importlib.util.find_spec("uvicorn") is None:
        raise ConfigError('Serving needs starlette and uvicorn: pip install "quire[serve]".')
    import uvicorn

    from quire.server.app import make_app

    built = start(model, given, report=True)
    listening = socket.create_server((host, port))
    url = f"http://{host}:{listening.getsockname()[1]}"
    err.print(f"Ready in {time.monotonic() - started_s:.1f} s  →  {url}")
    err.print(
        f"""  curl {url}/v1/chat/completions -H 'content-type: application/json' """
        """-d '{"messages":[{"role":"user","content":"hi"}]}'""",
        markup=False,
        soft_wrap=True,
    )
    server = uvicorn.Server(uvicorn.Config(make_app(built), log_level="warning"))
    server.run(sockets=[listening])


def _check_port(host: str, port: int) -> None:
    """Refuse a taken port before a model is loaded for nothing."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror}. Use another --port, or --port 0 for any free one.",
            param="port",
        ) from error

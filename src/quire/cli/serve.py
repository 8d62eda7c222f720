"""`quire serve`: the engine over HTTP."""

import importlib.util
import ipaddress
import signal
import socket
import time
from collections.abc import Mapping
from types import FrameType

from quire.cli.console import err
from quire.cli.start import start
from quire.core.errors import ConfigError

_FAREWELL_S = 2  # what a slow client gets to read its last words


def serve(model: str | None, host: str, port: int, given: Mapping[str, object]) -> None:
    started_s = time.monotonic()
    absent = [name for name in ("starlette", "uvicorn", "httptools") if importlib.util.find_spec(name) is None]
    if absent:
        raise ConfigError(f'Serving needs {" and ".join(absent)}: pip install "quire[serve]".')
    import uvicorn

    from quire.cli.gatekeeping import Gatekeeping
    from quire.server.app import make_app
    from quire.server.service import Service

    class Server(uvicorn.Server):
        """Ends at once: whoever still waits for text is told so."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            service.dismiss()
            super().handle_exit(sig, frame)

    gatekeeping = Gatekeeping(given)
    _check_host(host, keyed=gatekeeping.keyed, insecure=bool(given["insecure_no_key"]))
    _listen(host, port).close()  # refuses a taken port before a model is loaded for nothing
    built = start(model, given, report=True)
    service = Service(built.front)
    server = Server(
        uvicorn.Config(
            gatekeeping.secure(make_app(built, service)),
            timeout_graceful_shutdown=_FAREWELL_S,
            **gatekeeping.uvicorn_settings(),
        )
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)  # both are an order to end, not a crash
    with gatekeeping.logging(), _listen(host, port) as listening:
        _announce(gatekeeping.scheme, host, listening.getsockname()[1], time.monotonic() - started_s)
        server.run(sockets=[listening])
    err.print("Stopped.")


def _announce(scheme: str, host: str, port: int, seconds: float) -> None:
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    err.print(f"Ready in {seconds:.1f} s  →  {url}")
    err.print(
        f"""  curl {url}/v1/chat/completions -H 'content-type: application/json' """
        """-d '{"messages":[{"role":"user","content":"hi"}]}'""",
        soft_wrap=True,  # to be copied as one line
    )


def _check_host(host: str, *, keyed: bool, insecure: bool) -> None:
    """Without keys whoever reaches the port may use the model: for this machine alone, unless told otherwise."""
    if not (keyed or insecure or _is_loopback(host)):
        raise ConfigError(
            f"Serving on {host} would let everybody who can reach it use the model. Give keys with --api-key-file "
            f"or --api-key, use --host 127.0.0.1, or say --insecure-no-key.",
            param="host",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # Python appends the address a second time
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {reason}. Use another --port, or --port 0 for any free one.",
            param="port",
        ) from error

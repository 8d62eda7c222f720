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
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn", "msgspec")):
        raise ConfigError('Serving needs starlette, uvicorn and msgspec: pip install "quire[serve]".')
    import uvicorn

    from quire.llm import LLM
    from quire.server.app import make_app
    from quire.server.served import Served
    from quire.server.service import Service

    class Server(uvicorn.Server):
        """Ends at once: whoever still waits for text is told so."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            service.dismiss()
            super().handle_exit(sig, frame)

    _check_host(host, insecure=bool(given["insecure_no_key"]))
    _listen(host, port).close()  # refuses a taken port before a model is loaded for nothing
    built = start(model, given, report=True)
    service = Service(built.front)
    served = Served(
        name=built.name,
        tokenizer=built.tokenizer,
        chat_template=None if built.tokenizer is None else built.tokenizer.chat_template,
        defaults=LLM.over(built).get_default_sampling_params(),
        max_model_len=built.resolved.max_model_len,
        vocab_size=built.checkpoint.spec.vocab_size,
        created=int(time.time()),
    )
    app = make_app(served, service)
    server = Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_FAREWELL_S))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)  # both are an order to end, not a crash
    with _listen(host, port) as listening:
        _announce(host, listening.getsockname()[1], time.monotonic() - started_s)
        server.run(sockets=[listening])
    err.print("Stopped.")


def _announce(host: str, port: int, seconds: float) -> None:
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    err.print(f"Ready in {seconds:.1f} s  →  {url}")
    err.print(
        f"""  curl {url}/v1/chat/completions -H 'content-type: application/json' """
        """-d '{"messages":[{"role":"user","content":"hi"}]}'""",
        soft_wrap=True,  # to be copied as one line
    )


def _check_host(host: str, *, insecure: bool) -> None:
    """Whoever reaches the port may use the model: that is for this machine alone, unless somebody says otherwise."""
    if not insecure and not _is_loopback(host):
        raise ConfigError(
            f"Serving on {host} would let everybody who can reach it use the model, and there are no API keys yet. "
            f"Use --host 127.0.0.1, or say --insecure-no-key.",
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

"""Whether what an optional part of quire needs is installed."""

import importlib.util

from quire.core.errors import ConfigError

_SERVING = ("starlette", "uvicorn", "httptools", "uvloop", "msgspec", "llguidance", "prometheus_client")


def check_serving() -> None:
    absent = [name for name in _SERVING if importlib.util.find_spec(name) is None]
    if absent:
        raise ConfigError(f'Serving needs {", ".join(absent)}: pip install "quire[serve]".')


def check_tracing() -> None:
    try:
        absent = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is None
        absent = absent or importlib.util.find_spec("opentelemetry.sdk") is None
    except ModuleNotFoundError:  # of a package above
        absent = True
    if absent:
        raise ConfigError('--otlp-endpoint needs OpenTelemetry: pip install "quire[otel]".', param="otlp_endpoint")

"""`quire serve` with several models: their tables in the config file, and the limits within which they are loaded."""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp

from quire.cli.access_settings import AccessSettings
from quire.cli.config_file import ModelTable
from quire.cli.options import engine_config
from quire.cli.serve import MAX_WAITING, open_tracer, server_config_of
from quire.core.errors import ConfigError
from quire.server.model_router import ModelRouter, RoutedModel, RouterConfig, RouterObservers
from quire.server.router_app import RoutedServer
from quire.server.server import serve_until_signal
from quire.version import __version__

_DEFAULT_KV_BYTES = 1 << 30  # of a model without --kv-cache-memory, where the memory of all is bounded


def check_several(model: str | None, given: Mapping[str, Any], tables: Sequence[ModelTable]) -> None:
    """Refuse options that are for one model with several, and the other way round."""
    if not tables:
        for option in ("models_max", "models_memory", "unload_after_s"):
            if given[option] is not None:
                flag = "--" + option.removesuffix("_s").replace("_", "-")
                raise ConfigError(
                    f"{flag} is for several models; name them in a file for --config, with a table [models.NAME] for "
                    f"each.",
                    param=option,
                )
        return
    if model is not None:
        raise ConfigError(
            f"The model {model!r:.100} is given beside the tables [models.NAME] of --config; make it one of them.",
            param="model",
        )
    if given["aliases"]:
        raise ConfigError(
            "--served-model-name is for one model; of several, each has the name of its table, and served-model-name "
            "in the table adds others.",
            param="served_model_name",
        )
    if given["replicas"] > 1:
        raise ConfigError("--replicas is for one model, not several; omit it.", param="replicas")
    if given["ray"]:
        raise ConfigError("--ray is for one model, not several; omit it.", param="ray")
    if given["prefill_engines"]:
        raise ConfigError("--prefill-engines is for one model, not several; omit it.", param="prefill_engines")
    if given["kv_events"] is not None:
        raise ConfigError("--kv-events-config is for one model, not several; omit it.", param="kv_events")
    if given["record"] is not None:
        raise ConfigError("--record is for one model, not several; omit it.", param="record")


def serve_several(
    tables: Sequence[ModelTable],
    given: Mapping[str, Any],
    access: AccessSettings,
    listening: socket.socket,
    say: Callable[[str], None],
    announce: Callable[[], None],
) -> None:
    number = "1 model" if len(tables) == 1 else f"{len(tables)} models"
    say(f"quire {__version__} · {number}: {', '.join(table.name for table in tables)}")
    config = router_config(tables, given, access.weights)
    tracing = open_tracer(given["otlp_endpoint"])
    observers = RouterObservers(
        lambda name, phase: say(f"  {name}  {phase.name:<10}{phase.seconds:5.1f} s   {phase.detail}"),
        lambda name, what: say(time.strftime("%H:%M:%S ") + f"{name}: {what}"),
        lambda line: say(time.strftime("%H:%M:%S ") + line),
        announce,
        tracing,
    )

    def make() -> RoutedServer:
        return RoutedServer(ModelRouter(config, observers, time.monotonic))

    def secure(server: RoutedServer) -> ASGIApp:
        app = access.secure(server.app, server.metrics)
        access.serve_files([slot.server.state for slot in server.router.slots], app)
        return app if tracing is None else tracing.around(app, server)

    with access.logging(), contextlib.closing(tracing) if tracing else contextlib.nullcontext():
        serve_until_signal(make, listening, secure, access.uvicorn_settings, given["drain_s"])


def router_config(tables: Sequence[ModelTable], given: Mapping[str, Any], weights: Mapping[str, float]) -> RouterConfig:
    """The models with their files opened, and their limits. Refuses limits within which a model can never be loaded."""
    memory, most = given["models_memory"], given["models_max"]
    models = []
    for table in tables:
        config = replace(engine_config(table.given["model"], table.given), tenant_weights=weights)
        if memory is not None and config.kv_cache_memory is None:
            config = replace(config, kv_cache_memory=_DEFAULT_KV_BYTES)
        server = server_config_of(config, table.given)
        server = replace(server, aliases=(table.name, *(name for name in server.aliases if name != table.name)))
        num_bytes = server.opened.checkpoint.num_bytes + (config.kv_cache_memory or 0)
        models.append(RoutedModel(server, num_bytes, table.pinned, table.given["unload_after_s"]))
    most = _checked_limits(models, most, memory)
    return RouterConfig(tuple(models), most, memory, given["max_waiting"] or MAX_WAITING)


def _checked_limits(models: Sequence[RoutedModel], most: int | None, memory: int | None) -> int | None:
    """The number of models that may be loaded at a time."""
    names = [name for model in models for name in model.server.aliases]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"Two models have the name {min(twice)!r}; each needs its own.", param="models")
    pinned = [model for model in models if model.pinned]
    others = [model for model in models if not model.pinned]
    if most is None and memory is None:
        most = len(pinned) + bool(others)
    if most is not None and most < len(pinned) + bool(others):
        raise ConfigError(
            f"--models-max is {most}, and {len(pinned)} models are pinned: {len(pinned) + bool(others)} is the least.",
            param="models_max",
        )
    needed = sum(model.num_bytes for model in pinned) + max((model.num_bytes for model in others), default=0)
    if memory is not None and memory < needed:
        raise ConfigError(
            f"--models-memory is {memory} bytes, but the pinned models and the largest other one take about {needed}: "
            f"weights and --kv-cache-memory. Use --models-memory {needed} or more, or a smaller --kv-cache-memory.",
            param="models_memory",
        )
    return most

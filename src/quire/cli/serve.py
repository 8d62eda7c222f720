"""`quire serve`: the engine over HTTP. This process never loads torch: the engine has its own, which is started before
most of the imports here."""

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.catalog.names import DEFAULT_MODEL
from quire.cli.config_file import ModelTable
from quire.cli.options import (
    check_kv_events,
    check_record,
    check_serving,
    check_transport,
    engine_config,
    read_replica_limits,
)
from quire.config import EngineConfig
from quire.core.errors import ChatTemplateError, ConfigError
from quire.core.process import num_cores
from quire.engine.startup import IMPORT_FIRST, SpawnedProcess, spawn_process
from quire.version import __version__

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from quire.cli.access_settings import AccessSettings
    from quire.engine.prefix_transfer import KvTransport
    from quire.engine.stats import EngineInfo
    from quire.server.autoscaling import ReplicaLimits
    from quire.server.context import ServedModel
    from quire.server.server import ServerConfig

_PROC = Path("/proc")
_LISTENING = "0A"
_ADDRESS, _STATE, _INODE = 1, 3, 9  # columns


def port_owner(port: int) -> str | None:
    """The process that listens, such as "pid 4711 (quire)". None if there is none, if it is another user's, or not on
    Linux."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    if not sockets:
        return None
    for folder in _PROC.glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or is another user's
            for file in (folder / "fd").iterdir():
                if os.readlink(file) in sockets:
                    name = (folder / "comm").read_text(errors="replace").strip()
                    return f"pid {folder.name} ({name})"
    return None


def _listening(port: int) -> Iterator[str]:
    """The inodes of the sockets that listen on a port."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                if words[_STATE] == _LISTENING and int(words[_ADDRESS].rpartition(":")[2], 16) == port:
                    yield words[_INODE]


MAX_WAITING = 1024


def serve(model: str | None, host: str, port: int, given: Mapping[str, Any], tables: Sequence[ModelTable] = ()) -> None:
    started_s = time.monotonic()
    check_serving()
    with _prespawned(given, tables) as spawned:
        _serve(model, host, port, given, tables, started_s, spawned)


@contextlib.contextmanager
def _prespawned(given: Mapping[str, Any], tables: Sequence[ModelTable]) -> Iterator[SpawnedProcess | None]:
    """A child that imports torch while this process imports the server and opens the model. Not for an engine that
    needs no torch or runs elsewhere, nor for several models, and not on one core, which has no time for both."""
    if tables or given.get("script") or given.get("ray") or num_cores() == 1:
        yield None
        return
    spawned = spawn_process(IMPORT_FIRST)
    try:
        yield spawned
    finally:
        spawned.end()


def _serve(
    model: str | None,
    host: str,
    port: int,
    given: Mapping[str, Any],
    tables: Sequence[ModelTable],
    started_s: float,
    spawned: SpawnedProcess | None,
) -> None:
    from quire.cli.access_settings import AccessSettings
    from quire.cli.serve_models import check_several, serve_several
    from quire.cli.served_model_options import read_served_model
    from quire.server.http.logs import LogWriter

    access = AccessSettings(host, given)
    check_kv_events(given["kv_events"])
    check_record(given["record"])
    check_several(model, given, tables)
    read_replica_limits(given)
    check_transport(given)
    for options in [table.given for table in tables] or [{**given, "model": model}]:
        engine_config(options["model"], options)
        read_served_model(options)
    report = LogWriter("plain", sys.stderr)  # never blocks on a slow reader, and never fails
    with listen(host, port) as listening, report.writing():  # refuses a used port before a model is loaded
        url = f"{access.scheme}://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        announce = partial(_announce, report.write, url, started_s)
        if tables:
            serve_several(tables, given, access, listening, report.write, announce)
        else:
            _serve_one(model, given, access, listening, report.write, announce, spawned)
        report.write("Stopped.")


def _serve_one(
    model: str | None,
    given: Mapping[str, Any],
    access: "AccessSettings",
    listening: socket.socket,
    say: Callable[[str], None],
    announce: Callable[[], None],
    spawned: SpawnedProcess | None,
) -> None:
    from quire.cli.console import StartupProgress
    from quire.engine.engine_process import launcher
    from quire.server.server import Server, ServerObservers, serve_until_signal

    progress = StartupProgress(say)
    say = progress.say
    config = replace(engine_config(model, given), tenant_weights=access.weights)
    say(f"quire {__version__} · {config.model or DEFAULT_MODEL.name}")
    launch = None if spawned is None else launcher(spawned)
    server_config = on_ray(replace(server_config_of(config, given), launch=launch), given)
    if server_config.limits is not None:
        say(f"  {'replicas':<20}{_describe_limits(server_config.limits)}")

    def report_ready(served: "ServedModel", info: "EngineInfo") -> None:
        say(f"  {'chat':<20}{chat_support(served)}")
        if server_config.prefill_engines:
            say(f"  {'split':<20}{_describe_split(server_config)}")
        progress.end()
        announce()

    tracing = open_tracer(given["otlp_endpoint"])
    observers = ServerObservers(
        lambda phase: say(f"  {phase.name:<10}{phase.seconds:5.1f} s   {phase.detail}"),
        report_ready,
        lambda line: say(time.strftime("%H:%M:%S ") + line),
        tracing,
    )

    def secure(server: Server) -> "ASGIApp":
        app = access.secure(server.app, server.metrics)
        access.serve_files([server.state], app)
        return app if tracing is None else tracing.around(app, server)

    with access.logging(), progress, contextlib.closing(tracing) if tracing else contextlib.nullcontext():
        make = partial(Server, server_config, observers)
        serve_until_signal(make, listening, secure, access.uvicorn_settings, given["drain_s"])


def open_tracer(endpoint: str | None) -> Any:
    """The exporter of traces, if a collector is named."""
    if endpoint is None:
        return None
    from quire.server.tracing import open_tracing

    return open_tracing(endpoint)


def server_config_of(config: EngineConfig, given: Mapping[str, Any]) -> "ServerConfig":
    """What to serve, with the model's files opened."""
    from quire.cli.console import progress_bars
    from quire.cli.served_model_options import read_served_model
    from quire.engine.kv_events import read_kv_events
    from quire.engine.open_model import open_model
    from quire.server.server import ServerConfig

    served_model = read_served_model(given)
    with progress_bars() as bars:
        opened = open_model(config, bars.fetched, scripted=served_model.script is not None)
    return ServerConfig(
        opened=opened,
        config=config,
        **served_model._asdict(),
        max_waiting=config.max_waiting or MAX_WAITING,
        max_waiting_tokens=given["max_waiting_tokens"],
        kv_events=read_kv_events(given.get("kv_events")),
        replicas=given.get("replicas") or 1,
        journal=None if given.get("record") is None else str(Path(given["record"]).absolute()),
        prefill_engines=given.get("prefill_engines") or 0,
        kv_transport=_transport_of(given),
    )


def _transport_of(given: Mapping[str, Any]) -> "KvTransport":
    """The engines of one machine share memory; NIXL opens ports, so without need or order it is not used."""
    from quire.engine.prefix_transfer import KvTransport

    chosen = KvTransport(given.get("kv_transport") or "auto")
    return KvTransport.MEMORY if chosen is KvTransport.AUTO and not given.get("ray") else chosen


def on_ray(config: "ServerConfig", given: Mapping[str, Any]) -> "ServerConfig":
    """With --ray, engines on the nodes of a cluster, which is joined here or started."""
    limits = read_replica_limits(given)
    if limits is None:
        return config
    from quire.engine.ray_engine import RayEngineProcess, connect_cluster
    from quire.server.autoscaling import check_room, needed_resources

    nodes = connect_cluster()
    needed = needed_resources(config.config, nodes)
    check_room(needed, nodes, limits, config.prefill_engines)
    if needed.num_gpus and config.prefill_engines:
        raise ConfigError(
            "--prefill-engines on Ray copies the KV caches of CPUs so far: omit it, or use --device cpu.",
            param="prefill_engines",
        )
    engine = replace(config.config, device="cuda" if needed.num_gpus else "cpu")
    return replace(config, config=engine, limits=limits, launch=partial(RayEngineProcess, *needed))


def _describe_limits(limits: "ReplicaLimits") -> str:
    if limits.min_replicas == limits.max_replicas:
        return f"{limits.min_replicas} on Ray"
    return f"{limits.min_replicas} to {limits.max_replicas} on Ray, as the queue needs them"


def _describe_split(config: "ServerConfig") -> str:
    limits = config.limits
    num_decode = str(config.replicas) if limits is None else _describe_limits(limits)
    counts = f"{config.prefill_engines} prefill and {num_decode} decode engines"
    return f"{counts} · a prompt goes to the former if all requests wait less so, by measured costs"


def chat_support(served: "ServedModel") -> str:
    from quire.text.template_worker import check_template

    if served.chat_template is None:
        return "no chat template: prompts only"
    try:
        check_template(served.chat_template)
    except ChatTemplateError as error:  # the model's own: --chat-template is checked before
        return f"prompts only: the model's chat template cannot be used: {error.message}"
    return served.model_format.description


def _announce(say: Callable[[str], None], url: str, started_s: float) -> None:
    seconds = time.monotonic() - started_s
    say(f"Ready in {seconds:.1f} s  →  {url}   (chat /  · engine /engine · docs /docs · metrics /metrics)")
    say(
        f"""  curl {url}/v1/chat/completions -H 'content-type: application/json' """
        """-d '{"messages":[{"role":"user","content":"hi"}]}'"""
    )


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # Python appends the address
        owner = port_owner(port) if error.errno == errno.EADDRINUSE else None
        reason += f" by {owner}" if owner else ""
        if error.errno is not None and (
            error.errno == errno.EADDRNOTAVAIL or error.errno < 0
        ):  # below 0: a name that was not resolved
            advice = "--host is an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
        else:
            advice = "Use another --port, or --port 0 for any free one"
        raise ConfigError(f"Cannot listen on {host}:{port}: {reason}. {advice}.", param="port") from error

"""Loads a model for a command, with its phases on stderr. A separate file: it imports torch."""

from collections.abc import Callable, Mapping

from quire.catalog.names import DEFAULT_MODEL
from quire.cli.console import err, progress_bars
from quire.cli.options import engine_config
from quire.config import EngineConfig
from quire.core.step import Runner
from quire.engine.build import BuiltEngine, build
from quire.engine.machine import cpu_features, inspect, pick_device
from quire.engine.startup import StartupPhase, StartupReporter
from quire.version import __version__

_SHOWN_FEATURES = {"avx512f": "AVX-512", "amx_bf16": "AMX", "avx2": "AVX2"}


def start(
    model: str | None,
    given: Mapping[str, object],
    *,
    report: bool,
    observe: Callable[[Runner], Runner] = lambda runner: runner,
) -> BuiltEngine:
    """The engine. With `report`, a line per phase; a progress bar on a terminal in any case."""
    config = engine_config(model, given)
    if report:
        err.print(headline(config))
    with progress_bars() as bars:
        return build(
            config, StartupReporter(bars.fetched, bars.loaded, _show_phase if report else lambda phase: None), observe
        )


def headline(config: EngineConfig) -> str:
    machine = inspect(pick_device(config.device))
    features = [name for flag, name in _SHOWN_FEATURES.items() if flag in cpu_features()]
    where = machine.device.upper()
    if machine.device == "cpu":
        where += f" ({', '.join([*features, f'{machine.num_cores} cores'])})"
    return f"quire {__version__} · {config.model or DEFAULT_MODEL.name} · {where}"


def _show_phase(phase: StartupPhase) -> None:
    err.print(f"  {phase.name:<10}{phase.seconds:5.1f} s   {phase.detail}")

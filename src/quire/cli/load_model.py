"""Opens a model for a command, then loads it, with its phases on stderr.

A wrong name, path or setting is refused before torch is imported: `open_named` needs none, and `start` imports it.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from quire.catalog.names import DEFAULT_MODEL
from quire.cli.console import err, progress_bars
from quire.cli.options import engine_config
from quire.config import EngineConfig
from quire.core.process import gc_postponed
from quire.core.step import Runner
from quire.engine.open_model import OpenedModel, open_model
from quire.engine.startup import StartupPhase, StartupReporter, import_without_torch, preload_torch
from quire.version import __version__

if TYPE_CHECKING:
    from quire.engine.build import BuiltEngine

_SHOWN_FEATURES = {"avx512f": "AVX-512", "amx_bf16": "AMX", "avx2": "AVX2"}


class NamedModel(NamedTuple):
    """The settings of a command, and the model that they name."""

    config: EngineConfig
    opened: OpenedModel


def open_named(model: str | None, given: Mapping[str, object]) -> NamedModel:
    """Checks the settings and opens the model's files; fetches them if they are not here. Torch's libraries are loaded
    while the tokenizer is read and what needs no torch is imported."""
    config = engine_config(model, given)
    with progress_bars() as bars, gc_postponed():
        opened = open_model(config, bars.fetched, found=preload_torch)
        import_without_torch()
    return NamedModel(config, opened)


def start(
    model: NamedModel,
    *,
    report: bool,
    observe: Callable[[Runner], Runner] = lambda runner: runner,
    planted_drafts: bool = False,
) -> "BuiltEngine":
    """The engine. With `report`, a line per phase; a progress bar on a terminal in any case."""
    from quire.engine.build import build

    if report:
        err.print(headline(model.config))
    with progress_bars() as bars:
        reporter = StartupReporter(bars.fetched, bars.loaded, _show_phase if report else lambda phase: None)
        return build(model.config, reporter, observe, opened=model.opened, planted_drafts=planted_drafts)


def headline(config: EngineConfig) -> str:
    from quire.engine.machine import cpu_features, inspect, pick_device

    machine = inspect(pick_device(config.device))
    features = [name for flag, name in _SHOWN_FEATURES.items() if flag in cpu_features()]
    where = machine.device.upper()
    if machine.device == "cpu":
        where += f" ({', '.join([*features, f'{machine.num_cores} cores'])})"
    return f"quire {__version__} · {config.model or DEFAULT_MODEL.name} · {where}"


def _show_phase(phase: StartupPhase) -> None:
    err.print(f"  {phase.name:<10}{phase.seconds:5.1f} s   {phase.detail}")

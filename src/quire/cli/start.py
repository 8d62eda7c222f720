"""Loads a model for a command, and says how that goes."""

from collections.abc import Mapping

from quire.cli.console import Bars, bars, err
from quire.cli.options import engine_config
from quire.engine.build import Built, Phase, Watch, build
from quire.engine.machine import cpu_features
from quire.version import __version__

_SHOWN_FEATURES = {"avx512f": "AVX-512", "amx_bf16": "AMX", "avx2": "AVX2"}


def start(model: str | None, given: Mapping[str, object], *, report: bool) -> Built:
    """The engine, with a line per phase if the report is wanted and a bar for whatever takes long."""
    config = engine_config(model, given)
    phases: list[Phase] = []
    with bars() as drawn:
        built = build(config, _watch(drawn, phases))
    if report:
        err.print(headline(built))
        for phase in phases:
            err.print(f"  {phase.name:<10}{phase.seconds:5.1f} s   {phase.detail}")
    return built


def headline(built: Built) -> str:
    features = [name for flag, name in _SHOWN_FEATURES.items() if flag in cpu_features()]
    where = built.machine.device.upper()
    if built.machine.device == "cpu":
        where += f" ({', '.join([*features, f'{built.machine.num_cores} cores'])})"
    return f"quire {__version__} · {built.name} · {built.dtype} · {where}"


def _watch(drawn: Bars, phases: list[Phase]) -> Watch:
    return Watch(fetching=drawn.fetched, loading=drawn.loaded, finished=phases.append)

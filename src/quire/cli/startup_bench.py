"""`quire bench startup`: what a start is made of, cold and warm side by side."""

import json
import statistics
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Many

from rich.table import Table

from quire.bench.circumstances import circumstances
from quire.bench.startup import Start, measure_starts
from quire.cli.console import err, out
from quire.cli.options import engine_config
from quire.cli.start import headline
from quire.engine.machine import pick_device

_CACHES = ("cold", "warm")


def startup(model: str | None, repeats: int, batch: bool, as_json: bool, given: Mapping[str, object]) -> None:
    config = engine_config(model, given)
    starts = measure_starts(config, repeats=repeats, batch=batch, say=lambda text: err.print(text, style="dim"))
    if as_json:
        plain = [{**start._asdict(), "phases": [phase._asdict() for phase in start.phases]} for start in starts]
        facts = circumstances(sys.argv[1:], pick_device(config.device).type)
        print(json.dumps({"bench": "startup", "model": model, "batch": batch, "starts": plain, **facts}))
        return
    out.print(_table(starts, headline(config)))
    out.print("Medians, in seconds. Cold: no compiled kernels; files that were read before are in memory in both.")


def _table(starts: Many[Start], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("", "cold", "warm", "what"):
        table.add_column(column, justify="right" if column in ("cold", "warm") else "left")
    for place, phase in enumerate(starts[0].phases):
        seconds = [_median([start.phases[place].seconds for start in _of(starts, caches)]) for caches in _CACHES]
        table.add_row(phase.name, *seconds, phase.detail)
    table.add_row("to the first token", *(_median([start.seconds for start in _of(starts, c)]) for c in _CACHES), "")
    return table


def _of(starts: Many[Start], caches: str) -> list[Start]:
    return [start for start in starts if start.caches == caches]


def _median(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f}"

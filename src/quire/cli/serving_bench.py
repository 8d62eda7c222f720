"""`quire bench serve`: what the server costs, shown as a table or as one JSON object."""

import json
from dataclasses import asdict

from rich.table import Table

from quire.bench.serving import Load, Repeat, measure_serving, median_ratio
from quire.cli.console import err, out
from quire.cli.extras import check_serving
from quire.version import __version__


def serve(load: Load, repeats: int, as_json: bool) -> None:
    check_serving()
    measured = measure_serving(load, repeats, lambda text: err.print(text, style="dim"))
    if as_json:
        print(json.dumps(_summary(load, measured)))
        return
    out.print(
        f"{load.num_streams} streams of {load.num_output} tokens · {load.model or 'the default model'} · "
        f"quire {__version__}"
    )
    table = Table()
    columns = ("repeat", "engine alone tok/s", "over HTTP tok/s", "HTTP / alone", "CPU s: engine alone", "engine",
               "front", "client")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for number, each in enumerate(measured, 1):
        speeds = (f"{load.num_tokens / each.alone_s:.1f}", f"{load.num_tokens / each.http_s:.1f}", f"{each.ratio:.3f}")
        costs = (each.alone_cpu_s, each.engine_cpu_s, each.front_cpu_s, each.client_cpu_s)
        table.add_row(str(number), *speeds, *(f"{cost:.2f}" for cost in costs))
    out.print(table)
    front_us = 1e6 * sum(each.front_cpu_s for each in measured) / (load.num_tokens * len(measured))
    out.print(f"HTTP / alone, median: {median_ratio(measured):.3f} · front: {front_us:.0f} µs of CPU per token")


def _summary(load: Load, measured: list[Repeat]) -> dict[str, object]:
    return {
        "quire": __version__,
        **asdict(load),
        "repeats": [{**asdict(each), "ratio": each.ratio} for each in measured],
        "median_ratio": median_ratio(measured),
    }

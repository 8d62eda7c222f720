"""`quire bench kernels`: a line for each step that attention is measured by, as a table or as JSON."""

import json
from collections.abc import Sequence

import torch
from rich.table import Table

from quire.bench.attention_work import Work
from quire.bench.kernels import Figure, HeadShape, measure_kernels
from quire.cli.console import out


def kernels(shape: HeadShape, works: Sequence[Work], beside: str | None, as_json: bool) -> None:
    figures = measure_kernels(shape, beside, works)
    if as_json:
        said = {**shape._asdict(), "dtype": str(shape.dtype).removeprefix("torch."), "beside": beside}
        for figure in figures:
            print(json.dumps({**figure._asdict(), **said, "device": torch.cuda.get_device_name()}), flush=True)
        return
    table = Table()
    for column in ("step", "µs", "rate", *((f"{beside}, µs", f"by {beside}") if beside else ())):
        table.add_column(column, justify="left" if column == "step" else "right")
    for figure in figures:
        table.add_row(*_cells(figure, beside is not None))
    out.print(table)


def _cells(figure: Figure, compared: bool) -> list[str]:
    cells = [figure.name, f"{figure.microseconds:.1f}", f"{figure.rate:.2f} {figure.unit}"]
    theirs = figure.beside_microseconds
    if theirs is not None:
        cells += [f"{theirs:.1f}", f"{figure.microseconds / theirs:.2f}"]
    elif compared:
        cells += ["–", "–"]  # it does no such step by itself
    return cells

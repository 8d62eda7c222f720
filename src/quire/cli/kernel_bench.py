"""`quire bench kernels`: a line for each kernel, as a table or as JSON."""

import json

import torch
from rich.table import Table

from quire.bench.kernels import HeadShape, measure_kernels
from quire.cli.console import out


def kernels(heads: int, kv_heads: int, head_dim: int, as_json: bool) -> None:
    figures = measure_kernels(HeadShape(heads, kv_heads, head_dim))
    if as_json:
        for figure in figures:
            print(json.dumps({**figure._asdict(), "device": torch.cuda.get_device_name()}))
        return
    table = Table()
    for column in ("kernel", "µs", "rate"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for figure in figures:
        table.add_row(figure.name, f"{figure.microseconds:.1f}", f"{figure.rate:.2f} {figure.unit}")
    out.print(table)

"""`quire models`: lists models and their paths, fetches one, verifies one."""

import json

from rich.table import Table

from quire.catalog import hub
from quire.catalog.listing import ModelState, entries
from quire.catalog.locate import locate
from quire.catalog.names import DEFAULT_MODEL, short_name
from quire.catalog.store import models_folder
from quire.catalog.store import verify as verify_file
from quire.cli.console import out, progress_bars, size
from quire.core.errors import ModelNotFound
from quire.formats.presets import SHAPES


def show(as_json: bool) -> None:
    listed = entries()
    if as_json:
        for entry in listed:
            print(json.dumps({**entry._asdict(), "where": str(entry.where), "state": entry.state.value}))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("model", "size", "state", "license", "where"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for entry in listed:
        default = " (default)" if entry.name == DEFAULT_MODEL.name else ""
        table.add_row(
            entry.name + default,
            size(entry.size_bytes),
            entry.state.value,
            entry.license or "",
            str(entry.where),
        )
    out.print(table)
    if any(entry.state is not ModelState.PRESENT for entry in listed):
        out.print("\nquire models --fetch NAME brings a model here.")
    out.print(f"Shapes for --load-format dummy: {', '.join(SHAPES)}")


def fetch(model: str | None, revision: str | None, token: str | None) -> None:
    with progress_bars() as bars:
        located = locate(model, fetch_hub=hub.fetch, revision=revision, token=token, report=bars.fetched)
    print(located.path)


def verify(model: str | None) -> None:
    known = short_name(model or DEFAULT_MODEL.name)
    if known is None:
        raise ModelNotFound(f"Only models of the catalog have a checksum to verify; {model} is not one.")
    with progress_bars() as bars:
        verify_file(known, models_folder(), bars.fetched)
    print(f"{known.name}: the checksum is right.")

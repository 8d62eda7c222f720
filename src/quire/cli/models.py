"""`quire models`: lists the models that can be named on this machine, fetches one, verifies one."""

import json
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from quire.catalog import hub
from quire.catalog.hub import cached_models
from quire.catalog.locate import fetched_models, locate
from quire.catalog.names import DEFAULT_MODEL, SHORT_NAMES, short_name
from quire.catalog.store import models_folder, present
from quire.catalog.store import verify as verify_file
from quire.cli.console import out, progress_bars, size
from quire.core.errors import ModelNotFound
from quire.formats.presets import SHAPES


class ModelState(Enum):
    PRESENT = "present"
    ABSENT = "absent"


class ModelEntry(NamedTuple):
    """One line of the list. `name` is what to type; license None: unknown."""

    name: str
    where: Path
    size_bytes: int
    state: ModelState
    license: str | None


def entries(folder: Path | None = None, hub_folder: Path | None = None) -> list[ModelEntry]:
    """Short names, then files in the cache folder, then complete models in the hub's cache."""
    folder = models_folder() if folder is None else folder
    listed = []
    for model in SHORT_NAMES:
        state = ModelState.PRESENT if present(model, folder) else ModelState.ABSENT
        listed.append(ModelEntry(model.name, folder / model.file_name, model.size_bytes, state, model.license))
    taken = {entry.where for entry in listed}
    listed += [
        ModelEntry(located.name, located.path, _size_bytes(located.path), ModelState.PRESENT, None)
        for located in fetched_models(folder).values()
        if located.path not in taken
    ]
    listed += [
        ModelEntry(str(cached.name), cached.path, cached.size_bytes, ModelState.PRESENT, None)
        for cached in cached_models(hub_folder)
    ]
    return listed


def _size_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


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

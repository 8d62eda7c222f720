"""The models that can be named on this machine, for `quire models`. Fetches nothing."""

from enum import Enum
from pathlib import Path
from typing import NamedTuple

from quire.catalog.hub import cached_models
from quire.catalog.locate import fetched_models
from quire.catalog.names import SHORT_NAMES
from quire.catalog.store import models_folder, present


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

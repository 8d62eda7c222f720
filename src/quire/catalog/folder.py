"""Tells a model on this disk from any other file or folder, by names alone."""

import json
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["folder", "gguf"]


class ModelFiles(NamedTuple):
    """What to load, and how to read it."""

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
        return NoModel("is a file but no .gguf; give the folder that holds config.json, or a .gguf file")
    # An adapter is no model; whoever opens the folder says so better than we could.
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

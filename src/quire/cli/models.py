"""`quire list`, `pull`, `show` and `rm`: the models that can be named on this machine.

The client of the hub is imported where it is needed: a wrong name is refused before.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from quire.catalog.locate import Located, fetched_models, locate
from quire.catalog.names import DEFAULT_MODEL, SHORT_NAMES, HubName, short_name
from quire.catalog.store import Report, models_folder, present
from quire.catalog.store import verify as verify_file
from quire.cli.console import err, out, progress_bars, size
from quire.cli.streams import INTERRUPTED
from quire.core.errors import ModelNotFound, shown
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
    from quire.catalog.hub import cached_models

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


def list_models(as_json: bool) -> None:
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
        out.print("\nquire pull NAME brings a model here.")
    out.print(f"Shapes for --load-format dummy: {', '.join(SHAPES)}")


def pull(model: str | None, revision: str | None, token: str | None) -> None:
    """Download a model; print its path."""
    try:
        with progress_bars() as bars:
            located = locate(model, fetch_hub=_fetch_hub, revision=revision, token=token, report=bars.fetched)
    except KeyboardInterrupt:
        is_whole = short_name(model or DEFAULT_MODEL.name) is not None  # one file, by pip
        again = "Nothing was kept; the same command begins again." if is_whole else "The same command resumes it."
        err.print(f"Interrupted. {again}")
        raise SystemExit(INTERRUPTED) from None
    print(located.path)


def _fetch_hub(wanted: HubName, *, revision: str | None, token: str | None, report: Report) -> Path:
    """What the hub has now; without the hub, what is here."""
    from quire.catalog.hub import compare_cached, fetch

    cached = compare_cached(wanted, revision, token)
    if cached is not None and cached.newest is None:
        err.print("The hub cannot be asked whether it has a newer revision; this one is here.", style="dim")
    if cached is not None and cached.newest in (None, cached.commit):
        return cached.path
    return fetch(wanted, revision=revision, token=token, report=report, update=True)


def show(model: str | None, revision: str | None, as_json: bool) -> None:
    """What the files of a model on this machine say of it. Downloads nothing, loads no weights."""
    located = _on_this_machine(model, revision)
    facts = _facts(located)
    if as_json:
        print(json.dumps(facts))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
    out.print(table)


def verify(model: str | None, revision: str | None) -> None:
    """Read a model's files and compare their checksums."""
    known = short_name(model or DEFAULT_MODEL.name)
    with progress_bars() as bars:
        if known is not None:
            verify_file(known, models_folder(), bars.fetched)
            print(f"{known.name}: the checksum is right.")
            return
        located = _on_this_machine(model, revision)
        from quire.catalog.hub import verify_cached

        num_compared = verify_cached(located.path, bars.fetched)
    if not num_compared:
        raise ModelNotFound(
            f"Only models of the catalog and of the hub's cache have checksums to verify; {model} is not one."
        )
    print(f"{located.name}: the checksums of {num_compared} files are right.")


def remove(names: Sequence[str]) -> None:
    """Delete models from quire's folder and from the hub's cache. All names are checked first."""
    listed = {entry.name.lower(): entry for entry in entries() if entry.state is ModelState.PRESENT}
    aliases = {alias: known.name for known in SHORT_NAMES for alias in known.aliases}
    chosen = []
    for name in map(str.strip, names):
        entry = listed.get(aliases.get(name.lower(), name.lower()))
        if entry is None:
            near = get_close_matches(name.lower(), listed, n=1)
            hint = f" Did you mean {listed[near[0]].name}?" if near else ""
            raise ModelNotFound(f"There is no model {shown(name)} to remove; `quire list` shows what is here.{hint}")
        chosen.append(entry)
    from quire.catalog.hub import cached_models, remove_cached

    cached = {str(each.name): each for each in cached_models()}
    for entry in chosen:
        num_bytes = entry.size_bytes
        if entry.name in cached:
            num_bytes = remove_cached(cached[entry.name])
        elif entry.where.is_file():
            entry.where.unlink()
        else:
            shutil.rmtree(entry.where)
        print(f"removed {entry.name}, {size(num_bytes)}")


def _on_this_machine(model: str | None, revision: str | None) -> Located:
    """Find a model without a download."""
    known = short_name(model or DEFAULT_MODEL.name)
    if known is not None and not present(known, models_folder()):
        raise ModelNotFound(f"{known.name} is not on this machine; quire pull {known.name} brings it here.")
    return locate(model, fetch_hub=_cached_only, revision=revision)


def _cached_only(wanted: HubName, *, revision: str | None, token: str | None, report: Report) -> Path:
    from quire.catalog.hub import find_cached

    try:
        return find_cached(wanted, revision)
    except ModelNotFound:
        raise
    except Exception as error:  # the library's, for a model that is not in its cache
        raise ModelNotFound(f"{wanted} is not on this machine; quire pull {wanted} brings it here.") from error


def _facts(located: Located) -> dict[str, str | int]:
    from quire.engine.model_format import find_model_format  # of these only show has use
    from quire.engine.open_model import open_located, open_tokenizer

    checkpoint = open_located(located)
    spec = checkpoint.spec
    facts: dict[str, str | int] = {
        "model": located.name,
        "path": str(located.path),
        "format": "GGUF" if located.kind == "gguf" else "safetensors",
        "family": spec.family,
        "parameters": checkpoint.num_parameters,
        "weights": f"{size(checkpoint.num_bytes)}: {', '.join(checkpoint.encoding_bytes)}",
        "context": spec.max_positions,
        "layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "heads": f"{spec.num_heads} of {spec.head_dim}, {spec.num_kv_heads} for keys and values",
        "vocabulary": spec.vocab_size,
        "kv_cache": f"{size(spec.kv_bytes_per_token(2))} a token in 16 bits",
    }
    defaults = asdict(checkpoint.defaults)
    said = [f"{name} {value:g}" for name, value in defaults.items() if value is not None]
    facts["sampling_defaults"] = ", ".join(said) or "none"
    tokenizer = open_tokenizer(checkpoint)
    template = None if tokenizer is None else tokenizer.chat_template
    facts["chat"] = "no chat template" if template is None else find_model_format(template, tokenizer).description
    known = short_name(located.name)
    if (license_name := known.license if known else checkpoint.metadata.get("general.license")) is not None:
        facts["license"] = str(license_name)
    return facts

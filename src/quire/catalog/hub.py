"""Models of the Hugging Face hub, from its local cache or from the network.

Fetches weights, configuration and tokenizers only; never code or pickles.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import scan_cache_dir, snapshot_download
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from quire.catalog.locate import gguf_files, missing_files
from quire.catalog.names import HubName, suggest
from quire.catalog.store import FetchPhase, FetchProgress, Report
from quire.core.errors import FetchFailed, ModelNotFound, QuireError, UnsupportedModel

_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
# Subfolders hold other formats (original/, onnx/); `consolidated` is a second copy of the same weights.
_IGNORED = ["*/*", "consolidated*"]


def fetch(hub_name: HubName, *, revision: str | None, token: str | None, report: Report) -> Path:
    """The folder, or the one GGUF file, of a hub model."""
    with suppress(Exception):  # not in the cache: the exception depends on the version of the library
        cached = _find(hub_name, _snapshot(hub_name, revision, token, report, local=True))
        if cached is not None:
            return cached
    try:
        folder = _snapshot(hub_name, revision, token, report, local=False)
    except Exception as error:  # the library raises several kinds, which change with its HTTP client
        raise _as_quire_error(hub_name, revision, error) from error
    found = _find(hub_name, folder)
    if found is None:
        raise _incomplete(hub_name, folder)
    return found


def _snapshot(hub_name: HubName, revision: str | None, token: str | None, report: Report, *, local: bool) -> Path:
    return Path(
        snapshot_download(
            hub_name.repository,
            revision=revision,
            token=token,
            allow_patterns=_PATTERNS if hub_name.file_name is None else [hub_name.file_name],
            ignore_patterns=_IGNORED if hub_name.file_name is None else None,
            local_files_only=local,
            tqdm_class=_reporting_bar(report),
        )
    )


def _find(hub_name: HubName, folder: Path) -> Path | None:
    if hub_name.file_name is None:
        return None if missing_files(folder) else folder
    path = folder / hub_name.file_name
    return path if path.is_file() else None


def _reporting_bar(report: Report) -> type[tqdm]:
    """A progress bar that draws nothing. The library opens several over the same bytes: the furthest counts."""
    furthest = 0

    class ReportingBar(tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            self.counts_bytes = kwargs.get("unit") == "B"
            self.done = 0
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            nonlocal furthest
            self.done += int(n or 0)
            if self.counts_bytes and self.done > furthest:
                furthest = self.done
                report(FetchProgress(FetchPhase.DOWNLOADING, furthest, int(self.total or 0)))

    return ReportingBar


def _as_quire_error(hub_name: HubName, revision: str | None, error: Exception) -> QuireError:
    name = hub_name.repository
    if isinstance(error, GatedRepoError):
        return FetchFailed(
            f"{name} is gated: accept its licence on its page at the hub, then pass a token of your account "
            f"(--token, or `hf auth login` once)."
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFound(
            f"The hub has no model {name}, or it is private and needs a token (--token). {suggest(name)}"
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFound(
            f"{name} has no revision {revision}; give a branch, a tag or a commit of it.", param="revision"
        )
    if isinstance(error, HFValidationError):
        return ModelNotFound(f"{name} is not a hub id: {error}. {suggest(name)}")
    return FetchFailed(
        f"{name} is not in the hub's cache on this machine, and could not be fetched "
        f"({_first_line(error)}). Try again with a network, or copy the model here and give its path; "
        f"`quire models` lists what is here."
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _incomplete(hub_name: HubName, folder: Path) -> QuireError:
    if hub_name.file_name is not None:
        return ModelNotFound(f"{hub_name.repository} has no file {hub_name.file_name}; look at its list of files.")
    if (folder / "adapter_config.json").is_file():
        return UnsupportedModel(
            f"{hub_name.repository} is an adapter, which quire does not read yet; merge it into its model."
        )
    return UnsupportedModel(
        f"{hub_name.repository} lacks {', '.join(missing_files(folder))}: quire reads models as safetensors "
        f"with config.json and tokenizer.json, or one GGUF file as {hub_name.repository}:FILE.gguf."
    )


class CachedModel(NamedTuple):
    """A model in the hub's cache that has all its files."""

    name: HubName
    path: Path
    size_bytes: int


def cached_models(cache_folder: Path | None = None) -> Iterator[CachedModel]:
    """The models in the hub's cache, downloaded by any program; of each the newest revision."""
    try:
        repositories = scan_cache_dir(cache_folder).repos
    except (CacheNotFound, OSError):  # none yet, or another user's
        return
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        newest = max(repository.revisions, key=lambda each: each.last_modified)
        folder = newest.snapshot_path
        if not missing_files(folder):
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.is_file())
            yield CachedModel(HubName(repository.repo_id, None), folder, size)
        for file in gguf_files(folder):
            yield CachedModel(HubName(repository.repo_id, file.name), file, file.stat().st_size)

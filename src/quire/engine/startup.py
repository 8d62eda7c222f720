"""The start of an engine: its process, its phases and callbacks for their progress, and torch's libraries.

Imports little: an engine process begins to load torch's libraries before it imports the engine.
"""

import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from quire.catalog.store import Report, ignore
from quire.core.process import signals_held

IMPORT_FIRST = "--import-first"  # an engine's option: import torch before it knows what to serve


class SpawnedProcess(NamedTuple):
    """A subprocess that is or will be an engine, and our end of its socket."""

    process: "subprocess.Popen[bytes]"
    socket: socket.socket

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()


def spawn_process(*options: str) -> SpawnedProcess:
    ours, theirs = socket.socketpair()
    with theirs:
        return SpawnedProcess(spawn_engine(theirs, *options), ours)


def spawn_engine(connection: socket.socket, *options: str) -> "subprocess.Popen[bytes]":
    """An engine that has this socket, and ends with this process."""
    command = [sys.executable, "-m", "quire.engine.engine_main", str(connection.fileno()), str(os.getpid()), *options]
    with signals_held():
        return subprocess.Popen(command, pass_fds=[connection.fileno()], stdin=subprocess.DEVNULL)


class StartupPhase(NamedTuple):
    """One line of the start-up report."""

    name: str
    seconds: float
    detail: str


@dataclass(slots=True)
class StartupReporter:
    """Callbacks: downloads, weights as they load, and each phase when it is done."""

    fetching: Report = ignore
    loading: Callable[[int, int], None] = lambda done, total: None
    finished: Callable[[StartupPhase], None] = lambda phase: None
    _since: float = field(default_factory=time.monotonic)

    def done(self, name: str, detail: str) -> None:
        now = time.monotonic()
        self.finished(StartupPhase(name, now - self._since, detail))
        self._since = now


# In the order of torch's own import, with the flags that it uses.
_TORCH_LIBRARIES = {"libtorch_global_deps.so": os.RTLD_NOW | os.RTLD_GLOBAL, "libtorch_python.so": os.RTLD_NOW}


# What an engine imports before torch and what the dynamic linker loads: it loads one library at a time.
_EXTENSIONS = ("numpy", "tokenizers", "msgspec", "mmap", "lzma", "csv", "decimal", "uuid", "queue", "yaml")


def preload_torch() -> Thread | None:
    """Load torch's libraries in a thread. `import torch` does it too, and no other thread runs Python meanwhile: this
    one waits for the dynamic linker without Python's lock. What needs the linker next would wait for it with the lock,
    so it is done before: extension modules are imported, and the tokenizers library is used once (the linker allocates
    its thread-local variables). None: not Linux, no torch, or torch is imported already."""
    found = find_spec("torch") if sys.platform == "linux" and "torch" not in sys.modules else None
    if found is None or found.origin is None:
        return None
    for name in _EXTENSIONS:
        with suppress(ImportError):  # some are optional
            import_module(name)
    with suppress(ImportError):
        tokenizers = import_module("tokenizers")
        tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).encode_batch_fast(["a"])
    thread = Thread(target=_load_libraries, args=(Path(found.origin).parent / "lib",), name="quire-preload")
    thread.start()
    return thread


# What every engine imports and needs no torch, with what they import: its scheduler, mostly.
_WITHOUT_TORCH = ("quire.engine.engine", "quire.engine.open_model", "quire.engine.build_scheduler")


def import_without_torch() -> None:
    """While `preload_torch` goes on: half of an engine's modules."""
    for name in _WITHOUT_TORCH:
        import_module(name)


def _load_libraries(folder: Path) -> None:
    """A library that cannot be loaded is left to the import, which says why."""
    dlopen = ctypes.CDLL(None).dlopen  # not `CDLL(path)`, which keeps Python's lock
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, flags in _TORCH_LIBRARIES.items():
        dlopen(os.fsencode(folder / name), flags)

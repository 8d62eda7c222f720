"""Startup of an engine process, before its loop."""

import os
import queue
import select
import socket
import sys
import threading
from pathlib import Path
from shutil import which
from subprocess import PIPE
from types import SimpleNamespace

import pytest

from quire.cli import serve
from quire.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine import engine_main as process
from quire.engine import engine_server
from quire.engine.engine_process import launcher
from quire.engine.messages import LoadProgress, StartEngine
from quire.engine.startup import IMPORT_FIRST, StartupPhase, StartupReporter, spawn_process
from quire.engine.stats import EngineInfo, MemoryUsage
from quire.engine.wire import ToFront, pack
from tests import children
from tests.server.server_process import PATIENCE_S

INFO = EngineInfo("m", 64, 100, 64, 64, 16, "cpu", "float32", MemoryUsage(), 0, os.getpid())


def test_readiness_is_reported_before_the_loop_runs_and_without_a_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop reads it when there is nothing else to do."""
    ours, theirs = socket.socketpair()
    engine = SimpleNamespace(grammars=SimpleNamespace())  # without `load_vocabulary`
    received: list[bytes] = []

    def serve(served: object, *_: object) -> SimpleNamespace:
        assert served is engine
        return SimpleNamespace(run=lambda: received.append(theirs.recv(1 << 16)))

    monkeypatch.setattr(process, "leave_signals_to_parent", lambda: None)
    monkeypatch.setattr(
        process, "die_with_parent", lambda parent: threading.current_thread() is threading.main_thread()
    )
    monkeypatch.setattr(process, "_build", lambda order, watch: (engine, INFO))
    monkeypatch.setattr(process, "freeze_heap", lambda: None)
    monkeypatch.setattr(engine_server, "EngineServer", serve)
    theirs.sendall(pack(StartEngine(EngineConfig(), None)))
    assert process.main(ours.detach(), os.getppid()) == 0
    assert received == [pack(INFO)]
    theirs.close()


def test_the_engine_of_a_server_reads_the_tokenizer_with_the_vocabulary(shallow_model_path: Path) -> None:
    config = EngineConfig(model=str(shallow_model_path), device="cpu", threads=1, kv_cache_memory=1 << 24)
    engine, _ = process._build(StartEngine(config, None), StartupReporter())
    assert engine.grammars is not None
    opened, _ = engine.grammars._vocabulary
    assert "tokenizer" not in vars(opened)
    engine.grammars.load_vocabulary()
    assert opened.tokenizer is vars(opened)["tokenizer"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the import loads them")
def test_the_libraries_of_torch_are_loaded_without_its_import_and_no_other_beside_them() -> None:
    """Another one would wait for them, and all threads with it."""
    code = """
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
def extensions():
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    return {name for name, file in files.items() if file.endswith(tuple(EXTENSION_SUFFIXES))}
from quire.engine.startup import import_without_torch, preload_torch
preload_torch().join()
assert "torch" not in sys.modules
assert "libtorch_cpu.so" in Path("/proc/self/maps").read_text()
before = extensions()
import_without_torch()
import quire.engine.engine_server, quire.formats.open_checkpoint
assert "quire.sched.scheduler" in sys.modules and "torch" not in sys.modules
print(sorted(extensions() - before))
import torch
assert torch.ones(3).sum() == 3
assert preload_torch() is None
"""
    child = children.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (child.returncode, child.stdout) == (0, "[]\n"), child.stdout + child.stderr


@pytest.mark.skipif(sys.platform != "linux" or which("gcc") is None, reason="needs Linux and gcc")
def test_the_tokenizer_does_not_wait_for_the_libraries(default_model_path: Path, tmp_path: Path) -> None:
    """The library that is loaded instead is done when a tokenizer is there: nothing on the way waits for the linker."""
    (tmp_path / "slow.c").write_text(
        "#include <unistd.h>\n"
        "__attribute__((constructor)) static void wait_for_a_byte(void) { char byte; read(0, &byte, 1); }\n"
    )
    children.run(["gcc", "-shared", "-fPIC", "-o", "slow.so", "slow.c"], cwd=tmp_path, check=True)
    code = f"""
import ctypes, os
from pathlib import Path
from shutil import which
from subprocess import PIPE
from quire.engine import startup
def load(folder):
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    assert dlopen({os.fsencode(tmp_path / "slow.so")!r}, os.RTLD_NOW)
startup._load_libraries = load
import quire.engine.engine_server, quire.engine.open_model
thread = startup.preload_torch()
while not any("slow.so" in line for line in Path("/proc/self/maps").read_text().splitlines()):
    pass
from quire.formats.open_checkpoint import open_checkpoint
checkpoint = open_checkpoint(Path({os.fspath(default_model_path)!r}))
print(quire.engine.open_model.open_tokenizer(checkpoint).encode("Hello world"), thread.is_alive(), flush=True)
thread.join()
"""
    pipes = {"stdin": PIPE, "stdout": PIPE, "text": True}
    with children.started([sys.executable, "-c", code], **pipes) as child:
        ready = select.select([child.stdout], [], [], PATIENCE_S)[0]
        seen = child.stdout.readline() if ready else "nothing: it waits for the linker"
        child.stdin.write("x")
        child.stdin.close()
        assert seen == "[19556, 905] True\n"
        assert child.wait() == 0


def test_the_first_engine_is_the_process_that_imported_and_later_ones_are_new(default_model_path: Path) -> None:
    spawned = spawn_process(IMPORT_FIRST)
    launch = launcher(spawned)
    messages: queue.SimpleQueue[ToFront | None] = queue.SimpleQueue()
    first = launch(messages.put, lambda: messages.put(None))
    assert first.pid == spawned.process.pid
    later = launch(lambda message: None, lambda: None)
    try:
        assert later.pid != first.pid
        first.start()
        first.send(StartEngine(EngineConfig(device="cpu", threads=1, kv_cache_memory=1 << 24), None))
        while isinstance(output := messages.get(timeout=PATIENCE_S), StartupPhase | LoadProgress):
            pass
        assert isinstance(output, EngineInfo) and output.pid == first.pid
    finally:
        first.close()
        later.close()
    assert messages.get(timeout=PATIENCE_S) is None
    spawned.end()  # it has ended already


@pytest.mark.parametrize("given", [{}, {"script": "script.jsonl"}, {"ray": True}])
def test_a_server_that_is_refused_leaves_no_process_that_imports(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError), serve._prespawned(given, ()) as spawned:
        assert (spawned is None) == bool(given)
        raise ConfigError("The port is used.")
    assert spawned is None or (spawned.process.returncode is not None and spawned.socket.fileno() == -1)


def test_one_core_imports_once_it_is_known_what_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "num_cores", lambda: 1)
    with serve._prespawned({}, ()) as spawned:
        assert spawned is None

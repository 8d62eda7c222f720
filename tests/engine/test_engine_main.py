"""Startup of an engine process, before its loop."""

import os
import socket
import threading
from types import SimpleNamespace

import pytest

from quire.config import EngineConfig
from quire.engine import engine_main as process
from quire.engine.messages import StartEngine
from quire.engine.stats import EngineInfo, MemoryUsage
from quire.engine.wire import pack

INFO = EngineInfo("m", 64, 100, 64, 64, 16, "cpu", "float32", MemoryUsage(), 0, os.getpid())


@pytest.mark.parametrize("grammars", [SimpleNamespace(), None])
def test_readiness_is_reported_after_the_vocabulary_is_read(monkeypatch: pytest.MonkeyPatch, grammars: object) -> None:
    """Reading it blocks all threads."""
    ours, theirs = socket.socketpair()
    order: list[str] = []

    def load_vocabulary(woken: object) -> None:
        assert woken is grammars
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        order.append("awake")

    monkeypatch.setattr(process, "leave_signals_to_parent", lambda: None)
    monkeypatch.setattr(
        process, "die_with_parent", lambda parent: threading.current_thread() is threading.main_thread()
    )
    monkeypatch.setattr(process, "_build", lambda order, watch: (SimpleNamespace(grammars=grammars), INFO))
    monkeypatch.setattr(process, "freeze_heap", lambda: None)
    monkeypatch.setattr(process, "load_vocabulary", load_vocabulary)
    monkeypatch.setattr(process, "EngineServer", lambda *_: SimpleNamespace(run=lambda: order.append("runs")))
    theirs.sendall(pack(StartEngine(EngineConfig(), None)))
    assert process.main(ours.detach(), os.getppid()) == 0
    assert order == (["runs"] if grammars is None else ["awake", "runs"])
    assert theirs.recv(1 << 16), "and then it is reported"
    theirs.close()

"""The life of an engine process, as far as it is decided before its loop begins."""

import os
import socket
import threading
from types import SimpleNamespace

import pytest

from quire.config import EngineConfig
from quire.engine import engine_main as process
from quire.engine.messages import StartEngine
from quire.engine.stats import EngineInfo, MemoryLedger
from quire.engine.wire import pack

FACTS = EngineInfo("m", 64, 100, 64, 64, 16, "cpu", "float32", MemoryLedger(), 0, os.getpid())


@pytest.mark.parametrize("grammars", [SimpleNamespace(), None])
def test_nobody_is_told_that_it_is_ready_before_the_vocabulary_is_read(
    monkeypatch: pytest.MonkeyPatch, grammars: object
) -> None:
    """Reading it holds up all threads."""
    ours, theirs = socket.socketpair()
    order: list[str] = []

    def wake(woken: object) -> None:
        assert woken is grammars
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        order.append("awake")

    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(
        process, "die_with_parent", lambda parent: threading.current_thread() is threading.main_thread()
    )
    monkeypatch.setattr(process, "_build", lambda order, watch: (SimpleNamespace(grammars=grammars), FACTS))
    monkeypatch.setattr(process, "freeze_heap", lambda: None)
    monkeypatch.setattr(process, "wake", wake)
    monkeypatch.setattr(process, "EngineServer", lambda *_: SimpleNamespace(run=lambda: order.append("runs")))
    theirs.sendall(pack(StartEngine(EngineConfig(), None)))
    assert process.main(ours.detach(), os.getppid()) == 0
    assert order == (["runs"] if grammars is None else ["awake", "runs"])
    assert theirs.recv(1 << 16), "and then it is told"
    theirs.close()

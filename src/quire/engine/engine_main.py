"""`python -m quire.engine.engine_main FD`: an engine as a process of its own, at the end of an inherited socket.

It dies with its parent: by the kernel's word where there is one (Linux), and when the socket closes everywhere.
Signals that people send to a terminal's programs are left to the parent, which lets the engine finish its work.
"""

import logging
import signal
import socket
import sys
import time
from pathlib import Path

from quire.core.errors import QuireError
from quire.core.process import PARENT_SIGNALS, die_with_parent, freeze_heap, gc_frozen_imports
from quire.engine.build_scheduler import wake
from quire.engine.engine import Engine
from quire.engine.engine_server import EngineServer
from quire.engine.messages import LoadProgress, Refused, StartEngine
from quire.engine.startup import StartupReporter
from quire.engine.stats import EngineInfo
from quire.engine.wire import FrameDecoder, Message, pack, read_for_engine


def main(descriptor: int, parent: int) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s", stream=sys.stderr)
    for number in PARENT_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENT_SIGNALS)  # held back since the start: see `Child`
    if not die_with_parent(parent):
        return 0
    wire = socket.socket(fileno=descriptor)
    order = _first_order(wire)
    if order is None:
        return 0
    watch = StartupReporter(
        loading=lambda done, total: _tell(wire, LoadProgress(done, total)),
        finished=lambda phase: _tell(wire, phase),
    )
    try:
        engine, facts = _build(order, watch)
    except QuireError as error:
        _tell(wire, Refused(None, error))
        return error.exit_code
    if engine.grammars is not None:
        wake(engine.grammars)
    freeze_heap()
    _tell(wire, facts)
    EngineServer(engine, wire, time.monotonic).run()
    return 0


def _tell(wire: socket.socket, message: Message) -> None:
    """A parent that has hung up wants no engine any more."""
    try:
        wire.sendall(pack(message))
    except OSError:
        raise SystemExit(0) from None


def _build(order: StartEngine, watch: StartupReporter) -> tuple[Engine, EngineInfo]:
    """Imports what it needs: torch takes seconds, and a script does without."""
    if order.script is not None:
        from quire.engine.scripted_engine import build_scripted

        return build_scripted(order.config, Path(order.script), watch)
    with gc_frozen_imports():
        from quire.engine.build import build

    built = build(order.config, watch, serving=order.serving)
    return built.engine, built.facts


def _first_order(wire: socket.socket) -> StartEngine | None:
    unpacker = FrameDecoder()
    while data := wire.recv(1 << 16):
        for frame in unpacker.feed(data):
            order = read_for_engine(frame)
            assert isinstance(order, StartEngine), order
            return order
    return None


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), int(sys.argv[2])))

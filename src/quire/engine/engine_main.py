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
    connection = socket.socket(fileno=descriptor)
    start = _read_start(connection)
    if start is None:
        return 0
    watch = StartupReporter(
        loading=lambda done, total: _send(connection, LoadProgress(done, total)),
        finished=lambda phase: _send(connection, phase),
    )
    try:
        engine, info = _build(start, watch)
    except QuireError as error:
        _send(connection, Refused(None, error))
        return error.exit_code
    if engine.grammars is not None:
        wake(engine.grammars)
    freeze_heap()
    _send(connection, info)
    EngineServer(engine, connection, time.monotonic).run()
    return 0


def _send(connection: socket.socket, message: Message) -> None:
    """A parent that has hung up wants no engine any more."""
    try:
        connection.sendall(pack(message))
    except OSError:
        raise SystemExit(0) from None


def _build(start: StartEngine, watch: StartupReporter) -> tuple[Engine, EngineInfo]:
    """Imports what it needs: torch takes seconds, and a script does without."""
    if start.script is not None:
        from quire.engine.scripted_engine import build_scripted

        return build_scripted(start.config, Path(start.script), watch)
    with gc_frozen_imports():
        from quire.engine.build import build

    built = build(start.config, watch, serving=start.serving)
    return built.engine, built.info


def _read_start(connection: socket.socket) -> StartEngine | None:
    decoder = FrameDecoder()
    while data := connection.recv(1 << 16):
        for frame in decoder.feed(data):
            start = read_for_engine(frame)
            assert isinstance(start, StartEngine), start
            return start
    return None


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), int(sys.argv[2])))

"""An engine subprocess, from the parent's side: inherited socket, length-prefixed frames, kill.

A reader and a writer thread, so that neither large requests nor bursts of tokens block an event loop. Messages are
passed to `receive` on the reader thread; the last call is `end`. An engine on another machine has the same methods
(`engine/ray_engine.py`).
"""

import contextlib
import logging
import mmap
import queue
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Protocol

from quire.engine.startup import SpawnedProcess, spawn_process
from quire.engine.wire import BrokenFrame, FrameDecoder, Message, ToFront, pack, read_for_front

_READ_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class EngineHandle(Protocol):
    """An engine in another process, here or on another machine."""

    @property
    def pid(self) -> int | None: ...

    def start(self) -> None: ...

    def send(self, message: Message) -> None:
        """Thread-safe. Messages to an engine that has ended are dropped."""

    def kill(self) -> None:
        """At once; `end` is called afterwards."""

    def close(self) -> None:
        """Let the engine end, and wait for it; kill it after a timeout."""

    def exit_status(self) -> int | None: ...


class FrameConnection:
    """The messages to and from one engine over a stream socket, which may come later than the first messages."""

    def __init__(self, receive: Callable[[ToFront], None], kill: Callable[[], None]) -> None:
        self._receive = receive
        self._kill = kill
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def send(self, message: Message) -> None:
        self._outgoing.put(pack(message))

    def stop_sending(self) -> None:
        self._outgoing.put(None)

    def serve(self, connection: socket.socket) -> None:
        """Send and receive until the engine closes its end. An engine that cannot be understood is killed."""
        writer = threading.Thread(target=self._write, args=[connection], name="to-engine", daemon=True)
        writer.start()
        try:
            self._read(connection)
        except BrokenFrame:
            _log.exception("a message of the engine could not be decoded")
            self._kill()
        except OSError:
            pass
        except Exception:  # internal error: this engine can no longer be read, another may be
            _log.exception("a message of the engine could not be handled")
            self._kill()
        self.stop_sending()

    def _read(self, connection: socket.socket) -> None:
        decoder = FrameDecoder()
        # One buffer for all messages: `recv` allocates this size and cuts it to the message, which fragments the heap.
        # Not of the heap either: after many engines it would have many holes of this size.
        buffer = memoryview(mmap.mmap(-1, _READ_BYTES))
        while num_bytes := connection.recv_into(buffer):
            for frame in decoder.feed(buffer[:num_bytes]):
                self._receive(read_for_front(frame))

    def _write(self, connection: socket.socket) -> None:
        while (frame := self._outgoing.get()) is not None:
            try:
                connection.sendall(frame)
            except OSError:
                return


class EngineProcess:
    """One engine subprocess: an `EngineHandle`."""

    def __init__(
        self, receive: Callable[[ToFront], None], end: Callable[[], None], spawned: SpawnedProcess | None = None
    ) -> None:
        self._end = end
        self._process, self._socket = spawned or spawn_process()
        self._frames = FrameConnection(receive, self.kill)
        self._reader = threading.Thread(target=self._read, name="from-engine", daemon=True)

    def start(self) -> None:
        self._reader.start()

    def send(self, message: Message) -> None:
        self._frames.send(message)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._frames.stop_sending()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_status(self) -> int | None:
        return self._process.poll()

    def _read(self) -> None:
        self._frames.serve(self._socket)
        self._process.wait()
        self._socket.close()
        self._end()


def launcher(spawned: SpawnedProcess) -> Callable[[Callable[[ToFront], None], Callable[[], None]], EngineProcess]:
    """Starts engines: the first one in a process that was spawned before, those after a crash in new ones."""
    unused = [spawned]

    def launch(receive: Callable[[ToFront], None], end: Callable[[], None]) -> EngineProcess:
        return EngineProcess(receive, end, unused.pop() if unused else None)

    return launch

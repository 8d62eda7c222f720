"""An engine subprocess, from the parent's side: inherited socket, length-prefixed frames, kill.

A reader and a writer thread, so that neither large requests nor bursts of tokens block an event loop. Messages are
passed to `receive` on the reader thread; the last call is `end`.
"""

import contextlib
import logging
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

from quire.core.process import signals_held
from quire.engine.wire import BrokenFrame, FrameDecoder, Message, ToFront, pack, read_for_front

_READ_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class EngineProcess:
    """One engine subprocess."""

    def __init__(self, receive: Callable[[ToFront], None], end: Callable[[], None]) -> None:
        self._receive = receive
        self._end = end
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "quire.engine.engine_main", str(theirs.fileno()), str(os.getpid())]
            with signals_held():
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="from-engine", daemon=True)
        self._writer = threading.Thread(target=self._write, name="to-engine", daemon=True)

    def start(self) -> None:
        self._reader.start()
        self._writer.start()

    def send(self, message: Message) -> None:
        """Thread-safe. Messages to a process that has ended are dropped."""
        self._outgoing.put(pack(message))

    def kill(self) -> None:
        """SIGKILL; `end` is called afterwards."""
        self._process.kill()

    def close(self) -> None:
        """Close the socket and wait for exit; kill after a timeout."""
        self._outgoing.put(None)
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
        decoder = FrameDecoder()
        # One buffer for all messages: `recv` allocates this size and cuts it to the message, which fragments the heap.
        # Not of the heap either: after many engines it would have many holes of this size.
        buffer = memoryview(mmap.mmap(-1, _READ_BYTES))
        try:
            while num_bytes := self._socket.recv_into(buffer):
                for frame in decoder.feed(buffer[:num_bytes]):
                    self._receive(read_for_front(frame))
        except BrokenFrame:
            _log.exception("a message of the engine could not be decoded")
            self.kill()
        except OSError:
            pass
        except Exception:  # internal error: this engine can no longer be read, another may be
            _log.exception("a message of the engine could not be handled")
            self.kill()
        self._outgoing.put(None)
        self._process.wait()
        self._socket.close()
        self._end()

    def _write(self) -> None:
        while (frame := self._outgoing.get()) is not None:
            try:
                self._socket.sendall(frame)
            except OSError:
                return

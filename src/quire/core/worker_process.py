"""Worker processes for untrusted work, with limits on CPU time, wall time and memory that the kernel enforces.

A client's grammar or a model's template may take any time and memory inside one call of native code, which no exception
interrupts and no thread can end. In a process of its own it is killed: the limits are timers and an address space, not
counters. A worker is a module that is run with the descriptor of a socket. Messages are JSON in frames with a length,
so that bytes of a worker that was taken over run no code here.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys

MAX_FRAME_BYTES = 256 << 20
_LENGTH_BYTES = 4
_READ_BYTES = 1 << 16
_MEMORY_OF_PROCESS = "/proc/self/statm"  # the first number: pages of its address space


class WorkerProcess:
    """`python -m module FD`. It ends when its socket is closed, also by the end of this process."""

    def __init__(self, module: str) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", module, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # a worker may fork: it has one thread
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_status(self) -> int | None:
        """None while it runs; minus the signal's number if one has ended it."""
        return self._process.poll()

    def close(self) -> int:
        """Kill it, if it runs. Its exit status."""
        self.socket.close()
        self._process.kill()
        return self._process.wait()


def send_frame(connection: socket.socket, message: object) -> None:
    """Raises OSError if the other end is closed."""
    send_bytes(connection, json.dumps(message).encode("ascii"))


def receive_frame(connection: socket.socket) -> object | None:
    """The next message; None if the other end was closed, also in the middle of one. Raises TimeoutError."""
    data = receive_bytes(connection)
    if data is None:
        return None
    message: object = json.loads(data)
    return message


def send_bytes(connection: socket.socket, data: bytes) -> None:
    """Bytes of any meaning as a frame."""
    connection.sendall(frame_of(data))


def frame_of(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def receive_bytes(connection: socket.socket) -> bytes | None:
    head = _receive(connection, _LENGTH_BYTES)
    num_bytes = int.from_bytes(head, "big")
    if len(head) < _LENGTH_BYTES or num_bytes > MAX_FRAME_BYTES:
        return None
    data = _receive(connection, num_bytes)
    return data if len(data) == num_bytes else None


class FrameReader:
    """Frames of a connection that nothing else reads from: what has arrived is read in one call."""

    __slots__ = ("_arrived", "_connection")

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._arrived = b""  # and not yet returned

    def receive(self) -> bytes | None:
        """As `receive_bytes`."""
        arrived = self._arrived
        while len(arrived) < _LENGTH_BYTES:
            try:
                piece = self._connection.recv(_READ_BYTES)
            except ConnectionError:
                return None
            if not piece:
                return None
            arrived += piece
        stop = _LENGTH_BYTES + int.from_bytes(arrived[:_LENGTH_BYTES], "big")
        if stop - _LENGTH_BYTES > MAX_FRAME_BYTES:
            return None
        if len(arrived) < stop:
            arrived += _receive(self._connection, stop - len(arrived))
            if len(arrived) < stop:
                return None
        self._arrived = arrived[stop:]
        return arrived[_LENGTH_BYTES:stop]


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    pieces: list[bytes] = []
    try:
        while num_bytes and (piece := connection.recv(min(num_bytes, 1 << 20))):
            pieces.append(piece)
            num_bytes -= len(piece)
    except ConnectionError:
        return b""
    return b"".join(pieces)


# In a worker.


def connect(descriptor: str) -> socket.socket:
    """The worker's end of the socket. Signals of a terminal are for its parent, whose end ends it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return socket.socket(fileno=int(descriptor))


def limit_time(cpu_s: float, wall_s: float) -> None:
    """Kill this process after this CPU time or this wall time; 0 lifts the limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def limit_memory(num_bytes: int) -> None:
    """Limit what this process allocates from now on (Linux only). Beyond it Python raises MemoryError; Rust aborts."""
    if sys.platform == "linux":
        with open(_MEMORY_OF_PROCESS) as numbers:
            num_now = int(numbers.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (num_now + num_bytes, num_now + num_bytes))

"""An engine process on a node of a Ray cluster, with the methods of one on this machine (`EngineHandle`).

Ray chooses the node, holds its CPUs and GPUs, and ends what it has started. The messages do not go through Ray: the
actor accepts one TCP connection, from the front that knows its secret, and hands the socket to an engine process. So an
engine elsewhere has the frames, threads and heartbeats of an engine here, and Ray's pickle has three short values.
"""

import contextlib
import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address

from quire.core.errors import ConfigError, EngineFailed, QuireError
from quire.engine.engine_process import FrameConnection
from quire.engine.messages import LoadProgress, Refused
from quire.engine.startup import spawn_engine
from quire.engine.wire import Message, ToFront
from quire.version import __version__

_SECRET_BYTES = 32
_CONNECT_S = 60.0  # for the front to connect, once the actor runs
_REPORT_S = 1.0  # between two reports of a replica for which the cluster has no room yet
_CLOSE_S = 5.0

_log = logging.getLogger(__name__)


def connect_cluster() -> list[Mapping[str, float]]:
    """Join the cluster that RAY_ADDRESS names or that runs on this machine, or else start one here. The resources of
    its nodes."""
    if not ray.is_initialized():
        try:
            ray.init(logging_level=logging.WARNING, log_to_driver=True)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(f"--ray cannot use the Ray cluster: {reason:.300}", param="ray") from error
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


class NodeAddress(NamedTuple):
    """Where an actor accepts the connection of its front."""

    host: str
    port: int
    version: str


class EngineActor:
    """In a worker process of Ray: one engine, which ends with this process."""

    def listen(self, secret: bytes) -> NodeAddress:
        self._secret = secret
        host = get_node_ip_address()
        self._listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        return NodeAddress(host, self._listening.getsockname()[1], __version__)

    def run(self) -> int:
        """Run an engine for the front that connects; its exit status."""
        with self._listening, self._accept() as connection:
            process = spawn_engine(connection)
        return process.wait()

    def _accept(self) -> socket.socket:
        self._listening.settimeout(_CONNECT_S)
        while True:
            connection, _ = self._listening.accept()
            connection.settimeout(_CONNECT_S)
            if hmac.compare_digest(_read_exactly(connection, len(self._secret)), self._secret):
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection
            connection.close()


def _read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Fewer if the other side says no more."""
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < num_bytes and (more := connection.recv(num_bytes - len(data))):
            data += more
    return data


class RayEngineProcess:
    """One engine on a node of the cluster: an `EngineHandle`."""

    def __init__(
        self, num_cpus: int, num_gpus: int, receive: Callable[[ToFront], None], end: Callable[[], None]
    ) -> None:
        options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        self._receive, self._end = receive, end
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._actor: Any = ray.remote(EngineActor).options(**options).remote()
        self._address = self._actor.listen.remote(self._secret)
        self._status = self._actor.run.remote()
        self._frames = FrameConnection(receive, self.kill)
        self._connection: socket.socket | None = None
        self._closing = threading.Event()
        self._exit_status: int | None = None
        self._reader = threading.Thread(target=self._run, name="from-engine", daemon=True)

    @property
    def pid(self) -> int | None:
        """Of a process on another machine: not known here."""
        return None

    def start(self) -> None:
        self._reader.start()

    def send(self, message: Message) -> None:
        self._frames.send(message)

    def kill(self) -> None:
        """Ray kills the actor, and the engine dies with it. A node that is lost does not answer: do not wait for it."""
        self._closing.set()
        with contextlib.suppress(RayError):
            ray.kill(self._actor)
        self._disconnect()

    def close(self) -> None:
        self._closing.set()
        self._frames.stop_sending()
        self._disconnect()
        self._reader.join(_CLOSE_S)
        if self._reader.is_alive():
            self.kill()
            self._reader.join(_CLOSE_S)

    def exit_status(self) -> int | None:
        return self._exit_status

    def _disconnect(self) -> None:
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            self._connection = self._connect()
            if self._connection is not None:
                with self._connection:
                    self._frames.serve(self._connection)
                self._exit_status = ray.get(self._status, timeout=_CLOSE_S)
        except QuireError as error:
            self._receive(Refused(None, error))
        except (RayError, OSError) as error:  # the worker, its node or the cluster is gone
            reason = str(error).strip().partition("\n")[0]
            _log.error("a replica on Ray has ended: %s: %.300s", type(error).__name__, reason)
        with contextlib.suppress(RayError):
            ray.kill(self._actor)
        self._end()

    def _connect(self) -> socket.socket | None:
        """A connection to the actor's engine, as soon as the cluster has room for it; None if it is stopped before."""
        while not ray.wait([self._address], timeout=_REPORT_S)[0]:
            if self._closing.is_set():
                return None
            self._receive(LoadProgress(0, 0))  # it waits for a node, it does not hang
        address = NodeAddress(*ray.get(self._address))
        if address.version != __version__:
            raise EngineFailed(
                f"The node {address.host} of the Ray cluster has quire {address.version}, and this is {__version__}: "
                f"install the same on all nodes."
            )
        connection = socket.create_connection((address.host, address.port), timeout=_CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        connection.sendall(self._secret)
        return connection

"""Publishes KV events over ZMQ, in vLLM's messages: a PUB socket for what happens, a ROUTER socket for what was missed.

A message is topic, sequence number (8 bytes, big endian) and a batch in msgpack: time, events, rank. The engine's
thread encodes a batch and hands it to a thread that owns the sockets; it never waits. Where that thread, or a
subscriber, is too slow, batches are lost to it: it sees a gap in the numbers and asks the other socket for them.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from quire.core.errors import ConfigError
from quire.engine.kv_events import KvEventsConfig
from quire.kv.block_events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored

MAX_REPLAY_BYTES = 64 << 20  # of batches that are kept for replay
_SEQUENCE_BYTES = 8
_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)  # after the last message of a replay
_MEDIUM = "GPU"  # vLLM's name of the first tier, whatever the device is
_QUEUE = "inproc://batches"

_log = logging.getLogger(__name__)


def encode_events(events: Sequence[BlockEvent], block_size: int) -> list[tuple[object, ...]]:
    """As vLLM's tagged arrays."""
    encoded: list[tuple[object, ...]] = []
    for event in events:
        match event:
            case BlockStored(hashes, parent):
                lora_id = lora_name = None
                tokens = event.token_ids
                encoded.append(("BlockStored", hashes, parent, tokens, block_size, lora_id, _MEDIUM, lora_name))
            case BlockRemoved(hashes):
                encoded.append(("BlockRemoved", hashes, _MEDIUM))
            case AllBlocksCleared():
                encoded.append(("AllBlocksCleared",))
    return encoded


class KvEventPublisher:
    """`publish` is called on one thread, `start` and `close` once each."""

    def __init__(self, config: KvEventsConfig, block_size: int, clock: Callable[[], float]) -> None:
        self._config = config
        self._block_size = block_size
        self._clock = clock
        self._next = 0
        self._lock = threading.Lock()  # of the batches that are kept
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0
        self.num_dropped = 0  # batches that the thread was too slow for
        self._context = zmq.Context()
        self._subscribers = self._context.socket(zmq.PUB)
        self._subscribers.set_hwm(config.hwm)
        self.endpoint = self._bind(self._subscribers, config.endpoint)
        self._replays: zmq.Socket[bytes] | None = None
        self.replay_endpoint: str | None = None
        if config.replay_endpoint is not None:
            self._replays = self._context.socket(zmq.ROUTER)
            self._replays.set_hwm(config.buffer_steps + 1)
            self.replay_endpoint = self._bind(self._replays, config.replay_endpoint)
        self._taken = self._context.socket(zmq.PULL)
        self._taken.set_hwm(config.max_queue_size)
        self._taken.bind(_QUEUE)
        self._queue = self._context.socket(zmq.PUSH)
        self._queue.set_hwm(1)  # ZMQ adds this to the other side's
        self._queue.connect(_QUEUE)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def _bind(self, bound: "zmq.Socket[bytes]", endpoint: str) -> str:
        """The address, with the port that was found for `*`."""
        bound.setsockopt(zmq.LINGER, 0)
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"KV events cannot be published on {endpoint}: {error.strerror}. Name another address in "
                f"--kv-events-config.",
                param="kv_events",
            ) from error
        return bound.getsockopt(zmq.LAST_ENDPOINT).decode()  # type: ignore[union-attr]

    def start(self) -> None:
        self._thread.start()

    def publish(self, events: Sequence[BlockEvent]) -> None:
        """One batch. Never waits."""
        batch = (self._clock(), encode_events(events, self._block_size), self._config.rank)
        message = self._next.to_bytes(_SEQUENCE_BYTES, "big"), msgspec.msgpack.encode(batch)
        self._next += 1
        with self._lock:
            self._kept.append(message)
            self._kept_bytes += len(message[1])
            while len(self._kept) > self._config.buffer_steps or self._kept_bytes > MAX_REPLAY_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])
        try:
            self._queue.send_multipart(message, zmq.NOBLOCK)
        except zmq.Again:
            if not self.num_dropped:
                _log.warning("KV events are not published fast enough: subscribers must ask for a replay")
            self.num_dropped += 1

    def close(self) -> None:
        """Publish what waits, and end."""
        if self._thread.is_alive():
            self._queue.send_multipart((b"", b""))
            self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._taken, zmq.POLLIN)
        if self._replays is not None:
            poller.register(self._replays, zmq.POLLIN)
        topic = self._config.topic.encode()
        while True:
            ready = dict(poller.poll())
            if self._taken in ready:
                sequence, batch = self._taken.recv_multipart()
                if not sequence:
                    return
                self._subscribers.send_multipart((topic, sequence, batch))
            if self._replays is not None and self._replays in ready:
                self._replay(self._replays, self._replays.recv_multipart())

    def _replay(self, replies: "zmq.Socket[bytes]", request: list[bytes]) -> None:
        """All batches from a number on that are kept, then an empty one. What is not a number is ignored."""
        if len(request) != 3 or len(request[2]) != _SEQUENCE_BYTES:
            return
        asked, start = request[0], request[2]
        with self._lock:
            found = [message for message in self._kept if message[0] >= start]  # big endian: bytes are in order
        for sequence, batch in found:
            replies.send_multipart((asked, b"", sequence, batch))
        replies.send_multipart((asked, b"", _END, b""))

"""KV events over real ZMQ sockets, decoded with the structs of vLLM's documentation."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from queue import SimpleQueue

import msgspec
import numpy as np
import pytest
import zmq

from quire.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.sampling import SamplingParams
from quire.engine.engine_process import EngineProcess
from quire.engine.kv_event_publisher import KvEventPublisher
from quire.engine.kv_events import KvEventsConfig, read_kv_events
from quire.engine.messages import AddRequest, Query, QueryReply, Refused, RequestOptions, StartEngine
from quire.engine.stats import EngineInfo
from quire.engine.wire import ToFront
from quire.kv.block_events import AllBlocksCleared, BlockEventLog, BlockRemoved, BlockStored
from quire.kv.radix_node import encode

ANY = "tcp://127.0.0.1:*"
END = (-1).to_bytes(8, "big", signed=True)


class Event(msgspec.Struct, array_like=True, tag=True):
    pass


class Stored(Event, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class Removed(Event, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class Cleared(Event, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


def decode(batch: bytes) -> Batch:
    return msgspec.msgpack.decode(batch, type=Batch)


@contextmanager
def publishing(**settings: object) -> Iterator[KvEventPublisher]:
    config = KvEventsConfig(**{"endpoint": ANY, "replay_endpoint": ANY, **settings})  # type: ignore[arg-type]
    publisher = KvEventPublisher(config, 2, lambda: 12.5)
    with closing(publisher):
        yield publisher


@contextmanager
def connected(kind: int, endpoint: str | None) -> Iterator["zmq.Socket[bytes]"]:
    assert endpoint is not None
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        socket.connect(endpoint)
        yield socket


def replayed(endpoint: str | None, start: int) -> dict[int, bytes]:
    """The batches from a number on."""
    with connected(zmq.DEALER, endpoint) as socket:
        socket.send_multipart((b"", start.to_bytes(8, "big")))
        found = {}
        while True:
            empty, sequence, batch = socket.recv_multipart()
            assert empty == b""
            if not batch:
                assert sequence == END
                return found
            found[int.from_bytes(sequence, "big")] = batch


def test_a_subscriber_decodes_what_is_published() -> None:
    with publishing(topic="kv-events", rank=3) as publisher, connected(zmq.SUB, publisher.endpoint) as subscriber:
        publisher.start()
        for _ in range(200):  # until the subscription has arrived
            publisher.publish([AllBlocksCleared()])
            if subscriber.poll(100):
                break
        publisher.publish([BlockStored((5, 6), 4, encode(np.array([1, 2, 3, 70_000], np.int32))), BlockRemoved((6,))])
        batch = decode(b"\x92\x00\x90")
        last = -1
        while not any(isinstance(event, Stored) for event in batch.events):
            topic, sequence, payload = subscriber.recv_multipart()
            batch = decode(payload)
            assert topic == b"kv-events" and (last < 0 or int.from_bytes(sequence, "big") == last + 1)
            last = int.from_bytes(sequence, "big")
        assert batch == Batch(
            12.5, [Stored([5, 6], 4, [1, 2, 3, 70_000], 2, None, "GPU", None), Removed([6], "GPU")], 3
        )


def test_what_was_missed_is_replayed_from_a_number_on() -> None:
    with publishing(buffer_steps=4) as publisher:
        publisher.start()
        for number in range(6):
            publisher.publish([BlockRemoved((number,))])
        assert sorted(replayed(publisher.replay_endpoint, 0)) == [2, 3, 4, 5], "the last four are kept"
        found = replayed(publisher.replay_endpoint, 4)
        assert {number: decode(batch).events for number, batch in found.items()} == {
            4: [Removed([4], "GPU")],
            5: [Removed([5], "GPU")],
        }
        assert replayed(publisher.replay_endpoint, 6) == {}
        with connected(zmq.REQ, publisher.replay_endpoint) as client:  # as vLLM's example: one reply is enough for one
            client.send((5).to_bytes(8, "big"))
            sequence, batch = client.recv_multipart()
            assert int.from_bytes(sequence, "big") == 5 and decode(batch) == decode(found[5])
        with connected(zmq.DEALER, publisher.replay_endpoint) as stranger:
            for request in ((b"",), (b"", b"5"), (b"", b"x" * 8, b""), (b"no frame before it",)):
                stranger.send_multipart(request)
        assert sorted(replayed(publisher.replay_endpoint, 5)) == [5], "and a stranger's request is ignored"


def test_a_slow_thread_leaves_a_gap_that_a_replay_fills() -> None:
    """The engine's thread never waits: here the other one has not even begun."""
    with publishing(max_queue_size=2, topic="kv") as publisher:
        for number in range(10):
            publisher.publish([BlockRemoved((number,))])
        assert 0 < publisher.num_dropped < 10
        publisher.start()
        assert sorted(replayed(publisher.replay_endpoint, 0)) == list(range(10))


def test_hashes_are_chained_and_apart_for_each_partition() -> None:
    def stored(log: BlockEventLog, partition: str) -> BlockStored:
        log.take()
        tokens = encode(np.array([1, 2, 1, 2, 9], np.int32))
        log.store(partition, np.empty(0, np.int32), tokens, np.array([3, 4, 5], np.int32))
        [event] = log.take()
        log.remove(np.array([3, 4, 5], np.int32))
        assert isinstance(event, BlockStored) and event.token_ids == [1, 2, 1, 2], "a partial block is not told"
        return event

    log = BlockEventLog(2)
    public, salted, other = (stored(log, partition) for partition in ("", "0:salt", "3:abc"))
    assert len({*public.block_hashes, *salted.block_hashes, *other.block_hashes}) == 6
    again = BlockEventLog(2)
    assert stored(again, "") == public, "without tenant and salt, in every process the same"
    assert stored(again, "0:salt") != salted, "and else a secret of the process"
    assert all(0 <= number < 1 << 63 for number in public.block_hashes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read"),
        ("[]", "not an object"),
        ('{"hwm": true}', "hwm is True"),
        ('{"port": 5557}', "endpoint, replay_endpoint"),
        ('{"endpoint": "5557"}', "such as|for example tcp://127.0.0.1:5557"),
        ('{"publisher": "kafka"}', "zmq or null"),
        ('{"buffer_steps": 0}', "buffer_steps .* is 0; it may be 1 to"),
        ('{"replay_endpoint": "tcp://127.0.0.1:5557"}', "another port"),
    ],
)
def test_wrong_settings_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_kv_events(text)


def test_settings_as_vllm_has_them() -> None:
    text = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv-events"}'
    config = read_kv_events(text)
    assert config == KvEventsConfig(endpoint="tcp://*:5557", topic="kv-events")
    assert config.of_replica(2).endpoint == "tcp://*:5559"
    assert KvEventsConfig("ipc:///tmp/a").of_replica(1).endpoint == "ipc:///tmp/a.1"
    assert read_kv_events(None) is read_kv_events('{"enable_kv_cache_events": false}') is None
    assert read_kv_events('{"publisher": "null"}') is None


def test_an_address_in_use_is_refused() -> None:
    with publishing() as publisher, pytest.raises(ConfigError, match=r"cannot be published on .* another address"):
        KvEventPublisher(KvEventsConfig(publisher.endpoint), 2, lambda: 0.0)


def test_an_engine_tells_what_its_cache_holds(tmp_path: Path, default_model_path: Path) -> None:
    """The process that `quire serve` starts: prompts of two tenants, then a reset."""
    script = tmp_path / "script.jsonl"
    script.write_text('{"say": "one two three"}\n')
    replay = f"ipc://{tmp_path}/replay"
    events = KvEventsConfig(f"ipc://{tmp_path}/events", replay)
    received: SimpleQueue[ToFront | None] = SimpleQueue()
    process = EngineProcess(received.put, lambda: received.put(None))
    process.start()
    try:
        process.send(StartEngine(EngineConfig(max_model_len=512), str(script), True, events))
        info = until(received, EngineInfo)
        prompt = list(range(100, 100 + 3 * info.block_size))
        for number, tenant in enumerate(("one", "two")):
            process.send(
                AddRequest(number, prompt, SamplingParams(max_tokens=1), options=RequestOptions(tenant=tenant))
            )
        held: dict[int, list[int]] = {}
        for _ in range(200):
            held = tokens_held(replayed(replay, 0))
            if len(held) >= 6:
                break
        assert sorted(held.values()) == sorted(
            2 * [prompt[at : at + info.block_size] for at in range(0, len(prompt), info.block_size)]
        )
        process.send(Query(0, "reset_prefix_cache"))
        until(received, QueryReply)
        while tokens_held(replayed(replay, 0)):
            pass
    finally:
        process.close()


def until(received: "SimpleQueue[ToFront | None]", kind: type) -> EngineInfo:
    while not isinstance(message := received.get(timeout=60), kind):
        assert message is not None and not isinstance(message, Refused), message
    return message  # type: ignore[return-value]


def tokens_held(batches: dict[int, bytes]) -> dict[int, list[int]]:
    held: dict[int, list[int]] = {}
    for _, batch in sorted(batches.items()):
        for event in decode(batch).events:
            match event:
                case Stored():
                    size = event.block_size
                    for place, number in enumerate(event.block_hashes):
                        held[number] = event.token_ids[place * size : (place + 1) * size]
                case Removed():
                    for number in event.block_hashes:
                        del held[number]
                case Cleared():
                    held.clear()
    return held

"""Output that its reader leaves unread: bounded for each stream and in all, and no reader that keeps up is cut."""

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason
from quire.core.step_output import FinishedSequence, StepOutput
from quire.engine.engine_process import EngineProcess
from quire.engine.messages import Accepted
from quire.engine.outputs import Delta, RequestOutput
from quire.server import async_engine, request_stream
from quire.server.async_engine import AsyncEngine, SlowReader
from quire.server.request_stream import RequestStream
from tests.server.many_clients import request
from tests.server.scripted_servers import check_control, completion_body, scripted_here
from tests.server.server_process import load, wait_until, wait_until_at_rest
from tests.server.test_async_engine import INFO

PARAMS = SamplingParams(temperature=0.0, max_tokens=10_000)
NUM_KEPT = 50  # tokens that the patched limit allows
STREAM_BYTES = NUM_KEPT * request_stream._TOKEN_BYTES


@pytest.fixture(scope="module")
def child() -> Iterator[EngineProcess]:
    child = EngineProcess(lambda sent: None, lambda: None)
    child.start()
    yield child
    child.close()


class Bench:
    """An engine client without an engine: the test says what is generated."""

    def __init__(self, child: EngineProcess, num_streams: int) -> None:
        self.engine = AsyncEngine(None, time.monotonic)
        self.engine.listen()
        self.engine.attach(child, INFO)
        self.reasons: list[str] = []
        self.engine.slow_reader = self.reasons.append
        self.streams = [self.engine.submit([1, 2], PARAMS, streaming=True) for _ in range(num_streams)]
        for number in range(num_streams):
            self.engine.receive(Accepted(number, number, 0))

    async def step(self, *numbers: int, num_tokens: int = 1) -> None:
        """So many steps, each with a token for each of these."""
        for _ in range(num_tokens):
            names = np.array(numbers, np.int64)
            self.engine.receive(StepOutput(0, names, np.full(len(numbers), 7, np.int32)))
        for _ in range(3):
            await asyncio.sleep(0)


async def tokens_of(stream: RequestStream) -> int:
    """How many come before the stream fails."""
    num_tokens = 0
    with pytest.raises(SlowReader):
        while isinstance(delta := await stream.receive(), Delta):
            num_tokens += len(delta.token_ids)
    return num_tokens


def test_a_stream_that_is_not_read_ends_with_an_error(child: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "MAX_UNREAD_BYTES", STREAM_BYTES)

    async def events() -> None:
        bench = Bench(child, 2)
        unread, read = bench.streams
        reader = asyncio.ensure_future(read.receive())
        for _ in range(2 * NUM_KEPT):
            await bench.step(0, 1)
            assert len((await reader).token_ids) == 1  # type: ignore[union-attr]
            reader = asyncio.ensure_future(read.receive())
        assert bench.engine.num_requests == 1 and bench.reasons == ["stream"]
        assert await tokens_of(unread) == NUM_KEPT + 1  # what came before is still read
        unread.close()
        reader.cancel()
        read.close()
        assert bench.engine._unread.num_bytes == 0 and not bench.engine._unread.streams

    asyncio.run(events())


def test_output_that_comes_at_once_is_not_unread(child: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that waits has missed nothing, however large the output: best_of returns all at the end."""
    monkeypatch.setattr(async_engine, "MAX_UNREAD_BYTES", STREAM_BYTES)

    async def events() -> None:
        bench = Bench(child, 1)
        [stream] = bench.streams
        reader = asyncio.ensure_future(stream.output())
        await asyncio.sleep(0)
        tokens = np.full(3 * NUM_KEPT, 7, np.int32)
        ended = FinishedSequence(0, 0, FinishReason.LENGTH, tokens, None, 0)
        for _ in tokens[1:]:
            bench.engine.receive(StepOutput(0, np.array([0], np.int64), tokens[:1]))
        bench.engine.receive(StepOutput(0, np.array([0], np.int64), tokens[:1], finished=(ended,)))
        output = await reader
        assert isinstance(output, RequestOutput) and len(output.outputs[0].token_ids) == len(tokens)
        stream.close()
        assert not bench.reasons and bench.engine._unread.num_bytes == 0

    asyncio.run(events())


def test_the_largest_of_too_many_unread_streams_is_dropped(
    child: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "MAX_ALL_UNREAD_BYTES", 2 * STREAM_BYTES)

    async def events() -> None:
        bench = Bench(child, 3)
        for _ in range(NUM_KEPT):
            await bench.step(0)
        for _ in range(NUM_KEPT):
            await bench.step(0, 1)
        assert bench.reasons == ["all_streams"] and bench.engine.num_requests == 2
        assert await tokens_of(bench.streams[0]) == 0  # dropped: it would be kept for nothing
        assert bench.engine._unread.num_bytes <= 2 * STREAM_BYTES
        assert len((await bench.streams[1].receive()).token_ids) >= NUM_KEPT // 2  # type: ignore[union-attr]
        for stream in bench.streams:
            stream.close()
        assert bench.engine._unread.num_bytes == 0 and not bench.engine._unread.streams

    asyncio.run(events())


def test_a_served_stream_with_much_unread_is_aborted(
    default_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "MAX_UNREAD_BYTES", 100_000)
    sent = request(completion_body("endless", max_tokens=7900, stream=True, n=4, logprobs=5))
    with scripted_here(tmp_path) as server, server.client() as client:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", server.port))
            deaf.sendall(sent)
            wait_until(lambda: 'quire_slow_readers_total{reason="stream"} 1.0' in client.get("/metrics").text)
            assert load(client)["num_requests"] == 0
            check_control(client)
        wait_until_at_rest(client)


def test_a_request_that_another_engine_begins_again_has_nothing_of_the_first(child: EngineProcess) -> None:
    async def play() -> None:
        bench, other = Bench(child, 2), request_stream.PendingOutput()
        stream, neighbour = bench.streams
        await bench.step(0, 1, num_tokens=3)
        before_bytes = stream.unread.num_bytes
        stream.restart(stream.state, lambda closed: None, other)
        assert neighbour.unread.num_bytes * 2 == before_bytes and not other.streams
        await bench.step(0)
        assert list(other.streams) == [stream]
        delta = await stream.receive()
        assert isinstance(delta, Delta) and list(delta.token_ids) == [7], "tokens of the lost engine were kept"
        assert other.num_bytes == 0 and not other.streams

    asyncio.run(play())

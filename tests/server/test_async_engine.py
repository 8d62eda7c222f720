"""Output of the engine reaches every stream whole and in order, a few streams per iteration of the event loop."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import NumericalError, QueueFull
from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason
from quire.core.step_output import FinishedSequence, StepOutput
from quire.engine.engine_process import EngineProcess
from quire.engine.messages import Accepted, RequestOptions
from quire.engine.outputs import Delta, RequestOutput
from quire.engine.stats import EngineInfo, MemoryUsage
from quire.server.async_engine import WOKEN_AT_ONCE, AsyncEngine, EngineLost, options_for
from quire.server.http.auth import Identity
from quire.server.http.request_context import CURRENT_CONTEXT, RequestContext
from quire.server.request_stream import RequestStream

INFO = EngineInfo("m", 64, 100, 64, 64, 16, "cpu", "float32", MemoryUsage(), 0, os.getpid())
PARAMS = SamplingParams(temperature=0.0, max_tokens=64)
CALLERS = 3 * WOKEN_AT_ONCE


@pytest.fixture(scope="module")
def child() -> Iterator[EngineProcess]:
    """A real engine process that loads nothing: messages to it have no effect."""
    child = EngineProcess(lambda sent: None, lambda: None)
    child.start()
    yield child
    child.close()


def opened(child: EngineProcess, num_calls: int) -> tuple[AsyncEngine, list[RequestStream]]:
    """On a running loop; sequences are numbered like their requests."""
    engine = AsyncEngine(None, time.monotonic)
    engine.listen()
    engine.attach(child, INFO)
    calls = [engine.submit([1, 2], PARAMS, streaming=True) for _ in range(num_calls)]
    for number in range(num_calls):
        engine.receive(Accepted(number, number, 0))
    return engine, calls


def step(
    engine: AsyncEngine,
    tokens: dict[int, int],
    ended: dict[int, list[int]] | None = None,
    reason: FinishReason = FinishReason.LENGTH,
) -> None:
    over = [
        FinishedSequence(number, number, reason, np.array(sent, np.int32), None, 0)
        for number, sent in (ended or {}).items()
    ]
    names = np.array(list(tokens), np.int64)
    engine.receive(StepOutput(0, names, np.array(list(tokens.values()), np.int32), finished=tuple(over)))


async def received(call: RequestStream) -> list[int]:
    """Its tokens as they came; the final output must have the same."""
    tokens: list[int] = []
    while isinstance(news := await call.receive(), Delta):
        tokens += news.token_ids
    assert isinstance(news, RequestOutput) and news.outputs[0].token_ids == tokens
    return tokens


async def received_until_failure(call: RequestStream) -> list[int]:
    tokens: list[int] = []
    with pytest.raises(NumericalError):
        while isinstance(news := await call.receive(), Delta):
            assert news.finish_reason is None
            tokens += news.token_ids
    return tokens


STEPS = st.lists(st.tuples(st.sets(st.integers(0, CALLERS - 1)), st.integers(0, 3)), max_size=6)


@given(STEPS)
@settings(max_examples=40)
def test_every_stream_gets_all_output_in_order(child: EngineProcess, steps: list[tuple[set[int], int]]) -> None:
    async def events() -> None:
        engine, calls = opened(child, CALLERS)
        listening = [asyncio.ensure_future(received(call)) for call in calls]
        sent: dict[int, list[int]] = {number: [] for number in range(CALLERS)}
        for token, (speakers, turns) in enumerate(steps):
            step(engine, dict.fromkeys(speakers, token))
            for number in speakers:
                sent[number].append(token)
            for _ in range(turns):
                await asyncio.sleep(0)
        last = dict.fromkeys(range(CALLERS), 99)
        step(engine, last, {number: [*tokens, 99] for number, tokens in sent.items()})
        assert await asyncio.gather(*listening) == [[*tokens, 99] for tokens in sent.values()]
        assert engine.num_requests == 0

    asyncio.run(events())


@given(st.lists(st.integers(0, 3), max_size=4), st.integers(0, 3), st.booleans())
@settings(max_examples=40)
def test_output_before_a_failure_is_delivered_before_it(
    child: EngineProcess, steps: list[int], turns_before_reading: int, with_a_last_word: bool
) -> None:
    """However late the reader is, and however much is merged."""

    async def events() -> None:
        engine, calls = opened(child, CALLERS)
        sent: list[int] = []
        for token, turns in enumerate(steps):
            step(engine, dict.fromkeys(range(CALLERS), token))
            sent.append(token)
            for _ in range(turns):
                await asyncio.sleep(0)
        last = dict.fromkeys(range(CALLERS), 99) if with_a_last_word else {}
        sent += [99] if with_a_last_word else []
        step(engine, last, dict.fromkeys(range(CALLERS), sent), FinishReason.ERROR)
        for _ in range(turns_before_reading):
            await asyncio.sleep(0)
        assert await asyncio.gather(*map(received_until_failure, calls)) == [sent] * CALLERS
        assert engine.num_requests == 0

    asyncio.run(events())


def test_few_streams_are_woken_in_one_iteration_and_unread_output_is_merged(child: EngineProcess) -> None:
    async def events() -> None:
        engine, calls = opened(child, CALLERS)
        iteration = 0
        reads: list[tuple[int, int]] = []  # in which iteration of the loop, and how many tokens

        async def read(call: RequestStream) -> None:
            while True:
                news = await call.receive()
                assert isinstance(news, Delta)
                reads.append((iteration, len(news.token_ids)))

        readers = [asyncio.ensure_future(read(call)) for call in calls]
        await asyncio.sleep(0)  # all of them wait
        for token in range(4):
            step(engine, dict.fromkeys(range(CALLERS), token))
        while sum(num_tokens for _, num_tokens in reads) < 4 * CALLERS:
            iteration += 1
            await asyncio.sleep(0)
        assert max(Counter(iteration for iteration, _ in reads).values()) <= WOKEN_AT_ONCE
        assert len(reads) < 2 * CALLERS
        for reader, call in zip(readers, calls, strict=True):
            reader.cancel()
            call.close()

    asyncio.run(events())


def test_every_delta_is_counted_when_it_arrives(child: EngineProcess) -> None:
    async def events() -> None:
        engine, calls = opened(child, 2)
        counted: list[tuple[int, list[int]]] = []
        engine.progressed = lambda delta, state: counted.append((state.number, delta.token_ids))
        for token in range(3):
            step(engine, {0: token, 1: token})
        await asyncio.sleep(0)
        assert sorted(counted) == [(number, [token]) for number in range(2) for token in range(3)]
        for call in calls:
            call.close()

    asyncio.run(events())


class CountedPlace:
    """What admission control is told of one request."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.num_waiting_tokens = self.num_prompts = 0
        self._is_full = is_full

    def add_prompt(self, num_tokens: int) -> None:
        if self._is_full:
            raise QueueFull(1, 1, "requests")
        self.num_waiting_tokens += num_tokens
        self.num_prompts += 1

    def start_prompt(self, num_tokens: int) -> None:
        self.num_waiting_tokens -= num_tokens

    def end_prompt(self) -> None:
        self.num_prompts -= 1

    def release(self) -> None: ...


def test_a_prompt_that_ends_before_its_first_token_waits_no_longer(child: EngineProcess) -> None:
    async def events() -> None:
        engine, _ = opened(child, 0)
        place, full = CountedPlace(), CountedPlace(is_full=True)
        CURRENT_CONTEXT.set(RequestContext("id", 0.0, place=place))
        stream = engine.submit([1, 2, 3], PARAMS)
        assert (place.num_waiting_tokens, place.num_prompts) == (3, 1)
        stream.close()
        assert (place.num_waiting_tokens, place.num_prompts) == (0, 0)
        CURRENT_CONTEXT.set(RequestContext("id", 0.0, place=full))
        with pytest.raises(QueueFull):
            engine.submit([1, 2, 3], PARAMS)
        assert engine.num_requests == 0 and not engine._processor._requests, "what is refused is not kept"

    asyncio.run(events())


def test_what_is_asked_of_an_engine_that_ends_fails(child: EngineProcess) -> None:
    async def events() -> None:
        engine, (stream,) = opened(child, 1)
        asked = asyncio.ensure_future(engine.query("view"))
        await asyncio.sleep(0)
        engine.detach()
        with pytest.raises(EngineLost):
            await asyncio.wait_for(asked, 10)
        stream.fail(NumericalError())
        with pytest.raises(EngineLost):  # the first failure counts
            await stream.receive()

    asyncio.run(events())


def test_unread_output_of_a_stream_that_is_closed_counts_no_more(child: EngineProcess) -> None:
    async def events() -> None:
        engine, (stream,) = opened(child, 1)
        step(engine, {0: 7})
        for _ in range(3):
            await asyncio.sleep(0)
        assert engine._unread.num_bytes > 0
        stream.close()
        assert engine._unread.num_bytes == 0 and not engine._unread.streams

    asyncio.run(events())


def test_the_time_that_a_model_took_to_load_is_part_of_the_timeout() -> None:
    context = RequestContext("id", 0.0, identity=Identity("a", trusted=True), timeout_s=5.0, waited_s=2.0)
    assert options_for(context, RequestOptions()).timeout_s == 3.0

"""Threads for texts: a client has a part of them, however many requests it sends, and leaves the others to others."""

import asyncio
import threading
from collections.abc import Awaitable

import pytest

from quire.core.errors import InvalidParameter, QuireError
from quire.core.sampling import Grammar, GrammarKind, SamplingParams
from quire.engine.messages import RequestOptions
from quire.server.context import ServedModel, TextThreads
from quire.server.http.request_context import CURRENT_CONTEXT, AdmittedPlace, RequestContext
from quire.server.request.params import GenerationRequest, constrain

LONG, SHORT = 1 << 20, 100


@pytest.mark.parametrize(("num_bytes", "num_at_once"), [(LONG, 1), (SHORT, 2)])
def test_texts_of_one_client_wait_for_each_other_and_others_do_not(num_bytes: int, num_at_once: int) -> None:
    running: list[str] = []
    ends = threading.Event()

    def work(name: str) -> str:
        running.append(name)
        assert ends.wait(60)
        return name

    async def request(threads: TextThreads, client: str, num_body_bytes: int, number: int) -> str:
        CURRENT_CONTEXT.set(RequestContext("", 0.0, client=client, num_body_bytes=num_body_bytes))
        return await threads.run(work, f"{client} {number}")

    async def crowd() -> list[str]:
        threads = TextThreads()
        made: list[Awaitable[str]] = [
            asyncio.create_task(request(threads, "hostile", num_bytes, number)) for number in range(50)
        ]
        first = [f"hostile {number}" for number in range(num_at_once)]
        while not set(first) <= set(running):
            await asyncio.sleep(0.001)
        made += [asyncio.create_task(request(threads, "other", size, size)) for size in (LONG, SHORT)]
        while not {f"other {LONG}", f"other {SHORT}"} <= set(running):
            await asyncio.sleep(0.001)
        assert sorted(running) == sorted([*first, f"other {LONG}", f"other {SHORT}"])
        ends.set()
        return list(await asyncio.gather(*made))

    assert len(set(asyncio.run(crowd()))) == 52


def test_a_client_that_leaves_gives_its_turn_to_the_next() -> None:
    ends = threading.Event()

    async def crowd() -> str:
        threads = TextThreads()
        CURRENT_CONTEXT.set(RequestContext("", 0.0, client="a", num_body_bytes=LONG))
        first = asyncio.create_task(threads.run(ends.wait, 60))
        await asyncio.sleep(0)
        second = asyncio.create_task(threads.run(str, "second"))
        third = asyncio.create_task(threads.run(str, "third"))
        await asyncio.sleep(0)
        first.cancel()
        second.cancel()
        ends.set()
        return await third

    assert asyncio.run(crowd()) == "third"


@pytest.mark.parametrize("num_bytes", [LONG, SHORT])
def test_requests_without_a_place_are_bounded_by_client(num_bytes: int) -> None:
    """Those that generate have a place, and are bounded by their number."""
    ends = threading.Event()

    async def request(threads: TextThreads, client: str, place: AdmittedPlace | None = None) -> str:
        CURRENT_CONTEXT.set(RequestContext("", 0.0, client=client, num_body_bytes=num_bytes, place=place))
        return await threads.run(lambda: str(ends.wait(60)))

    async def crowd() -> list[object]:
        threads = TextThreads()
        many = [asyncio.create_task(request(threads, "hostile")) for _ in range(200)]
        others = [asyncio.create_task(request(threads, "other"))]
        others.append(asyncio.create_task(request(threads, "hostile", NoPlace())))
        await asyncio.sleep(0)
        ends.set()
        assert set(await asyncio.gather(*others)) == {"True"}
        return list(await asyncio.gather(*many, return_exceptions=True))

    found = asyncio.run(crowd())
    refused = [each for each in found if isinstance(each, QuireError)]
    assert {(each.status, each.code) for each in refused} == {(429, "tokenizer_busy")}
    assert 60 <= len(refused) < 80 and found.count("True") == 200 - len(refused)


def test_schemas_of_one_client_take_turns() -> None:
    """A schema is relaxed on these threads, too: 40 at once, of one client, were 40 threads at work."""
    ends = threading.Event()
    schema = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}')
    generation = GenerationRequest(SamplingParams(), RequestOptions(), schema, stream=False)
    model = ServedModel("m", None, None, SamplingParams(), max_model_len=100, vocab_size=10, created=0)

    async def constrained(client: str) -> str:
        CURRENT_CONTEXT.set(RequestContext("", 0.0, client=client, num_body_bytes=SHORT))
        with pytest.raises(InvalidParameter, match="cannot be constrained"):  # afterwards: this model has no compiler
            await constrain(generation, model)
        return client

    async def crowd() -> None:
        CURRENT_CONTEXT.set(RequestContext("", 0.0, client="hostile", num_body_bytes=SHORT))
        busy = [asyncio.create_task(model.text_threads.run(ends.wait, 60)) for _ in range(2)]
        await asyncio.sleep(0)
        waits = asyncio.create_task(constrained("hostile"))
        for _ in range(20):
            assert await constrained("other") == "other"
        assert not waits.done()
        ends.set()
        assert await waits == "hostile" and await asyncio.gather(*busy) == [True, True]

    asyncio.run(crowd())


class NoPlace:
    """A place in a queue that counts nothing."""

    def add_prompt(self, num_tokens: int) -> None: ...
    def start_prompt(self, num_tokens: int) -> None: ...
    def end_prompt(self) -> None: ...
    def release(self) -> None: ...

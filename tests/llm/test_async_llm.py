"""AsyncLLM: many tasks in one batch, streams, cancellation, errors, close."""

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.core.errors import ContextLengthExceeded, EngineFailed, QuireError

T = TypeVar("T")
GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tiny_folder: Path) -> Path:
    return tiny_folder


@pytest.fixture
def with_llm(folder: Path) -> Iterator[Callable[[Callable[[AsyncLLM], Awaitable[T]]], T]]:
    def run(work: Callable[[AsyncLLM], Awaitable[T]]) -> T:
        async def main() -> T:
            async with AsyncLLM(str(folder), dtype="float32", max_num_seqs=32) as llm:
                return await work(llm)

        return asyncio.run(main())

    yield run


def test_tasks_get_what_the_synchronous_api_gives_in_one_batch(with_llm, llm: LLM) -> None:
    prompts = [f"number {i}" for i in range(20)]
    expected = [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]

    async def work(engine: AsyncLLM) -> list[str]:
        outputs = await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in prompts))
        steps = {output.metrics.arrival_step for [output] in outputs}
        last = max(output.metrics.finished_step for [output] in outputs)
        assert last - min(steps) < 2 * 20, "one after the other they would take 240 steps"
        return [output.outputs[0].text for [output] in outputs]

    assert with_llm(work) == expected


def test_tokens_need_no_await(with_llm) -> None:
    async def work(engine: AsyncLLM) -> tuple[list[int], str]:
        return (ids := engine.tokenize("Hello world")), engine.detokenize(ids)

    assert with_llm(work)[1] == "Hello world" and with_llm(work)[0]


def test_a_stream_is_the_text_in_pieces(with_llm, llm: LLM) -> None:
    async def work(engine: AsyncLLM) -> tuple[list[str], list[str]]:
        pieces = [delta.text async for delta in engine.stream("once upon", GREEDY)]
        chat = [delta.text async for delta in engine.stream_chat([{"role": "user", "content": "hi"}], GREEDY)]
        return pieces, chat

    pieces, chat = with_llm(work)
    assert "".join(pieces) == llm.generate("once upon", GREEDY)[0].outputs[0].text and len(pieces) > 2
    assert "".join(chat) == llm.chat([{"role": "user", "content": "hi"}], GREEDY)[0].outputs[0].text


def test_all_continuations_of_a_stream_come_to_their_end(with_llm) -> None:
    params = SamplingParams(n=3, temperature=1, seed=5, max_tokens=6, ignore_eos=True)

    async def work(engine: AsyncLLM) -> list[tuple[int, str | None]]:
        return [(delta.index, delta.finish_reason) async for delta in engine.stream("x", params)]

    ended = [index for index, reason in with_llm(work) if reason is not None]
    assert sorted(ended) == [0, 1, 2], "all in one step"


async def until_idle(engine: AsyncLLM) -> None:
    while not await engine._on_engine_thread(lambda: engine.llm.client.idle):
        await asyncio.sleep(0)


def test_a_cancelled_task_ends_its_requests(with_llm) -> None:
    async def work(engine: AsyncLLM) -> None:
        task = asyncio.create_task(engine.generate(["a", "b", "c"], LONG))
        started = engine.stream("d", LONG)
        assert (await anext(started)).token_ids
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await started.aclose()
        await until_idle(engine)
        assert not engine._readers
        assert (await engine.generate("after", GREEDY))[0].finished

    with_llm(work)


def test_a_handler_that_does_not_wake_the_loop_cancels_a_task(with_llm) -> None:
    """As Jupyter's kernel does when a cell is interrupted."""
    released = threading.Event()

    async def work(engine: AsyncLLM) -> bool:
        def interrupt() -> None:  # on the engine's thread, which makes no step from then on
            os.kill(os.getpid(), signal.SIGUSR1)
            released.wait(20)
            released.set()

        task = asyncio.ensure_future(engine.generate("x", LONG))
        while not engine._readers:
            await asyncio.sleep(0)
        before = signal.signal(signal.SIGUSR1, lambda *_: task.cancel())
        try:
            engine._commands.put(interrupt)
            with pytest.raises(asyncio.CancelledError):
                await task
            return released.is_set()
        finally:
            released.set()
            signal.signal(signal.SIGUSR1, before)

    assert with_llm(work) is False, "the task ended only when the engine went on"


def test_a_task_cancelled_before_it_is_submitted_leaves_nothing(with_llm) -> None:
    async def work(engine: AsyncLLM) -> None:
        for _ in range(20):
            task = asyncio.create_task(engine.generate("x", LONG))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until_idle(engine)
        assert not engine._readers

    with_llm(work)


def test_a_refused_prompt_raises_and_runs_none(with_llm) -> None:
    async def work(engine: AsyncLLM) -> None:
        with pytest.raises(ContextLengthExceeded):
            await engine.generate(["short", "long " * 1000], GREEDY)
        with pytest.raises(TypeError, match="no bar is drawn here"):
            await engine.generate("x", GREEDY, use_tqdm=False)
        await until_idle(engine)
        assert await engine.generate([], GREEDY) == []

    with_llm(work)


def test_embeddings_and_scores(with_llm, llm: LLM) -> None:
    async def work(engine: AsyncLLM) -> list[float]:
        vectors = await engine.embed(["a", "b"])
        scores = await engine.score("a", ["a", "b"])
        assert scores[0].score == pytest.approx(1.0, abs=1e-5)
        assert scores[1].score == pytest.approx(float(vectors[0].embedding @ vectors[1].embedding), abs=1e-5)
        return [score.score for score in scores]

    assert with_llm(work) == pytest.approx([score.score for score in llm.score("a", ["a", "b"])], abs=1e-5)


def test_after_close_it_says_so(folder: Path) -> None:
    async def main() -> None:
        engine = AsyncLLM(str(folder), dtype="float32")
        waiting = asyncio.create_task(engine.generate("x", LONG))
        await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        with pytest.raises(QuireError):
            await waiting
        with pytest.raises(EngineFailed, match="closed"):
            await engine.generate("x", GREEDY)

    asyncio.run(main())


def test_an_error_of_the_engine_reaches_every_task(folder: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(str(folder), dtype="float32") as engine:

            def broken() -> list[object]:
                raise RuntimeError("broken step")

            step, engine.llm.client.step = engine.llm.client.step, broken  # type: ignore[method-assign, assignment]
            results = await asyncio.gather(*(engine.generate("x", GREEDY) for _ in range(3)), return_exceptions=True)
            assert [str(error) for error in results] == ["broken step"] * 3
            engine.llm.client.step = step  # type: ignore[method-assign]
            assert (await engine.generate("x", GREEDY))[0].finished

    asyncio.run(main())


def test_the_signature_lists_the_settings(llm: LLM) -> None:
    assert "max_model_len" in (AsyncLLM.__init__.__doc__ or "")
    assert repr(llm).startswith("LLM('") and "max_model_len=512" in repr(llm)

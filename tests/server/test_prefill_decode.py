"""Prefill/decode split: prompts computed by one engine process and copied by another; the end of either."""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TypeVar

import msgspec
import numpy as np
import pytest

from quire.config import EngineConfig
from quire.core.sampling import SamplingParams
from quire.core.shared_blocks import BlockAddress
from quire.core.step import FinishReason
from quire.core.step_output import FinishedSequence, StepOutput
from quire.engine.engine_process import EngineProcess
from quire.engine.messages import (
    AbortRequest,
    Accepted,
    AddRequest,
    ImportPrefix,
    ImportReply,
    LeasePrefix,
    LeaseReply,
    QueryReply,
    ReleaseLease,
    RequestOptions,
)
from quire.engine.open_model import OpenedModel, open_model
from quire.engine.prefix_transfer import EngineRole, PrefixLease, TransferFailure
from quire.sched.prompt_split import NO_COSTS, PrefillCosts, SplitChoice, choose
from quire.server.async_engine import AsyncEngine
from quire.server.engine_supervisor import Health, Supervisor
from quire.server.http.request_context import CURRENT_CONTEXT, RequestContext
from quire.server.prefill_decode import PrefillEngines, SplitRequest
from quire.server.replicas import ReplicaSupervisor, ReplicatedEngine
from quire.server.request_stream import RequestStream
from tests.llm.tiny import tiny_llama, write_model
from tests.server.supervision import until, watched
from tests.server.test_async_engine import INFO
from tests.tiers import long_only

Message = TypeVar("Message")
LINES = """{"step_ms": 20}
{"say": "Hello there."}
"""


class Split:
    """One decode engine, one prefill engine, and a client of both."""

    def __init__(self, opened: OpenedModel, config: EngineConfig, script: str | None) -> None:
        self.rule: Callable[..., SplitChoice] = always
        decode, prefill = AsyncEngine(opened.tokenizer, monotonic), AsyncEngine(opened.tokenizer, monotonic)
        self.split = PrefillEngines([prefill], monotonic, lambda *given: self.rule(*given))
        self.ends: list[SplitRequest] = []
        self.split.ended = self.ends.append
        self.engine = ReplicatedEngine([decode], self.split)
        self.supervisor = ReplicaSupervisor(
            [Supervisor(config, script, decode, clock=monotonic, role=EngineRole.DECODE)],
            self.engine,
            [Supervisor(config, script, prefill, clock=monotonic, serving=False, role=EngineRole.PREFILL)],
        )

    def submit(self, prompt: list[int], max_tokens: int = 12) -> RequestStream:
        return self.engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), streaming=True)

    async def answer(self, stream: RequestStream) -> list[int]:
        try:
            output = await stream.output()
            return list(output.outputs[0].token_ids)
        finally:
            stream.close()

    async def explain(self, stream: RequestStream) -> str:
        reply = json.loads(await self.engine.query("explain", stream.state.number))
        return "\n".join(reply["lines"])

    def signal_prefill(self, number: signal.Signals) -> None:
        process = self.supervisor.prefill[0].engine_pid
        assert process is not None
        os.kill(process, number)

    async def until(self, prefill: Health) -> None:
        await until(lambda: self.supervisor.prefill[0].health is prefill)

    async def assert_nothing_is_held(self) -> None:
        """Every block of both engines is free or cached, once the latest statistics have come."""
        await until(lambda: all(map(holds_nothing, (*self.engine.engines, *self.split.engines))))


def holds_nothing(engine: AsyncEngine) -> bool:
    stats = engine.stats
    return stats is not None and stats.num_blocks == stats.num_free_blocks + stats.num_evictable_blocks


def always(num_prompt: int, *loads: object) -> SplitChoice:
    """Prompts of 100 tokens and more."""
    return SplitChoice(here_s=float(num_prompt >= 100), there_s=0.5)


@asynccontextmanager
async def two_engines(config: EngineConfig, script: str | None) -> AsyncIterator[Split]:
    made = Split(open_model(config), config, script)
    async with watched(made.supervisor):
        await until(lambda: all(each.costs.known for each in (*made.engine.engines, *made.split.engines)))
        yield made


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return [(seed * 7919 + place * place) % 1000 + 10 for place in range(num_tokens)]


async def assert_the_rule_is_asked(split: Split) -> None:
    """By the costs that the engines predict: a step of the script takes 20 ms, whatever it holds."""
    split.rule = choose
    first, second = split.submit(prompt_of(20, 4000)), split.submit(prompt_of(21, 4000))
    answers = await asyncio.gather(split.answer(first), split.answer(second))
    assert answers[0] == answers[1]
    assert "was not sent to a prefill engine" in await split.explain(first), "nothing waits: it is as fast here"
    assert "was sent to a prefill engine" in await split.explain(second), "the first one is computed here"
    assert [each.failure for each in split.ends] == [None]
    scored = split.engine.submit(prompt_of(22, 600), SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    await split.answer(scored)
    assert "its outputs are of the whole prompt" in await split.explain(scored)
    decode = split.engine.engines[0]
    assert (decode.num_waiting_tokens, decode.num_decoding) == (0, 0), "what has ended is not counted"
    split.rule = always
    split.ends.clear()


def test_long_prompts_are_split_and_survive_the_prefill_engine(default_model_path: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text(LINES)

    async def body() -> None:
        async with two_engines(EngineConfig(max_num_seqs=8), str(script)) as split:
            await assert_the_rule_is_asked(split)
            short = split.submit(prompt_of(0, 99))
            expected = await split.answer(short)
            assert not split.ends and "not sent to a prefill engine: 0.0 ms of" in await split.explain(short)
            long = split.submit(prompt_of(1, 1000))
            assert await split.answer(long) == expected
            assert split.ends == [SplitRequest(0, None)], "a script has blocks without bytes"
            explained = await split.explain(long)
            assert "992 tokens were computed by a prefill engine and copied" in explained
            assert "sent to a prefill engine: 1,000.0 ms of delay were expected here, 500.0 ms by" in explained
            assert long.state.metrics.num_cached_tokens == 0, "computed for it, wherever"
            again = split.submit(prompt_of(1, 1000))
            await split.answer(again)
            assert len(split.ends) == 1, "its prompt is cached where it decodes"
            assert "no whole block of it is missing here" in await split.explain(again)
            assert again.state.metrics.num_cached_tokens == 999
            left = [split.submit(prompt_of(seed, 2000)) for seed in range(2, 6)]
            await asyncio.sleep(0)  # their prompts are sent
            for stream in left:
                stream.close()
            await split.assert_nothing_is_held()
            assert len(split.ends) == 1
            split.signal_prefill(signal.SIGSTOP)
            killed = [split.submit(prompt_of(seed, 2000)) for seed in range(6, 10)]
            await asyncio.sleep(0)
            split.signal_prefill(signal.SIGKILL)
            assert await asyncio.gather(*map(split.answer, killed)) == [expected] * 4
            for each in killed:
                assert "the prefill engine ended" in await split.explain(each)
            await split.until(Health.READY)
            is_ready, split.split.is_ready = split.split.is_ready, lambda rank: False
            without = split.submit(prompt_of(10, 2000))
            assert await split.answer(without) == expected
            assert "no prefill engine was ready" in await split.explain(without)
            split.split.is_ready = is_ready
            [prefill] = split.split.engines
            await prefill.submit(prompt_of(11, 2000)[:640], SamplingParams(temperature=0.0, max_tokens=1)).output()
            after = split.submit(prompt_of(11, 2000))
            assert await split.answer(after) == expected and split.ends[-1].failure is None
            assert after.state.metrics.num_cached_tokens == 640, "where it was computed"
            reasons = Counter(each.failure for each in split.ends)
            assert reasons == {None: 2, TransferFailure.ENGINE_LOST: 4, TransferFailure.NO_ENGINE: 1}
            roles = {each.role: (each.num_submitted, each.num_restarts) for each in split.supervisor.loads()}
            assert roles == {"decode": (16, 0), "prefill": (11, 1)}
            await split.assert_nothing_is_held()

    asyncio.run(body())


@pytest.mark.long
def test_copied_blocks_give_the_answer_of_one_engine(shallow_default: Path) -> None:
    """The real model: the same prompts with their blocks copied, and computed by the decode engine itself."""

    async def body() -> None:
        config = EngineConfig(max_num_seqs=4, kv_cache_memory=256 << 20, max_model_len=2048, threads=1)
        async with two_engines(config, None) as split:
            prompts = [prompt_of(1, 600), prompt_of(1, 580) + prompt_of(2, 40)]
            copied = [await split.answer(split.submit(prompt)) for prompt in prompts]
            # The second prompt is short once its beginning is cached: measured costs decide whether it is split.
            assert split.ends[0].num_bytes > 0 and all(each.failure is None for each in split.ends)
            assert len(set(copied[0])) > 1
            await split.engine.query("reset_prefix_cache")
            split.split.is_ready = lambda rank: False
            alone = [await split.answer(split.submit(prompt)) for prompt in prompts]
            assert alone == copied
            await split.assert_nothing_is_held()

    asyncio.run(body())


@pytest.mark.parametrize("num_ranks", long_only([2, 4]))
def test_the_ranks_of_both_engines_have_what_was_copied(tmp_path: Path, num_ranks: int) -> None:
    """With four ranks, two have each key head."""
    config = EngineConfig(
        model=str(write_model(tmp_path, tiny_llama())),
        device="cpu",
        dtype="float32",
        max_num_seqs=4,
        kv_cache_memory=1 << 20,
        max_model_len=512,
        tensor_parallel_size=num_ranks,
    )

    def letters(seed: int, num_tokens: int) -> list[int]:
        return [token % 256 + 3 for token in prompt_of(seed, num_tokens)]

    async def body() -> None:
        async with two_engines(config, None) as split:
            prompts = [letters(1, 300), letters(1, 160) + letters(2, 140), letters(3, 120)]
            copied = [await split.answer(split.submit(prompt)) for prompt in prompts]
            num_heads = max(2, num_ranks)
            assert [each.failure for each in split.ends] == [None] * 3
            token_bytes = 2 * 2 * num_heads * 16 * 4  # keys and values of two layers
            assert [each.num_bytes // token_bytes for each in split.ends] == [288, 128, 96]
            await split.engine.query("reset_prefix_cache")
            is_ready, split.split.is_ready = split.split.is_ready, lambda rank: False
            assert [await split.answer(split.submit(prompt)) for prompt in prompts] == copied
            split.split.is_ready = is_ready
            split.signal_prefill(signal.SIGKILL)
            await split.until(Health.RESTARTING)
            while split.supervisor.prefill[0].health is not Health.READY:
                await asyncio.sleep(0.01)  # several processes start: on a crowded machine for more than a minute
            await split.engine.query("reset_prefix_cache")
            assert [await split.answer(split.submit(prompt)) for prompt in prompts] == copied
            failures = [each.failure for each in split.ends]
            assert failures == [None] * 3 + [TransferFailure.NO_ENGINE] * 3 + [None] * 3, "from the next one's memory"
            await split.assert_nothing_is_held()

    asyncio.run(body())


class Wire(EngineProcess):
    """In place of an engine process: what is sent to it. The test says what comes back."""

    def __init__(self) -> None:
        super().__init__(lambda sent: None, lambda: None)
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def newest(self, kind: type[Message]) -> Message:
        return next(each for each in reversed(self.sent) if isinstance(each, kind))


class Bench:
    """A held request of a decode engine, its prompt on the way to a prefill engine; step by step, without processes."""

    def __init__(self, timeout_s: float | None = None, costs: PrefillCosts = NO_COSTS, device: str = "cpu") -> None:
        self.now_s = 0.0
        self.decode, self.prefill = (AsyncEngine(None, lambda: self.now_s) for _ in range(2))
        self.prefill.costs = costs
        self.wires = Wire(), Wire()
        for engine, wire in zip((self.decode, self.prefill), self.wires, strict=True):
            engine.listen()
            engine.attach(wire, replace(INFO, device=device))
        self.split = PrefillEngines([self.prefill], lambda: self.now_s)
        options = RequestOptions(timeout_s=timeout_s)
        self.stream = self.decode.submit([7] * 112, SamplingParams(max_tokens=4), held=True, options=options)
        self.split.begin(self.stream, self.decode, [], lambda: None)

    async def computed(self) -> None:
        """The prefill engine has computed the prompt, and leases its blocks."""
        await turns()
        number = self.wires[1].newest(AddRequest).number
        ended = FinishedSequence(number, 0, FinishReason.LENGTH, np.array([5], np.int32), None, 0)
        self.prefill.receive(Accepted(number, 0, 0))
        self.prefill.receive(StepOutput(0, np.array([0], np.int64), np.array([5], np.int32), finished=(ended,)))
        await turns()
        await self.leased(96)

    async def leased(self, num_tokens: int, generation: int = 5) -> None:
        """The prefill engine is asked for a lease, and grants it."""
        lease = PrefixLease(BlockAddress(1, 2, 3, 4, generation, block_bytes=6), "layout", num_tokens, [1])
        token = self.wires[1].newest(LeasePrefix).token
        self.prefill.receive(QueryReply(token, msgspec.json.encode(LeaseReply(lease))))
        await turns()

    async def copied(self, num_tokens: int) -> None:
        token = self.wires[0].newest(ImportPrefix).token
        self.decode.receive(QueryReply(token, msgspec.json.encode(ImportReply(num_tokens, 10 * num_tokens))))
        await turns()

    async def until_asked(self, count: int) -> None:
        """For so many leases, by the time that chunks are predicted to take."""
        await until(lambda: sum(isinstance(each, LeasePrefix) for each in self.wires[1].sent) >= count, every_s=0.001)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_lease_ends_also_where_the_copy_fails() -> None:
    async def events() -> None:
        bench = Bench()
        await bench.computed()
        assert bench.wires[0].newest(ImportPrefix).lease.address.slot == 4
        bench.decode.detach()
        await turns()
        assert bench.wires[1].newest(ReleaseLease) == ReleaseLease(4, 5)

    asyncio.run(events())


IN_THREE_CHUNKS = PrefillCosts((64, 128), (0.0, 0.0), largest_chunk=32)


def test_chunks_are_copied_while_the_rest_is_computed() -> None:
    async def events() -> None:
        bench = Bench(costs=IN_THREE_CHUNKS)
        await bench.until_asked(1)
        await bench.leased(32, generation=7)
        await bench.copied(32)
        assert bench.wires[1].newest(ReleaseLease) == ReleaseLease(4, 7)
        await bench.until_asked(2)
        await bench.leased(64, generation=8)  # its copy is under way when the last chunk is computed
        number = bench.wires[1].newest(AddRequest).number
        ended = FinishedSequence(number, 0, FinishReason.LENGTH, np.array([5], np.int32), None, 0)
        bench.prefill.receive(Accepted(number, 0, 0))
        bench.prefill.receive(StepOutput(0, np.array([0], np.int64), np.array([5], np.int32), finished=(ended,)))
        await turns()
        assert bench.wires[1].newest(ReleaseLease) == ReleaseLease(4, 7), "the copy is not given up"
        await bench.copied(32)
        await bench.until_asked(3)
        await bench.leased(96, generation=9)
        await bench.copied(32)
        sent = bench.wires[0].newest(AddRequest)
        assert sent.transfer is not None and (sent.transfer.num_tokens, sent.transfer.failure) == (96, None)
        released = [each.generation for each in bench.wires[1].sent if isinstance(each, ReleaseLease)]
        assert released == [7, 8, 9]

    asyncio.run(events())


def test_engines_on_one_gpu_copy_at_the_end() -> None:
    async def events() -> None:
        bench = Bench(costs=IN_THREE_CHUNKS, device="cuda")
        await turns()
        assert len(asyncio.all_tasks()) == 2, "this one, and the one that follows the prompt"
        await bench.computed()
        await bench.copied(96)
        sent = bench.wires[0].newest(AddRequest).transfer
        assert sent is not None and sent.num_tokens == 96

    asyncio.run(events())


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_prompt_that_is_not_computed_to_its_end_leaves_no_lease(is_aborted: bool) -> None:
    async def events() -> None:
        bench = Bench(costs=IN_THREE_CHUNKS)
        await bench.until_asked(1)
        await bench.leased(32, generation=7)
        if is_aborted:
            bench.stream.close()
        else:
            bench.prefill.detach()
        await turns()
        released = [each for each in bench.wires[1].sent if isinstance(each, ReleaseLease)]
        assert released == ([ReleaseLease(4, 7)] if is_aborted else []), "an engine that ended has no leases"
        sent = [each for each in bench.wires[0].sent if isinstance(each, AddRequest)]
        assert [each.transfer.failure for each in sent if each.transfer is not None] == (
            [] if is_aborted else [TransferFailure.ENGINE_LOST]
        )
        assert len([task for task in asyncio.all_tasks() if not task.done()]) == 1, "this one"

    asyncio.run(events())


def test_a_prompt_whose_prefill_engine_ends_leaves_nothing_open() -> None:
    async def events() -> None:
        bench = Bench(timeout_s=5.0)
        await turns()
        assert bench.prefill.num_waiting_tokens == 96, "all but the block of the last token"
        bench.now_s = 2.0
        bench.prefill.detach()
        await turns()
        assert (bench.prefill.num_waiting_tokens, bench.decode.num_waiting_tokens) == (0, 112)
        sent = bench.wires[0].newest(AddRequest)
        assert sent.transfer is not None and sent.transfer.failure is TransferFailure.ENGINE_LOST
        assert sent.options.timeout_s == 3.0, "the time that the prompt took counts"

    asyncio.run(events())


def test_a_client_that_leaves_ends_the_computation_of_its_prompt() -> None:
    async def events() -> None:
        bench = Bench()
        await turns()
        bench.stream.close()
        await turns()
        assert bench.wires[1].newest(AbortRequest).number == bench.wires[1].newest(AddRequest).number
        assert not [each for each in bench.wires[0].sent if isinstance(each, AddRequest)]
        assert not bench.split._tasks

    asyncio.run(events())


def test_a_split_prompt_is_counted_once() -> None:
    async def events() -> None:
        context = RequestContext("id", 0.0)
        CURRENT_CONTEXT.set(context)
        bench = Bench()
        await bench.computed()
        assert context.num_prompt_tokens == 112
        bench.stream.close()

    asyncio.run(events())

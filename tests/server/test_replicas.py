"""Replicas of one model: which of them gets a request, and what happens when one is killed."""

import asyncio
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

import pytest

from quire.cli.config_file import ModelTable
from quire.cli.serve_models import check_several
from quire.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.sampling import SamplingParams
from quire.engine.open_model import OpenedModel, open_model
from quire.engine.outputs import RequestOutput
from quire.engine.request_state import RequestState
from quire.sched.prefix_router import CHUNK_TOKENS, PrefixRouter, prefix_hashes
from quire.server.async_engine import AsyncEngine, EngineLost
from quire.server.autoscaling import ReplicaLimits
from quire.server.engine_supervisor import Health, Supervisor
from quire.server.replicas import ReplicaSupervisor, ReplicatedEngine, RestartRunning
from quire.server.request_stream import RequestStream
from tests.clients.client_server import SMALL
from tests.server.local_server import local_server
from tests.server.supervision import until, watched

LINES = """{"step_ms": 2}
{"say": "on and on ", "end": false, "when": "endless"}
{"say": "Hello there."}
"""


def test_a_conversation_stays_where_its_prefix_is_and_all_replicas_work() -> None:
    """40 conversations of 8 turns, the requests of which stay open for random times, over 4 replicas."""
    chance = random.Random(7)
    router = PrefixRouter(4)
    talks = [[chance.randrange(1000) for _ in range(10 * CHUNK_TOKENS)] for _ in range(40)]
    open_until: list[tuple[int, int]] = []
    chosen: list[list[int]] = [[] for _ in talks]
    turns = [number for number in range(len(talks)) for _ in range(8)]
    chance.shuffle(turns)
    for now, number in enumerate(turns):
        open_until = [(end, rank) for end, rank in open_until if end > now]
        loads = {rank: sum(each == rank for _, each in open_until) for rank in range(4)}
        hashes = prefix_hashes("", talks[number])
        rank = router.choose(loads, hashes)
        router.note(rank, hashes)
        chosen[number].append(rank)
        open_until.append((now + chance.randint(1, 20), rank))
        talks[number] += [chance.randrange(1000) for _ in range(CHUNK_TOKENS)]
    sticky = sum(after == before for ranks in chosen for before, after in itertools.pairwise(ranks))
    assert sticky >= 0.9 * len(talks) * 7, chosen
    shares = Counter(rank for ranks in chosen for rank in ranks)
    assert max(shares.values()) <= 1.5 * min(shares[rank] for rank in range(4)), shares


def test_a_prefix_that_all_share_does_not_fill_one_replica() -> None:
    router = PrefixRouter(2)
    hashes = prefix_hashes("", range(100 * CHUNK_TOKENS))
    loads = {0: 0, 1: 0}
    for _ in range(200):  # all stay open
        rank = router.choose(loads, hashes)
        router.note(rank, hashes)
        loads[rank] += 1
    assert abs(loads[0] - loads[1]) <= 64


def test_a_router_keeps_tenants_apart_and_forgets() -> None:
    router = PrefixRouter(2)
    prompt = list(range(4 * CHUNK_TOKENS))
    own, other = prefix_hashes("1:a", prompt), prefix_hashes("1:b", prompt)
    assert not set(own) & set(other) and len(own) == 4
    assert prefix_hashes("1:a", [*prompt[:-1], 7])[:3] == own[:3] != own[1:]
    router.note(0, own)
    assert [router.num_known(0, own), router.num_known(0, other), router.num_known(1, own)] == [4, 0, 0]
    router.limit(0, 2 * CHUNK_TOKENS)
    router.note(0, other)
    assert [router.num_known(0, own), router.num_known(0, other)] == [0, 2], "the beginnings are kept longest"
    router.forget(0)
    assert router.num_known(0, other) == 0
    assert prefix_hashes("", prompt[: CHUNK_TOKENS - 1]) == []


class Replicas:
    """Two engine processes behind one client."""

    def __init__(self, opened: OpenedModel, script: Path, limits: ReplicaLimits | None = None) -> None:
        assert opened.tokenizer is not None
        self.tokenizer = opened.tokenizer
        engines = [AsyncEngine(opened.tokenizer, monotonic, rank, 2) for rank in range(2)]
        self.num_moved = 0
        for engine in engines:
            engine.moved = self._note_move
        self.engine = ReplicatedEngine(engines)
        config = EngineConfig(max_num_seqs=8)
        supervisors = [Supervisor(config, str(script), engine, clock=monotonic) for engine in engines]
        self.supervisor = ReplicaSupervisor(supervisors, self.engine, limits=limits)

    def _note_move(self, lost: RequestState) -> None:
        self.num_moved += 1

    def submit(self, text: str, max_tokens: int = 40, *, streaming: bool = True) -> RequestStream:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        return self.engine.submit(self.tokenizer.encode(text), params, streaming=streaming)

    async def until_moved(self, num_requests: int) -> None:
        await until(lambda: self.num_moved >= num_requests)

    async def until(self, *health: Health) -> None:
        await until(lambda: tuple(each.health for each in self.supervisor.supervisors) == health)


@asynccontextmanager
async def two_replicas(
    opened: OpenedModel, folder: Path, limits: ReplicaLimits | None = None
) -> AsyncIterator[Replicas]:
    script = folder / "script.jsonl"
    script.write_text(LINES)
    made = Replicas(opened, script, limits)
    async with watched(made.supervisor):
        yield made


async def output(call: RequestStream) -> RequestOutput | EngineLost:
    try:
        return await call.output()
    except EngineLost as lost:
        return lost
    finally:
        call.close()


def test_a_killed_replica_fails_only_streams_that_were_read_and_comes_back(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def body() -> None:
        async with two_replicas(open_model(EngineConfig()), tmp_path) as replicas:
            await replicas.until(Health.READY, Health.READY)
            calls = [replicas.submit(f"endless {number}", max_tokens=400) for number in range(8)]
            ranks = [call.state.number % 2 for call in calls]
            assert sorted(ranks) == [0] * 4 + [1] * 4, "balanced by their number"
            unread = [replicas.submit(f"endless {number}", 400, streaming=number < 2) for number in range(4)]
            assert [call.state.number % 2 for call in unread] == [0, 1, 0, 1]
            for call in calls:
                await call.receive()
            sampled = replicas.engine.stats
            victim = replicas.supervisor.supervisors[0].engine_pid
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            await replicas.until_moved(2)
            whole = await asyncio.gather(*map(output, unread))
            texts = {end.outputs[0].text for end in whole if isinstance(end, RequestOutput)}
            assert len(texts) == 1 and all(isinstance(end, RequestOutput) for end in whole), "begun again, and whole"
            assert [call.state.number % 2 for call in unread] == [1] * 4 and replicas.num_moved == 2
            ends = await asyncio.gather(*map(output, calls))
            for rank, end in zip(ranks, ends, strict=True):
                assert isinstance(end, EngineLost) if rank == 0 else isinstance(end, RequestOutput), (rank, end)
            assert all("try again" in end.message for end in ends if isinstance(end, EngineLost))
            assert replicas.supervisor.health is Health.READY, "the other one serves"
            between = await output(replicas.submit("hi"))
            assert isinstance(between, RequestOutput) and between.outputs[0].text == "Hello there."
            await replicas.until(Health.READY, Health.READY)
            assert replicas.supervisor.num_restarts == 1
            again = [replicas.submit(f"hello {number}") for number in range(2)]
            assert sorted(call.state.number % 2 for call in again) == [0, 1]
            assert all(isinstance(end, RequestOutput) for end in await asyncio.gather(*map(output, again)))
            now = replicas.engine.stats
            assert sampled is not None and now is not None and now.sampled_tokens >= sampled.sampled_tokens
            await roll(replicas)

    asyncio.run(body())


async def roll(replicas: Replicas) -> None:
    """A rolling restart under streams: all engines are others, and no request is lost or begun twice."""
    before = [each.engine_pid for each in replicas.supervisor.supervisors]
    calls = [replicas.submit(f"endless {number}", max_tokens=200) for number in range(4)]
    reading = [asyncio.create_task(output(call)) for call in calls]
    restarting = asyncio.create_task(replicas.supervisor.rolling_restart())
    while "draining" not in [load.health for load in replicas.supervisor.loads()]:
        await asyncio.sleep(0)
    with pytest.raises(RestartRunning):
        await replicas.supervisor.rolling_restart()
    while not restarting.done():
        assert isinstance(await output(replicas.submit("hi")), RequestOutput)
    assert await restarting == 2
    assert all(isinstance(end, RequestOutput) for end in await asyncio.gather(*reading))
    after = [each.engine_pid for each in replicas.supervisor.supervisors]
    assert not set(before) & set(after) and replicas.num_moved == 2 and replicas.supervisor.num_restarts == 1


@pytest.mark.long
def test_replicas_within_limits_follow_the_queue_and_lose_nothing(default_model_path: Path, tmp_path: Path) -> None:
    """Engines of 8 rows, of which there are one or two."""

    async def body() -> None:
        async with two_replicas(open_model(EngineConfig()), tmp_path, ReplicaLimits(1, 2, 0.5)) as replicas:

            async def until_ready(count: int) -> None:
                await until(lambda: [load.health for load in replicas.supervisor.loads()] == ["ready"] * count)

            await until_ready(1)
            calls = [replicas.submit(f"endless {number}", max_tokens=4000) for number in range(16)]
            reading = [asyncio.create_task(output(call)) for call in calls]
            await until_ready(2)
            later = await output(replicas.submit("hi"))
            assert isinstance(later, RequestOutput) and replicas.engine.num_submitted[1] == 1, "to the new one"
            for task in reading[8:]:  # what waits
                task.cancel()
            await until_ready(1)
            assert replicas.engine.info is not None and replicas.engine.info.max_num_seqs == 8
            assert [end for end in await asyncio.gather(*reading[:8]) if not isinstance(end, RequestOutput)] == []
            assert await replicas.supervisor.rolling_restart() == 1, "its successor is started first"
            await until_ready(1)
            assert [load.replica for load in replicas.supervisor.loads()] == [1]
            assert isinstance(await output(replicas.submit("hi")), RequestOutput) and replicas.num_moved == 0

    asyncio.run(body())


@pytest.mark.timeout(240)
def test_a_server_with_replicas_keeps_conversations_and_balances(tmp_path: Path, default_model_path: Path) -> None:
    lines: list[dict[str, object]] = [{"step_ms": 5}, {"say": "I see."}]
    with (
        local_server(tmp_path, lines, *SMALL, "--replicas", "2", "--admin-key", "sk-admin") as server,
        server.client(trust_env=False) as client,
    ):
        talks = [[{"role": "user", "content": f"{number} is the number of this talk. " * 40}] for number in range(8)]

        def say(talk: list[dict[str, str]]) -> dict[str, int]:
            reply = client.post("/v1/chat/completions", json={"messages": talk, "max_tokens": 8}).json()
            talk += [reply["choices"][0]["message"], {"role": "user", "content": "And then?"}]
            usage = reply["usage"]
            return {"prompt": usage["prompt_tokens"], "cached": usage["prompt_tokens_details"]["cached_tokens"]}

        first: list[dict[str, int]] = []
        sticky = 0
        for turn in range(4):
            with ThreadPoolExecutor(len(talks)) as pool:
                used = list(pool.map(say, talks))
            first = first or used
            sticky += sum(now["cached"] > 0.8 * begin["prompt"] for now, begin in zip(used, first, strict=True) if turn)
        assert sticky >= 0.9 * 3 * len(talks)
        load = client.get("/load").json()
        assert [each["health"] for each in load["replicas"]] == ["ready", "ready"]
        served = [each["num_submitted"] for each in load["replicas"]]
        assert sum(served) == 32 and min(served) >= 10, served
        freed = client.post("/reset_prefix_cache", headers={"x-api-key": "sk-admin"}).json()["freed_blocks"]
        assert freed > 8 * 10, "of both"


def test_replicas_are_of_one_model() -> None:
    given = {
        "aliases": (),
        "otlp_endpoint": None,
        "kv_events": None,
        "record": None,
        "replicas": 2,
        "prefill_engines": 0,
    }
    with pytest.raises(ConfigError, match="--replicas is for one model"):
        check_several(None, given, [ModelTable("a", {}, False, {})])

"""`kill -9` of a random rank of an engine at random steps: every client is told, and nothing is left behind."""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from tests.chaos.conftest import Dose, Report
from tests.llm.tiny import tiny_llama, write_model
from tests.server.many_clients import RawClient, RawResponse, request
from tests.server.server_process import START_PATIENCE_S, Running, is_alive, serving, wait_until, wait_until_at_rest
from tests.tiers import long_only

NUM_STREAMS = 6
SETTINGS = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory", "4MiB")
ENDLESS = {"prompt": "once", "max_tokens": 500, "ignore_eos": True, "stream": True, "temperature": 0}
CONTROL = {"prompt": "the same again", "max_tokens": 6, "temperature": 0}


def children_of(pid: int, module: str) -> list[int]:
    listed = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    pids = [int(each) for each in " ".join(listed).split()]
    return [each for each in pids if module.encode() in Path(f"/proc/{each}/cmdline").read_bytes()]


def strike(server: Running, victim: int, num_chunks: int) -> list[RawResponse]:
    """Kill a process when the first stream has got so many chunks; what each client got."""

    async def crowd() -> list[RawResponse]:
        streams = [await RawClient.connect(server.port, request(ENDLESS)) for _ in range(NUM_STREAMS)]
        for _ in range(num_chunks):
            await streams[0].receive_until(b'"text"')
        os.kill(victim, signal.SIGKILL)
        return list(await asyncio.gather(*(stream.receive_all() for stream in streams)))

    return asyncio.run(crowd())


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2), *long_only([(2, 2), (4, 1)])])
def test_a_rank_is_killed_at_random_steps(
    tmp_path: Path, report: Report, dose: Dose, size: int, num_stages: int
) -> None:
    rng = random.Random(11)
    folder = write_model(tmp_path, tiny_llama())
    ranks = ("--tensor-parallel-size", str(size), "--pipeline-parallel-size", str(num_stages))
    with serving(str(folder), *ranks, *SETTINGS) as server, server.client() as client:
        expected = client.post("/v1/completions", json=CONTROL).json()["choices"]
        num_files = server.num_files
        for _ in range(dose(2)):
            engine = server.engine_pid
            pids = children_of(engine, "quire.engine.rank_main")
            assert len(pids) == size * num_stages - 1
            responses = strike(server, rng.choice(pids), rng.randrange(1, 12))
            assert all(each.failed and not each.complete for each in responses), "every client is told"
            wait_until(lambda: client.get("/ready").status_code == 200, START_PATIENCE_S)
            assert not any(is_alive(pid) for pid in (engine, *pids))
            assert client.post("/v1/completions", json=CONTROL).json()["choices"] == expected
            wait_until_at_rest(client)
            assert server.num_files <= num_files + 2
        pids = children_of(server.engine_pid, "quire.engine.rank_main")
    assert pids and not any(is_alive(pid) for pid in pids), "they end with the server"
    report(f"ranks killed under streams, TP {size} × PP {num_stages}", dose(2))


@pytest.mark.parametrize(("size", "num_stages"), long_only([(2, 1), (1, 2)]))
def test_a_rank_of_one_of_two_replicas_is_killed(tmp_path: Path, size: int, num_stages: int) -> None:
    """That replica is started again; the other one goes on."""
    folder = write_model(tmp_path, tiny_llama())
    ranks = ("--replicas", "2", "--tensor-parallel-size", str(size), "--pipeline-parallel-size", str(num_stages))
    with serving(str(folder), *ranks, *SETTINGS) as server, server.client() as client:

        def replicas() -> list[dict[str, object]]:
            rows: list[dict[str, object]] = client.get("/load").json()["replicas"]
            return rows

        expected = client.post("/v1/completions", json=CONTROL).json()["choices"]
        engines = [each["pid"] for each in replicas()]
        [rank] = children_of(engines[0], "quire.engine.rank_main")
        responses = strike(server, rank, 3)
        assert all(each.failed != each.complete for each in responses), "every client is told"
        assert sum(each.failed for each in responses) <= NUM_STREAMS // 2, "no more than that replica had"
        wait_until(lambda: all(each["health"] == "ready" for each in replicas()), START_PATIENCE_S)
        found = [each["pid"] for each in replicas()]
        assert found[0] != engines[0] and found[1] == engines[1]
        assert [each["num_restarts"] for each in replicas()] == [1, 0]
        for _ in range(2):
            assert client.post("/v1/completions", json=CONTROL).json()["choices"] == expected
        wait_until_at_rest(client)
        pids = [pid for engine in found for pid in children_of(engine, "quire.engine.rank_main")]
    assert len(pids) == 2 and not any(is_alive(pid) for pid in (*found, *pids)), "they end with the server"

"""Prefill/decode split under kills: a real server, a real client, KV blocks with real bytes.

Every request has a prompt whose answer a single engine gave before, and a cache salt of its own: nothing is cached for
it, and a block that was copied from a wrong place gives another answer. `make test-chaos ARGS="-k split --dose 10000
--timeout 0"` goes on until so many requests were split.
"""

import asyncio
import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from openai import APIError, AsyncOpenAI

from quire.engine.prefix_transfer import LEASE_S
from tests.chaos.conftest import Dice, Dose, Report
from tests.llm.tiny import VOCAB, tiny_llama, write_model
from tests.server.server_process import PATIENCE_S, START_PATIENCE_S, Running, serving, wait_until, wait_until_at_rest

NUM_CLIENTS = 8
NUM_PROMPTS = 24
SETTINGS = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-model-len", "2048",
            "--kv-cache-memory", "16MiB", "--max-num-seqs", str(NUM_CLIENTS))  # fmt: skip
SPLIT_PER_FAULT = 40  # split requests between two faults, on average
FAULTS = ("kill prefill", "kill prefill", "kill decode", "stop prefill", "stop decode")
TOLD = ("engine_lost", "engine_unavailable")  # what a client may be told: it tries again


def long_context_model(folder: Path) -> Path:
    model = tiny_llama()
    model.config.max_position_embeddings = 2048
    return write_model(folder, model)


def prompts() -> list[list[int]]:
    chance = random.Random(25)
    return [[chance.randrange(3, VOCAB) for _ in range(chance.randint(560, 1400))] for _ in range(NUM_PROMPTS)]


def body_of(prompt: list[int], **fields: object) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}


def answers_of_one_engine(folder: Path) -> list[str]:
    with serving(str(folder), "--served-model-name", "tiny", *SETTINGS) as server, server.client() as client:
        replies = [client.post("/v1/completions", json=body_of(prompt)).json() for prompt in prompts()]
    return [reply["choices"][0]["text"] for reply in replies]


class SplitServer:
    """A server with a prefill and a decode engine, and what its pages say of them."""

    def __init__(self, server: Running, client: httpx.Client) -> None:
        self.server = server
        self._client = client

    def engines(self) -> dict[str, dict[str, Any]]:
        """By role."""
        return {row["role"]: row for row in self._client.get("/load").json()["replicas"]}

    def split(self) -> Counter[str]:
        """Requests that were split: whose prompt was copied, and why others were not."""
        page = self._client.get("/metrics").text
        found = re.findall(r'^quire_requests_prefill_fallback_total\{reason="(\w+)"\} (\S+)$', page, re.MULTILINE)
        reasons = Counter({reason: int(float(count)) for reason, count in found})
        total = re.search(r"^quire_requests_split_total (\S+)$", page, re.MULTILINE)
        assert total is not None, page
        reasons["copied"] = int(float(total[1])) - reasons.total()
        return reasons

    def num_split(self) -> int:
        """Those that a prefill engine was asked for."""
        found = self.split()
        return found.total() - found["no_prefill_engine"]

    def wait_until_ready(self) -> None:
        wait_until(lambda: all(row["health"] == "ready" for row in self.engines().values()), START_PATIENCE_S)

    def wait_until_nothing_is_held(self) -> None:
        """No request is open, and every block of both engines is free or cached."""
        wait_until_at_rest(self._client)
        wait_until(lambda: all(row["num_held_blocks"] == 0 for row in self.engines().values()))


class SplitClients:
    """Clients that send one request after the other, leave some of them, and compare the answers of the others."""

    def __init__(self, url: str, expected: list[str], dice: random.Random) -> None:
        self._openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S * 2)
        self._prompts, self._expected, self._dice = prompts(), expected, dice
        self._num_sent = 0
        self.ends: Counter[str] = Counter()
        self.is_over = False

    async def run(self) -> None:
        async with self._openai:
            await asyncio.gather(*(self._client() for _ in range(NUM_CLIENTS)))

    async def _client(self) -> None:
        while not self.is_over:
            number = self._dice.randrange(NUM_PROMPTS)
            self._num_sent += 1
            body = body_of(self._prompts[number], extra_body={"cache_salt": f"salt {self._num_sent}"})
            draw = self._dice.random()
            try:
                if draw < 0.08:
                    await self._leave_early(body)
                elif draw < 0.16:
                    await self._leave_stream(body)
                else:
                    reply = await self._openai.completions.create(**body)
                    assert reply.choices[0].text == self._expected[number], (number, reply)
                    self.ends["answered"] += 1
            except APIError as error:
                assert error.code in TOLD, error
                self.ends[str(error.code)] += 1
                await asyncio.sleep(0.2)

    async def _leave_early(self, body: dict[str, Any]) -> None:
        """Disconnected at some moment of the prompt, the copy or the answer."""
        try:
            async with asyncio.timeout(self._dice.uniform(0.001, 0.15)):
                await self._openai.completions.create(**body)
            self.ends["answered before it was left"] += 1
        except TimeoutError:
            self.ends["left"] += 1

    async def _leave_stream(self, body: dict[str, Any]) -> None:
        """Disconnected after the first chunks."""
        stream = await self._openai.completions.create(**body, stream=True)
        async with stream:
            async for _ in stream:
                if self._dice.random() < 0.3:
                    break
        self.ends["left in its stream"] += 1


async def inject(split: SplitServer, clients: SplitClients, dice: random.Random, num_wanted: int) -> Counter[str]:
    """Kill and stop engines until so many requests were split."""
    faults: Counter[str] = Counter()
    due = SPLIT_PER_FAULT // 2
    while (num_split := await asyncio.to_thread(split.num_split)) < num_wanted:
        if num_split >= due:
            due = num_split + dice.randint(SPLIT_PER_FAULT // 2, 3 * SPLIT_PER_FAULT // 2)
            fault = dice.choice(FAULTS)
            if await strike(split, fault, dice):
                faults[fault] += 1
                print(f"{num_split} split, {fault}: {dict(clients.ends)}", flush=True)
        await asyncio.sleep(0.1)
    return faults


async def strike(split: SplitServer, fault: str, dice: random.Random) -> bool:
    """False if the engine is being started."""
    verb, role = fault.split()
    engine = (await asyncio.to_thread(split.engines))[role]
    if engine["health"] != "ready":
        return False
    if verb == "kill":
        os.kill(engine["pid"], signal.SIGKILL)
        return True
    os.kill(engine["pid"], signal.SIGSTOP)  # a decode engine that stands still finds that its leases have ended
    try:
        await asyncio.sleep(LEASE_S + 1 if role == "decode" else dice.uniform(0.1, 2))
    finally:
        os.kill(engine["pid"], signal.SIGCONT)
    return True


def test_split_requests_survive_kills_of_either_side(tmp_path: Path, report: Report, dose: Dose, dice: Dice) -> None:
    run_under_faults(long_context_model(tmp_path), report, dose(200), dice)


def run_under_faults(folder: Path, report: Report, num_wanted: int, dice: Dice, *flags: str) -> None:
    """Until so many requests were split."""
    expected = answers_of_one_engine(folder)
    assert len(set(expected)) > NUM_PROMPTS // 2, "answers that tell prompts apart"
    arguments = ("--served-model-name", "tiny", "--prefill-engines", "1", *SETTINGS, *flags)
    with serving(str(folder), *arguments) as server, server.client() as client:
        split = SplitServer(server, client)
        split.wait_until_ready()
        num_files, began_s = server.num_files, time.monotonic()
        clients = SplitClients(server.url, expected, dice(25))

        async def crowd() -> Counter[str]:
            running = asyncio.create_task(clients.run())
            injecting = asyncio.create_task(inject(split, clients, dice(26), num_wanted))
            await asyncio.wait((running, injecting), return_when=asyncio.FIRST_COMPLETED)
            clients.is_over = True
            await running  # raises what a client has found
            return await injecting

        faults = asyncio.run(crowd())
        split.wait_until_ready()
        split.wait_until_nothing_is_held()
        found, seconds = split.split(), time.monotonic() - began_s
        wait_until(lambda: server.num_files <= num_files + 8)
        report(f"split requests in {seconds:.0f} s, with {faults.total()} faults", f"{found.total()}: {dict(found)}")
        report("  faults", dict(faults))
        report("  what the clients saw", dict(clients.ends))
        num_asked = found.total() - found["no_prefill_engine"]
        assert clients.ends["answered"] > found.total() / 2 and found["copied"] > num_asked / 2, found

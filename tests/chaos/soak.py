"""A soak: mixed requests at a low rate for a long time, with aborts, bad input, hostile grammars and killed engines.

`python -m tests.chaos.soak MINUTES [REQUESTS_PER_S]` prints a line per minute: what the front process, the engine and
the others hold, and what went wrong. Every response is compared with what the script says. A request that a kill
overlaps may fail, but what looks complete must be right. The exit status is 1 if something was wrong or has leaked.
"""

import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from tests.attack.bombs import lark_bomb, regex_bomb, schema_bomb
from tests.attack.conftest import HOSTILE, INNOCENT
from tests.attack.test_advisories import tree
from tests.attack.test_malformed import spoilt
from tests.server.many_clients import RawClient, RawResponse, fetch, request
from tests.server.scripted_servers import CONTROL, completion_body, scripted
from tests.server.server_process import Running, counted, load, wait_until, wait_until_at_rest

SECRET = "Nobody knows. 🙂 日本語"
NUM_CLIENTS = 8
MINUTES_PER_KILL = 5
MESSAGES = [{"role": "user", "content": "hi"}]
GOOD = [
    request(completion_body("hi", max_tokens=2), headers=HOSTILE),
    request({"messages": MESSAGES, "max_tokens": 2}, "/v1/chat/completions", HOSTILE),
]


class Outcome(NamedTuple):
    """What came of one exchange: not `right` is a wrong answer unless `failed` says that the server gave an error."""

    right: bool
    failed: bool = False
    seen: str = ""


def judged(response: RawResponse, right: bool) -> Outcome:
    failed = response.status in (0, 429, 500, 503) or response.failed or not response.complete
    return Outcome(right, failed, f"{response.status} {response.body[:200]!r}")


def text_of(response: RawResponse) -> str:
    """All text of a completion or a chat, streamed or not."""
    body = response.body.decode("utf-8", "replace")
    lines = [line[6:] for line in body.splitlines() if line.startswith("data: {")] or [body]
    try:
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    except (ValueError, KeyError):
        return ""
    parts = [choice.get("text") or choice.get("delta", choice.get("message", {})).get("content") for choice in choices]
    return "".join(part or "" for part in parts)


class Traffic:
    """One exchange of each kind. The port may be asked at any time."""

    def __init__(self, port: int, chance: random.Random) -> None:
        self._port = port
        self._chance = chance
        self._number = 0
        self.control_s: list[float] = []  # of plain requests
        common, rare = 12, 1
        self._kinds: dict[Callable[[], Awaitable[Outcome]], int] = {
            self.control: 3 * common, self.chat: 2 * common, self.secret: common, self.several: common,
            self.schema: common // 2, self.aborted: 2 * common, self.malformed: common, self.broken: common // 2,
            self.stored: common // 2, self.pages: common, self.expired: common // 4, self.bomb: rare,
        }  # fmt: skip

    async def one(self) -> tuple[str, Outcome]:
        self._number += 1
        [kind] = self._chance.choices(list(self._kinds), list(self._kinds.values()))
        return kind.__name__, await kind()  # type: ignore[attr-defined]

    async def _post(self, body: dict[str, object], path: str = "/v1/completions") -> RawResponse:
        return await fetch(self._port, request(body, path, INNOCENT))

    async def control(self) -> Outcome:
        response = await self._post(completion_body("hi"))
        self.control_s.append(response.seconds)
        return judged(response, text_of(response) == CONTROL)

    async def chat(self) -> Outcome:
        prompt = [{"role": "user", "content": f"hi {self._number} " * self._chance.randrange(1, 200)}]
        body = {"messages": prompt, "stream": self._chance.random() < 0.7}
        response = await self._post(body, "/v1/chat/completions")
        return judged(response, text_of(response) == CONTROL)

    async def secret(self) -> Outcome:
        response = await self._post(completion_body(f"secret {self._number}", stream=True, logprobs=2))
        return judged(response, text_of(response) == SECRET)

    async def several(self) -> Outcome:
        response = await self._post(completion_body(["hi", "secret"], n=2))
        return judged(response, text_of(response) == 2 * CONTROL + 2 * SECRET)

    async def schema(self) -> Outcome:
        """A new schema each time; the script's text does not matter under it, only that it is an object's beginning."""
        schema = {"type": "object", "properties": {f"f{self._number}": {"type": "integer"}}}
        shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        response = await self._post(completion_body("hi", max_tokens=20, response_format=shape))
        return judged(response, text_of(response).lstrip().startswith("{"))

    async def aborted(self) -> Outcome:
        """Disconnected at a random moment: queued, in its prompt, streaming, or in its body."""
        sent = request(completion_body("endless " * self._chance.choice((1, 1, 900)), stream=True), headers=INNOCENT)
        client = await RawClient.connect(self._port, sent[: -self._chance.choice((0, 0, 9)) or None])
        await asyncio.sleep(self._chance.random() * 0.2)
        client.disconnect()
        return Outcome(right=True)

    async def malformed(self) -> Outcome:
        client = await RawClient.connect(self._port, spoilt(self._chance, GOOD))
        client.end()
        response = await client.receive_all()
        return Outcome(response.status < 500, response.status in (429, 503), f"{response.status} {response.body!r}")

    async def broken(self) -> Outcome:
        """A row whose numbers are not finite: an error, and nothing that looks complete."""
        response = await self._post(completion_body("boom", stream=True))
        return Outcome(response.failed and not response.complete, response.status == 503, f"{response.body[-200:]!r}")

    async def stored(self) -> Outcome:
        created = await self._post({"input": "hi"}, "/v1/responses")
        if created.status != 200:
            return judged(created, right=False)
        made = json.loads(created.body)
        path = f"/v1/responses/{made['id']}"
        found = await self._get(path)
        deleted = await fetch(self._port, self._bare("DELETE", path))
        right = made["output"][0]["content"][0]["text"] == CONTROL and json.loads(found.body) == made
        seen = f"{found.body[:200]!r}"
        return Outcome(right and deleted.status == 200, 503 in (found.status, deleted.status), seen)

    async def pages(self) -> Outcome:
        path = self._chance.choice(("/v1/models", "/metrics", "/load", "/health", "/ready", f"/nothing/{self._number}"))
        response = await self._get(path)
        return Outcome(response.status == (404 if "nothing" in path else 200), response.status == 503, path)

    async def expired(self) -> Outcome:
        """A deadline that passes before the request is admitted, in most cases."""
        response = await self._post(completion_body("hi", timeout_s=0.0001))
        right = response.status == 504 or text_of(response) == CONTROL
        return Outcome(right, response.status == 503, f"{response.status} {response.body[:200]!r}")

    async def bomb(self) -> Outcome:
        """Of another tenant. 503: the machine is too busy to compile it in time."""
        kind = self._chance.randrange(3)
        fields: dict[str, object] = {"structured_outputs": {"regex": regex_bomb(self._chance)}}
        if kind == 1:
            fields = {"structured_outputs": {"grammar": lark_bomb(self._chance)}}
        elif kind == 2:
            fields = {"structured_outputs": {"json": json.loads(schema_bomb(self._chance))}}
        response = await fetch(self._port, request(completion_body("hi", max_tokens=20, **fields), headers=HOSTILE))
        return Outcome(response.status in (200, 400, 503), seen=f"{response.status} {response.body[:200]!r}")

    async def _get(self, path: str) -> RawResponse:
        return await fetch(self._port, self._bare("GET", path))

    def _bare(self, method: str, path: str) -> bytes:
        key = INNOCENT["Authorization"]
        return f"{method} {path} HTTP/1.1\r\nHost: here\r\nAuthorization: {key}\r\nConnection: close\r\n\r\n".encode()


class Soak:
    """The clients, and what they saw since the last look."""

    def __init__(self, server: Running, rate: float, seed: int) -> None:
        self._server = server
        self._rate = rate
        self.traffic = Traffic(server.port, random.Random(seed))
        self._open = asyncio.Event()
        self._open.set()
        self._in_flight = 0
        self._num_kills = 0  # and ends of kills: odd while the engine is down
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def client(self, chance: random.Random) -> None:
        while True:
            await asyncio.sleep(chance.expovariate(self._rate / NUM_CLIENTS))
            await self._open.wait()
            self._in_flight += 1
            kills = self._num_kills
            try:
                name, outcome = await self.traffic.one()
            finally:
                self._in_flight -= 1
            self.counts[name] += 1
            if outcome.right:
                continue
            if outcome.failed and (self._num_kills > kills or kills % 2):
                self.counts["lost to a kill"] += 1
            else:
                self.wrong.append(f"{name}: {outcome.seen}")

    async def kill(self) -> None:
        """The engine, in the midst of requests. Until another one is ready, requests may fail."""
        self._num_kills += 1
        os.kill(self._server.engine_pid, signal.SIGKILL)
        with self._server.client(headers=INNOCENT) as client:
            await asyncio.to_thread(wait_until, lambda: client.get("/ready").status_code == 503)
            await asyncio.to_thread(wait_until, lambda: client.get("/ready").status_code == 200)
        self._num_kills += 1

    async def pause(self) -> None:
        """Until no request is under way."""
        self._open.clear()
        while self._in_flight:
            await asyncio.sleep(0.01)

    def resume(self) -> None:
        self._open.set()


class Held(NamedTuple):
    """What a server at rest holds."""

    front_kib: int
    engine_kib: int
    others_kib: int
    num_files: int
    num_threads: int
    num_processes: int
    num_held_blocks: int


def held_by(server: Running) -> Held:
    with server.client(headers=INNOCENT) as client:
        wait_until_at_rest(client)
        now = load(client)
        blocks = round(now.get("kv_cache_usage", 0) * 10**6)
    engine = server.engine_pid
    others = [pid for pid in tree(server.process.pid) if pid not in (engine, server.process.pid)]
    return Held(
        server.resident_bytes >> 10, anonymous_kib(engine), sum(map(anonymous_kib, others)),
        server.num_files, server.num_threads, 2 + len(others), blocks,
    )  # fmt: skip


def anonymous_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # a compiler that ended
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


COLUMNS = "minute  requests  kills  front KiB  engine KiB  others KiB  files  threads  processes  p50 ms  lost  wrong"


async def soak(server: Running, minutes: int, rate: float, seed: int) -> tuple[list[Held], list[str]]:
    run = Soak(server, rate, seed)
    clients = [asyncio.create_task(run.client(random.Random(f"{seed} {number}"))) for number in range(NUM_CLIENTS)]
    held: list[Held] = []
    wrong: list[str] = []
    print(COLUMNS, flush=True)
    for minute in range(1, minutes + 1):
        began_s = time.monotonic()
        await asyncio.sleep(30)
        killed = minute % MINUTES_PER_KILL == 0
        if killed:
            await run.kill()
        await asyncio.sleep(max(0.0, began_s + 60 - time.monotonic()))
        await run.pause()
        held.append(await asyncio.to_thread(held_by, server))
        now, lost = held[-1], run.counts.pop("lost to a kill", 0)
        p50_ms = 1000 * statistics.median(run.traffic.control_s or [0.0])
        print(
            f"{minute:6} {run.counts.total():9} {int(killed):6} {now.front_kib:10} {now.engine_kib:11} "
            f"{now.others_kib:11} {now.num_files:6} {now.num_threads:8} {now.num_processes:10} {p50_ms:7.1f} "
            f"{lost:5} {len(run.wrong):6}",
            flush=True,
        )
        for each in run.wrong:
            print("  wrong:", each, flush=True)
        wrong += run.wrong
        run.counts.clear()
        run.wrong.clear()
        run.traffic.control_s.clear()
        run.resume()
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return held, wrong


def main(minutes: int, rate: float) -> int:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}, {rate:g} requests/s", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys, log = folder / "keys", folder / "log"
        keys.write_text("sk-hostile name=hostile\nsk-innocent name=innocent trusted\n")
        starts = ("--max-num-seqs", "16", "--max-waiting", "32", "--api-key-file", str(keys))
        with log.open("w") as out, scripted(folder, *starts, stdout=out) as server:
            held, wrong = asyncio.run(soak(server, minutes, rate, seed))
            with server.client(headers=INNOCENT) as client:
                restarts = int(counted(client, "engine_restarts_total"))
        failures = sum('"status": 500' in line or "Traceback" in line for line in log.read_text().splitlines())
    middle, later = held[len(held) // 2], held[len(held) // 2 :]
    grown_kib = max(each.front_kib for each in later) - middle.front_kib
    print(f"restarts {restarts}; lines of the log with a failure of the server {failures}; wrong {len(wrong)}")
    print(f"front process, second half: {grown_kib} KiB more at most; files {middle.num_files} to {held[-1].num_files}")
    return int(bool(wrong or failures))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 20.0))

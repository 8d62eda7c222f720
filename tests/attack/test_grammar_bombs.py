"""Hostile grammars of one tenant beside ordinary requests of another."""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.attack.bombs import lark_bomb, regex_bomb, schema_bomb
from tests.attack.conftest import HOSTILE, INNOCENT
from tests.attack.keyword_bombs import keyword_lark_bomb, keyword_regex_bomb, keyword_schema_bomb
from tests.chaos.conftest import Dice, Dose, Report
from tests.chaos.test_long import percentile
from tests.server.many_clients import RawClient, RawResponse, fetch, request
from tests.server.scripted_servers import completion_body
from tests.server.server_process import Running

NUM_BOMBS = 150
NUM_HOSTILE = 4  # clients at a time
WATCHED = request(completion_body("endless", stream=True), headers=INNOCENT)


Make = Callable[[random.Random], str]
BOMBS: dict[str, tuple[Make, Make, Make]] = {  # regular expressions, Lark grammars, schemas
    "multiplied": (regex_bomb, lark_bomb, schema_bomb),
    "rare keywords": (keyword_regex_bomb, keyword_lark_bomb, keyword_schema_bomb),
}


def bomb(chance: random.Random, make: tuple[Make, Make, Make]) -> dict[str, object]:
    kind = chance.randrange(4)
    if kind == 0:
        return {"structured_outputs": {"regex": make[0](chance)}}
    if kind == 1:
        return {"structured_outputs": {"grammar": make[1](chance)}}
    schema = json.loads(make[2](chance))
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "bomb", "schema": schema, "strict": True}}
    }


def ordinary(number: int) -> dict[str, object]:
    """A schema that was not compiled before."""
    schema = {"type": "object", "properties": {f"field{number}": {"type": "integer"}}, "required": [f"field{number}"]}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "plain", "schema": schema}}}


class Attack:
    """What the hostile and the innocent clients received."""

    def __init__(self, port: int, num_bombs: int, chance: random.Random, bombs: str = "multiplied") -> None:
        self._port = port
        self._bombs = BOMBS[bombs]
        self._num_bombs = num_bombs
        self._chance = chance
        self.hostile: list[RawResponse] = []
        self.innocent: list[RawResponse] = []
        self.gaps_s: list[float] = []  # between the tokens of a stream: an engine that stands still shows here

    async def watch(self) -> None:
        """One stream after another, until it is cancelled."""
        while True:
            watched = await RawClient.connect(self._port, WATCHED)
            await watched.receive_until(b"data: ")
            while b"[DONE]" not in watched.received[-64:]:
                began_s = time.monotonic()
                await watched.receive_some()
                self.gaps_s.append(time.monotonic() - began_s)
            watched.disconnect()

    async def run(self) -> None:
        watching = asyncio.create_task(self.watch())
        await self._run()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    async def _run(self) -> None:
        clients = [asyncio.create_task(self._attack()) for _ in range(NUM_HOSTILE)]
        number = self._chance.randrange(1 << 40)  # of schemas that no other test has sent
        while not all(client.done() for client in clients):
            for fields in (ordinary(number), {}):
                sent = request(completion_body("hi", max_tokens=20, **fields), headers=INNOCENT)
                self.innocent.append(await fetch(self._port, sent))
            number += 1
        await asyncio.gather(*clients)

    async def _attack(self) -> None:
        for _ in range(self._num_bombs // NUM_HOSTILE):
            sent = request(completion_body("hi", max_tokens=40, **bomb(self._chance, self._bombs)), headers=HOSTILE)
            self.hostile.append(await fetch(self._port, sent))


async def quiet_gaps_s(port: int) -> list[float]:
    """The same without an attack: what the machine does to a stream."""
    quiet = Attack(port, 0, random.Random(0))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(quiet.watch(), 10)
    return quiet.gaps_s


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bombs", BOMBS)
def test_grammar_bombs(server: Running, report: Report, dose: Dose, dice: Dice, bombs: str) -> None:
    quiet_s = asyncio.run(quiet_gaps_s(server.port))
    engine, before_bytes, began_s = server.engine_pid, server.resident_bytes, time.monotonic()
    attack = Attack(server.port, dose(NUM_BOMBS), dice(20), bombs)
    asyncio.run(attack.run())
    statuses = Counter(each.status for each in attack.hostile)
    grown = server.resident_bytes - before_bytes
    report(f"{len(attack.hostile)} grammar bombs ({bombs}): statuses", dict(sorted(statuses.items())))
    report("slowest answer to a bomb, s", round(max(each.seconds for each in attack.hostile), 2))
    report("meanwhile requests of another tenant, half with a new schema", len(attack.innocent))
    report("  their p50 and p99, s", [round(percentile([r.seconds for r in attack.innocent], p), 3) for p in (50, 99)])
    for when, gaps_s in (("meanwhile", attack.gaps_s), ("for 10 s before", quiet_s)):
        figures = [round(1000 * percentile(gaps_s, share)) for share in (50, 99, 100)]
        report(f"  between the tokens of a stream {when}: p50, p99 and longest, ms", figures)
    report("  in all, s; front's memory, MiB more", (round(time.monotonic() - began_s), grown >> 20))
    assert set(statuses) <= {200, 400, 503}, "503: all compilers were busy, with its own bombs"
    assert {each.status for each in attack.innocent} == {200}
    assert server.engine_pid == engine and grown < 64 << 20

"""Malformed requests and JSON bombs: always an error of the client's, never one of the server's."""

import asyncio
import random

from tests.attack.conftest import HOSTILE, INNOCENT
from tests.chaos.conftest import Report
from tests.server.http.test_json_bombs import BOMBS
from tests.server.many_clients import RawClient, RawResponse, request
from tests.server.scripted_servers import check_control, completion_body
from tests.server.server_process import Running, wait_until_at_rest


def test_malformed_requests(server: Running, report: Report) -> None:
    """10,000: good requests with some bytes changed, cut or doubled."""
    chance = random.Random(7)
    good = [
        request(completion_body("hi", max_tokens=2), headers=HOSTILE),
        request({"messages": [{"role": "user"}]}, "/v1/chat/completions", HOSTILE),
    ]

    def spoilt() -> bytes:
        sent = bytearray(chance.choice(good))
        for _ in range(chance.randrange(1, 6)):
            place = chance.randrange(len(sent))
            kind = chance.randrange(3)
            if kind == 0:
                sent[place] = chance.randrange(256)
            elif kind == 1:
                del sent[place : place + chance.randrange(1, 8)]
            else:
                sent[place:place] = sent[place : place + chance.randrange(1, 64)]
        return bytes(sent)

    async def one(sent: bytes) -> RawResponse:
        raw_client = await RawClient.connect(server.port, sent)
        raw_client.end()  # a body that lacks some bytes is not waited for
        return await raw_client.receive_all()

    async def crowd() -> list[RawResponse]:
        responses: list[RawResponse] = []
        for _ in range(100):
            responses += await asyncio.gather(*(one(spoilt()) for _ in range(100)))
        return responses

    before_bytes = server.resident_bytes
    responses = asyncio.run(crowd())
    statuses = {
        status: [each.status for each in responses].count(status) for status in {each.status for each in responses}
    }
    with server.client(headers=INNOCENT) as client:
        for bomb in BOMBS.values():
            assert client.post("/v1/completions", content=bomb).status_code in (400, 413)
        check_control(client)
        wait_until_at_rest(client)
    report("10,000 malformed requests: statuses (0: hung up)", dict(sorted(statuses.items())))
    report("front's memory after them and the bombs, MiB more", (server.resident_bytes - before_bytes) >> 20)
    assert len(responses) == 10_000 and not any(status >= 500 for status in statuses)
    assert server.resident_bytes - before_bytes < 128 << 20

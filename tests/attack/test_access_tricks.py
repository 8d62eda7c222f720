"""Without a key: every route and method, tricks of Host, path and header, and the time that a wrong key takes."""

import asyncio
import itertools
import operator
import random
import time
from collections import Counter

from quire.server.app import ENDPOINTS, STATIC_ROUTES
from quire.server.http.auth import make_key_ring
from quire.server.http.middleware import METHODS
from tests.attack.advisories import http
from tests.attack.conftest import INNOCENT
from tests.chaos.conftest import Report
from tests.server.http.test_access import mutations
from tests.server.many_clients import fetch_all
from tests.server.scripted_servers import check_control
from tests.server.server_process import Running

NUM_TRICKS = 1000
PUBLIC = {"/health", "/ready", *STATIC_ROUTES}
NUM_TIMED = 40_000  # of each kind


def served_paths() -> list[str]:
    served = [endpoint.path for endpoint in ENDPOINTS]
    named = [path.replace("{name:path}", "a/b").replace("{request_id}", "1") for path in served]
    return sorted({*named, *STATIC_ROUTES, "/openapi.json", "/nowhere", "/admin", "/admin/x", "/v1"})


def test_every_route_and_method_without_a_key(server: Running, report: Report) -> None:
    methods = [*sorted(METHODS), "PROPFIND", "TRACE", "QUERY"]
    asked = list(itertools.product(methods, served_paths()))
    sent = [http(path, {} if method == "POST" else None, method=method, key=None) for method, path in asked]
    responses = asyncio.run(fetch_all(server.port, sent, at_once=16))
    statuses = {pair: response.status for pair, response in zip(asked, responses, strict=True)}
    public = {pair for pair in asked if pair[0] in ("GET", "HEAD") and pair[1] in PUBLIC}
    allowed = {pair for pair, status in statuses.items() if status not in (400, 401)}  # 400: no method of HTTP
    report(f"{len(served_paths())} routes × {len(methods)} methods without a key", dict(Counter(statuses.values())))
    assert allowed == public and {statuses[pair] for pair in public} == {200}


def tricks() -> list[bytes]:
    """Paths that look public, in requests whose other parts lie about them, too."""
    chance = random.Random(4)
    paths = [path for path, _ in mutations() if path not in STATIC_ROUTES]
    hosts = [
        "health",
        "x/health?",
        "localhost",
        "127.0.0.1:1@health",
        "[::1]",
        "..",
        "a" * 200,
        "xn--health",
        "health:80",
    ]
    names = ["X-Original-URL", "X-Rewrite-URL", "X-Forwarded-Path", "X-Forwarded-Prefix", "X-HTTP-Method-Override",
             "X-Forwarded-Host", "Forwarded", "X-Real-IP", "X-Custom-IP-Authorization", "Authorization", "X-Api-Key",
             "Proxy-Authorization", "Cookie", "Referer", "Origin", "Upgrade", "Via", "X-Middleware-Subrequest",
    ]  # fmt: skip
    values = ["/health", "GET", "127.0.0.1", "for=127.0.0.1", "Bearer", "Bearer ", "Basic c2staW5ub2NlbnQ=",
              "Bearer null", "bearer sk-innocen", "key=sk-innocent", "websocket", "Bearer sk-innocent, x", "Token x",
    ]  # fmt: skip
    sent = []
    for _ in range(NUM_TRICKS):
        target = (
            chance.choice([*paths, "/v1/models", "/metrics", "/v1/completions", "/load"])
            .encode("utf-8")
            .decode("latin-1")
        )
        target = "".join(char if 33 <= ord(char) < 127 else f"%{ord(char):02x}" for char in target)
        if chance.random() < 0.2:
            target = chance.choice(
                (f"http://health{target}", f"{target}#/health", f"{target}?x=/ready", f"{target};/health")
            )
        headers = {chance.choice(names): chance.choice(values) for _ in range(chance.randrange(3))}
        method = chance.choice(("GET", "HEAD", "POST", "PUT"))
        sent.append(http(target, method=method, key=None, headers={"Host": chance.choice(hosts), **headers}))
    return sent


def test_tricks_without_a_key(server: Running, report: Report) -> None:
    sent = tricks()
    responses = asyncio.run(fetch_all(server.port, sent, at_once=16))
    report(f"{len(sent):,} tricks of Host, path and header", dict(Counter(each.status for each in responses)))
    passed = [trick for trick, each in zip(sent, responses, strict=True) if each.status not in (400, 401)]
    assert not passed, passed[:5]
    with server.client(headers=INNOCENT) as client:
        check_control(client)


def sign_t(first: list[int], second: list[int]) -> float:
    """Of the signs of paired differences: what disturbs both times of a pair, or one of them by much, counts little."""
    slower, faster = (sum(map(compare, first, second)) for compare in (operator.gt, operator.lt))
    return abs(slower - faster) / max(slower + faster, 1) ** 0.5


def test_the_time_of_a_wrong_key(report: Report) -> None:
    """Keys that begin as a right one against random ones, and random ones against others: interleaved CPU time.

    That all digests are compared in constant time is asserted by calls, in `tests/server/http/test_auth.py`. A clock is
    only reported.
    """
    chance = random.Random(5)
    ring = make_key_ring([f"sk-{number:040}" for number in range(8)])
    right_key = f"sk-{7:040}".encode()
    kinds = (0, 1, 2)  # a right beginning, random, random too
    rows = []
    for _ in range(
        NUM_TIMED
    ):  # made before they are timed, and in any order: where a key lies in memory takes time, too
        drawn = [(kind, bytes(chance.choices(range(33, 127), k=43))) for kind in chance.sample(kinds, 3)]
        rows.append([(kind, (right_key if kind == 0 else key)[:-4] + key[-4:]) for kind, key in drawn])
    taken: list[list[int]] = [[0] * NUM_TIMED for _ in kinds]
    for number, row in enumerate(rows):
        for kind, key in row:
            began_ns = time.thread_time_ns()
            found = ring.find(key)
            taken[kind][number] = time.thread_time_ns() - began_ns
            assert found is None
    right, random_one, random_two = taken
    seen = tuple(round(each, 2) for each in (sign_t(right, random_one), sign_t(random_one, random_two)))
    report(
        f"wrong keys, {NUM_TIMED:,} of each kind: |t| of a right beginning (below 4.5), of random against random", seen
    )

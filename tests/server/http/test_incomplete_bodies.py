"""Bodies on their way: they take no place in the queue, and a client's slow bodies use up its own allowance only."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.http.auth import Identity, KeyRing
from quire.server.http.body_budget import BodyBudget, BodyBudgetExceeded, PendingBody
from quire.server.http.protocol import ConnectionLimits, GuardedProtocol
from tests.server.http_app import RunningServer, first_response, received_until_closed, running_server, status_of
from tests.server.local_server import LocalServer
from tests.server.many_clients import request
from tests.server.scripted_servers import check_control, completion_body, scripted_here
from tests.server.server_process import PATIENCE_S, load, wait_until, wait_until_at_rest

PLACES = 6
KEYS = KeyRing([("sk-slow", Identity("slow")), ("sk-other", Identity("other"))])


@pytest.fixture(scope="module")
def served(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    starts = ("--max-num-seqs", "2", "--max-waiting", str(PLACES - 2))
    with scripted_here(tmp_path_factory.mktemp("bodies"), *starts) as server:
        yield server


def test_bodies_that_never_come_take_no_place(served: LocalServer) -> None:
    whole = request(completion_body("hi"))
    head = whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    with served.client() as client, ExitStack() as connections:
        slow = [
            connections.enter_context(socket.create_connection(("127.0.0.1", served.port), PATIENCE_S))
            for _ in range(3 * PLACES)
        ]
        for each in slow:
            each.sendall(head + b"{")
        for _ in range(3):
            check_control(client)
        assert load(client)["server_load"] == 0
        slow[0].sendall(whole[len(head) + 1 :])
        assert first_response(slow[0]).startswith(b"HTTP/1.1 200 ")


def test_a_burst_of_bodies_that_end_at_once_does_not_pass_as_a_whole(served: LocalServer) -> None:
    whole = request(completion_body("endless", max_tokens=6000, stream=True))
    with served.client() as client:
        wait_until_at_rest(client)
        with ExitStack() as connections:
            burst = [
                connections.enter_context(socket.create_connection(("127.0.0.1", served.port), PATIENCE_S))
                for _ in range(3 * PLACES)
            ]
            for each in burst:
                each.sendall(whole[:-1])
            check_control(client)  # later than those bytes: every head has passed
            for each in burst:
                each.sendall(whole[-1:])
            wait_until(lambda: load(client)["num_requests"] == PLACES)
            check_control_is_refused(served)
            assert load(client)["server_load"] == PLACES
        wait_until_at_rest(client)


def check_control_is_refused(served: LocalServer) -> None:
    with socket.create_connection(("127.0.0.1", served.port), PATIENCE_S) as connection:
        connection.sendall(request(completion_body("hi")))
        assert first_response(connection).startswith(b"HTTP/1.1 429 ")


def head(key: bytes, num_bytes: int, more: bytes = b"") -> bytes:
    return (
        b"POST /v1/echo HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n" % key
        + more
        + b"Content-Length: %d\r\n\r\n" % num_bytes
    )


def budget_of(server: RunningServer) -> BodyBudget:
    protocol = server.server.config.http_protocol_class
    assert issubclass(protocol, GuardedProtocol)
    return protocol.bodies


def check_other(server: RunningServer) -> None:
    """A request of another key, later than all that was sent before."""
    response = server.send(head(b"sk-other", 2, b"Connection: close\r\n") + b"{}")
    assert response.startswith(b"HTTP/1.1 200 "), response


def test_incomplete_bodies_are_limited_by_client() -> None:
    limits = ConnectionLimits(client_incomplete_bodies=2, linger_s=0.2)
    with running_server(keys=KEYS, limits=limits) as server:
        with server.connect() as first, server.connect() as second, server.connect() as third:
            for each in (first, second):
                each.sendall(head(b"sk-slow", 2) + b"{")
            check_other(server)
            third.sendall(head(b"sk-slow", 2))
            response = received_until_closed(third)
            assert status_of(response) == 429 and b'"too_many_bodies"' in response
            assert b"\r\nretry-after: 1\r\n" in response
            check_other(server)
            second.sendall(b"}")
            assert first_response(second).startswith(b"HTTP/1.1 200 ")
        check_other(server)
        left = [each for each in server.records if each.status == 499]
        assert [(each.route, each.identity_name) for each in left] == [("/v1/echo", "slow")]  # the first one
        assert not budget_of(server)._clients


def test_too_many_bytes_drop_the_oldest_body_of_the_client_with_the_most() -> None:
    limits = ConnectionLimits(all_bodies_bytes=1000, client_bodies_bytes=900, linger_s=0.2)
    with running_server(keys=KEYS, limits=limits) as server:
        with server.connect() as old, server.connect() as new, server.connect() as over:
            for each in (old, new):
                each.sendall(head(b"sk-slow", 500) + b" " * 450)
                check_other(server)
            over.sendall(head(b"sk-slow", 100) + b" " * 50)
            assert status_of(received_until_closed(over)) == 429
            other = server.send(head(b"sk-other", 300, b"Connection: close\r\n") + b" " * 300)
            assert other.startswith(b"HTTP/1.1 200 ")
            dropped = received_until_closed(old)
            assert status_of(dropped) == 408 and b"too many incomplete bodies" in dropped
            new.sendall(b" " * 50)
            assert first_response(new).startswith(b"HTTP/1.1 200 ")
        check_other(server)
        assert budget_of(server).num_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 11), st.sampled_from(["grow", "complete", "remove"]), st.integers(1, 60))))
def test_the_budget_holds(events: list[tuple[int, str, int]]) -> None:
    """Never more than the total nor more than a client's own; a body is dropped for others only if its client has the
    most."""
    budget = BodyBudget(total_bytes=200, client_bytes=150, client_incomplete=3)
    bodies: dict[int, PendingBody] = {}

    def remove(place: int) -> None:
        budget.remove(bodies.pop(place))

    def crowd_out(place: int) -> None:
        held = {name: each.num_bytes for name, each in budget._clients.items() if each.incomplete}
        assert held[bodies[place].client] == max(held.values())
        assert bodies[place] is next(iter(budget._clients[bodies[place].client].incomplete))
        remove(place)

    for place, event, num_bytes in events:
        if place not in bodies:
            body = PendingBody(f"client {place % 4}", lambda place=place: crowd_out(place))  # type: ignore[misc]
            try:
                budget.add(body)
                bodies[place] = body
            except BodyBudgetExceeded:
                assert len(budget._clients[body.client].incomplete) == 3
        elif event == "remove":
            remove(place)
        elif bodies[place] in budget._clients[bodies[place].client].incomplete:
            if event == "complete":
                budget.complete(bodies[place])
                continue
            try:
                budget.grow(bodies[place], num_bytes)
            except BodyBudgetExceeded:
                remove(place)
        assert budget.num_bytes == sum(body.num_bytes for body in bodies.values()) <= 200
        assert all(each.num_bytes <= 150 for each in budget._clients.values())
        waiting = {body for each in budget._clients.values() for body in each.incomplete}
        assert waiting <= set(bodies.values()), "a body that has ended still counts as incomplete"
    for place in list(bodies):
        remove(place)
    assert budget.num_bytes == 0 and not budget._clients

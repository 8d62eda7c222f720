"""Fair at the door: one key, or one address, that fills the server does not shut out another."""

import json
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from quire.core.errors import QueueFull
from quire.server.admission import AdmissionControl, client_of
from quire.server.async_engine import AsyncEngine
from quire.server.engine_supervisor import Health
from quire.server.fair_shares import Client
from quire.server.http.auth import ANONYMOUS, Identity
from tests.server.http_app import first_response
from tests.server.local_server import LocalServer
from tests.server.many_clients import request
from tests.server.scripted_servers import check_control, completion_body, scripted_here
from tests.server.server_process import PATIENCE_S, load, wait_until, wait_until_at_rest

ROWS, WAITING = 2, 4
SECOND_ADDRESS = "127.0.0.2"
OK = b"HTTP/1.1 200 "
STARTS = ("--max-num-seqs", str(ROWS), "--max-waiting", str(WAITING))
FLOOD, OTHER = {"Authorization": "Bearer sk-flood"}, {"Authorization": "Bearer sk-other"}


@pytest.fixture(scope="module")
def keyed(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "keys").write_text("sk-flood name=flood\nsk-other name=other\n")
    arguments = ("--api-key-file", str(folder / "keys"), "--max-waiting-tokens", "2000")
    with scripted_here(folder, *STARTS, *arguments) as server:
        yield server


@pytest.fixture(scope="module")
def keyless(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with scripted_here(tmp_path_factory.mktemp("keyless"), *STARTS) as server:
        yield server


@contextmanager
def sent(server: LocalServer, text: bytes, *, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    """A connection from this address that has sent this."""
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S, source_address=(source, 0)) as connection:
        connection.sendall(text)
        yield connection


def endless(headers: dict[str, str] | None = None, **fields: object) -> bytes:
    return request(completion_body("endless", max_tokens=6000, stream=True, **fields), headers=headers)


def wait_for(client: httpx.Client, num_requests: int) -> None:
    wait_until(lambda: load(client)["num_requests"] == num_requests)


def test_one_key_that_fills_the_server_does_not_shut_out_another(keyed: LocalServer) -> None:
    with keyed.client(headers=OTHER) as client, ExitStack() as connections:
        with ExitStack() as flood:
            for _ in range(ROWS + WAITING):
                flood.enter_context(sent(keyed, endless(FLOOD)))
            wait_for(client, ROWS + WAITING)
            with sent(keyed, request(completion_body("hi"), headers=FLOOD)) as refused:
                assert first_response(refused).startswith(b"HTTP/1.1 429 ")
            others = [connections.enter_context(sent(keyed, endless(OTHER))) for _ in range((ROWS + WAITING) // 2)]
            wait_for(client, ROWS + WAITING + len(others))
            with sent(keyed, request(completion_body("hi"), headers=FLOOD)) as refused:
                assert first_response(refused).startswith(b"HTTP/1.1 429 ")
        while others:  # one more than rows: the first that is answered makes room for the last
            answered, _, _ = select.select(others, [], [], PATIENCE_S)
            assert answered and answered[0].recv(len(OK)) == OK
            answered[0].close()
            others.remove(answered[0])
        wait_until_at_rest(client)


def test_one_address_that_fills_the_server_does_not_shut_out_another(keyless: LocalServer) -> None:
    """And X-Forwarded-For makes no address: a client could say anything."""
    with keyless.client() as client, ExitStack() as connections:
        with ExitStack() as flood:
            for _ in range(ROWS + WAITING):
                flood.enter_context(sent(keyless, endless()))
            wait_for(client, ROWS + WAITING)
            with sent(keyless, request(completion_body("hi"), headers={"X-Forwarded-For": "10.0.0.9"})) as refused:
                assert first_response(refused).startswith(b"HTTP/1.1 429 ")
            other = connections.enter_context(sent(keyless, endless(), source=SECOND_ADDRESS))
            wait_for(client, ROWS + WAITING + 1)
        assert other.recv(len(OK)) == OK
        connections.close()
        wait_until_at_rest(client)


def test_a_row_is_taken_back_from_the_key_that_holds_them_all(keyed: LocalServer) -> None:
    """Another key is served while all requests of the first are open."""
    with keyed.client(headers=OTHER) as client:
        with ExitStack() as flood:
            for _ in range(ROWS + WAITING):
                flood.enter_context(sent(keyed, endless(FLOOD)))
            wait_for(client, ROWS + WAITING)
            for _ in range(3):
                check_control(client)
            assert load(client)["num_requests"] == ROWS + WAITING
        wait_until_at_rest(client)


def test_networks_without_keys_have_shares_of_the_engine_and_one_cache(keyless: LocalServer) -> None:
    prompt = completion_body("a prompt of several blocks " * 20)
    with (
        keyless.client() as client,
        keyless.client(transport=httpx.HTTPTransport(local_address=SECOND_ADDRESS)) as other,
    ):
        assert client.post("/v1/completions", json=prompt).status_code == 200
        with ExitStack() as flood:
            for _ in range(ROWS + WAITING):
                flood.enter_context(sent(keyless, endless()))
            wait_for(other, ROWS + WAITING)
            usage = other.post("/v1/completions", json=prompt).json()["usage"]
            assert load(other)["num_requests"] == ROWS + WAITING
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 16
        wait_until_at_rest(client)


def test_each_prompt_of_a_body_takes_a_place(keyed: LocalServer) -> None:
    """Otherwise a few bodies of 128 prompts would fill the engine's queue, which is common to all keys."""
    several = request(completion_body("x", prompt=["endless"] * (ROWS + WAITING), stream=True), headers=FLOOD)
    more = request(completion_body("x", prompt=["endless"] * (ROWS + WAITING + 1), stream=True), headers=FLOOD)
    with keyed.client(headers=OTHER) as client:
        with sent(keyed, more) as refused:
            assert first_response(refused).startswith(b"HTTP/1.1 429 ")
        wait_until_at_rest(client)
        with sent(keyed, several):
            wait_for(client, ROWS + WAITING)
            assert load(client)["server_load"] == ROWS + WAITING
            with sent(keyed, request(completion_body("hi"), headers=FLOOD)) as refused:
                assert first_response(refused).startswith(b"HTTP/1.1 429 ")
        wait_until_at_rest(client)


def test_waiting_tokens_of_one_key_do_not_shut_out_another(keyed: LocalServer) -> None:
    long = request(completion_body("hi " * 3000, max_tokens=1), headers=FLOOD)  # more than may wait
    with keyed.client(headers=OTHER) as client:
        with ExitStack() as flood:
            running = [flood.enter_context(sent(keyed, endless(FLOOD))) for _ in range(ROWS)]
            for each in running:
                assert each.recv(1)
            flood.enter_context(sent(keyed, long))
            wait_for(client, ROWS + 1)
            with sent(keyed, request(completion_body("hi"), headers=FLOOD)) as refused:
                response = first_response(refused)
                assert response.startswith(b"HTTP/1.1 429 ") and b"prompt tokens are waiting" in response
            flood.enter_context(sent(keyed, request(completion_body("hi"), headers=OTHER)))
            wait_for(client, ROWS + 2)
        wait_until_at_rest(client)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (("10.1.2.3", 1), "10.1.2.3"),
        (("2001:db8:1:2:3:4:5:6", 1), "2001:db8:1:2::/64"),
        (("::ffff:10.1.2.3", 1), "10.1.2.3"),
        (None, ""),
    ],
)
def test_a_client_without_a_key_is_its_network(address: tuple[str, int] | None, name: str) -> None:
    assert client_of(ANONYMOUS, {"client": address}) == Client(name)
    assert client_of(Identity("mine", 2.0), {"client": address}) == Client("mine", 2.0, known=True)


class Clock:
    """The time, as the test sets it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_the_advised_wait_of_a_key_follows_its_own_requests() -> None:
    """Requests of 30 ms after an hour of idleness, and a key whose requests take minutes: neither changes the other."""
    engine, clock = AsyncEngine(None, Clock()), Clock()
    engine.attach(json, type("Info", (), {"max_num_seqs": 64}))  # type: ignore[arg-type]  # never used
    admission = AdmissionControl(engine, lambda: Health.READY, max_waiting=64, max_waiting_tokens=1000, clock=clock)
    fast, slow = Client("fast", known=True), Client("slow", known=True)
    place = admission.admit(slow, 1)
    clock.now_s += 600.0
    place.release()
    admission.admit(slow, 1)
    clock.now_s += 3600.0
    for _ in range(40):
        place = admission.admit(fast, 1)
        clock.now_s += 0.03
        place.release()
    admission.admit(fast, 1)
    assert advice_s(admission, fast) == 0.1
    assert advice_s(admission, slow) == 60.0


def test_the_advised_wait_for_a_place_counts_all_that_must_end_before() -> None:
    """Two rows and two that wait; a second key has taken two places beyond them. One request ends each second."""
    engine, clock = AsyncEngine(None, Clock()), Clock()
    engine.attach(json, type("Info", (), {"max_num_seqs": 2}))  # type: ignore[arg-type]  # never used
    admission = AdmissionControl(engine, lambda: Health.READY, max_waiting=2, max_waiting_tokens=1000, clock=clock)
    first, second = Client("first", known=True), Client("second", known=True)
    for _ in range(10):
        place = admission.admit(first, None)
        clock.now_s += 1.0
        place.release()
    for client in (first, first, first, first, second, second):
        admission.admit(client, None)
    with pytest.raises(QueueFull) as refused:
        admission.admit(first, None)
    assert refused.value.retry_after_s == 3.0, "places of three requests"


def advice_s(admission: AdmissionControl, client: Client) -> float:
    with pytest.raises(Exception, match="requests open, the limit is 1") as refused:
        admission.admit(client, 1)
    wait_s = refused.value.retry_after_s  # type: ignore[attr-defined]
    assert isinstance(wait_s, float)
    return wait_s


def test_a_request_keeps_one_place_to_its_end_and_gives_the_others_back_with_their_prompts() -> None:
    engine, client = AsyncEngine(None, Clock()), Client("a", known=True)
    engine.attach(json, type("Info", (), {"max_num_seqs": 2}))  # type: ignore[arg-type]  # never used
    admission = AdmissionControl(engine, lambda: Health.READY, max_waiting=0, max_waiting_tokens=100, clock=Clock())
    place = admission.admit(client, None)
    for num_tokens in (10, 20):
        place.add_prompt(num_tokens)
    assert (admission.num_held(client), admission.waiting_tokens.total) == (2, 30)
    with pytest.raises(QueueFull):
        place.add_prompt(40)
    assert (admission.num_held(client), admission.waiting_tokens.total) == (2, 30), "what is refused counts for nothing"
    for num_tokens in (10, 20):
        place.start_prompt(num_tokens)
        place.end_prompt()
    assert (admission.num_held(client), admission.waiting_tokens.total) == (1, 0), "its response is on its way"
    other = admission.admit(client, None)
    for _ in range(2):
        place.release()
    assert admission.num_held(client) == 1, "a place is given back once"
    other.release()

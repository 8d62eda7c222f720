"""The law of fair shares: bounded in total, and no client shuts out another."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from quire.server.fair_shares import Client, ClientRates, FairShares, Throughput, reserve_of

CLIENTS = [
    Client("heavy", 4.0, known=True),
    Client("usual", known=True),
    Client("light", 0.25, known=True),
    Client("10.0.0.1"),
    Client("10.0.0.2"),
    Client("10.0.0.3"),
]
NUM_KNOWN = sum(client.known for client in CLIENTS)
EVENTS = st.lists(st.tuples(st.sampled_from(CLIENTS), st.booleans()), max_size=120)


@given(st.integers(1, 12), EVENTS)
def test_the_law(limit: int, events: list[tuple[Client, bool]]) -> None:
    """Each client arrives, or one of its requests ends, in any order."""
    shares, held = FairShares(), Counter[Client]()
    for client, arrives in events:
        if not arrives:
            if held[client]:
                held[client] -= 1
                shares.release(client)
            continue
        total = held.total()
        active = {each for each, number in held.items() if number} | {client}
        share = limit * client.weight / sum(each.weight for each in active)
        admitted = shares.has_room(client, limit)
        if total < limit or (client.known and not held[client]):
            assert admitted
        elif total >= limit + reserve_of(limit):
            assert not admitted
        elif held[client] and abs(held[client] - share) > 1e-9:
            assert admitted == (held[client] < share)
        if admitted:
            held[client] += 1
            shares.take(client)
        assert shares.total == held.total() <= limit + reserve_of(limit) + NUM_KNOWN
    for client, number in held.items():
        if number:
            shares.release(client, number)
    assert shares.total == 0 and not shares._held and shares._total_weight == 0.0


@given(st.integers(2, 40), st.lists(st.integers(0, 3), max_size=200), st.booleans())
def test_a_flood_of_one_client_refuses_no_other_below_its_share(limit: int, events: list[int], known: bool) -> None:
    flood, other = Client("flood", known=known), Client("other", known=known)
    shares, held = FairShares(), Counter[Client]()

    def arrive(client: Client) -> bool:
        admitted = shares.has_room(client, limit)
        if admitted:
            shares.take(client)
            held[client] += 1
        return admitted

    for event in events:
        while arrive(flood):  # it retries all the time
            pass
        if event == 0 and held[flood]:
            shares.release(flood)
            held[flood] -= 1
        elif event == 1 and held[other]:
            shares.release(other)
            held[other] -= 1
        elif event >= 2 and held[other] < limit // 2:
            assert arrive(other)


def test_a_client_alone_may_fill_the_limit() -> None:
    shares, alone = FairShares(), Client("10.0.0.1")
    for _ in range(8):
        assert shares.has_room(alone, 8)
        shares.take(alone)
    assert not shares.has_room(alone, 8)


def test_the_reserve_is_half_of_the_limit() -> None:
    """So much more than the limit is open where clients below their share come after one that fills it."""
    shares = FairShares()
    for _ in range(10):
        shares.take(Client("first"))
    others = [Client(f"other {number}") for number in range(9)]
    for each in others:
        if shares.has_room(each, 10):
            shares.take(each)
    assert shares.total == 15 and [shares.held(each) for each in others] == [1] * 5 + [0] * 4


def test_a_known_client_gets_its_first_place_beyond_the_reserve() -> None:
    shares = FairShares()
    for number in range(15):
        shares.take(Client(f"10.0.0.{number}"))
    assert shares.has_room(Client("key", known=True), 10)
    assert not shares.has_room(Client("10.0.1.1"), 10)


def test_those_who_leave_take_their_weight_along() -> None:
    shares, heavy = FairShares(), Client("heavy", 6.0)
    shares.take(heavy)
    first, second = Client("first"), Client("second")
    shares.take(first, 8)
    shares.release(heavy)
    while shares.has_room(second, 8):
        shares.take(second)
    assert shares.held(second) == 4


def test_a_weight_is_a_share_of_the_limit() -> None:
    shares, heavy, light = FairShares(), Client("heavy", 3.0, known=True), Client("light", known=True)
    for client in (heavy, light):  # both ask for all they can get, and the first that came drains
        while shares.has_room(client, 8):
            shares.take(client)
    assert (shares.held(heavy), shares.held(light)) == (8, 2)


def test_a_rate_is_of_the_time_in_which_something_was_held() -> None:
    rate, now_s = Throughput(), 100.0
    assert rate.wait_s(1, now_s) is None
    for _ in range(40):
        rate.note_taken(now_s)
        now_s += 0.03
        rate.note_released(now_s)
        now_s += 3600.0  # idle
    rate.note_taken(now_s)
    assert abs((rate.wait_s(1, now_s) or 0) - 0.03) < 1e-6
    assert abs((rate.wait_s(4, now_s) or 0) - 0.12) < 1e-6
    assert (rate.wait_s(1, now_s + 320.0) or 0) > 10.0  # requests have become slow: no release since


def test_rates_of_past_clients_are_forgotten_in_the_end() -> None:
    rates = ClientRates()
    for number in range(3000):
        client = Client(f"10.0.{number >> 8}.{number & 255}")
        rates.note_taken(client, 0.0)
        rates.note_released(client, 1.0, is_last=True)
    assert len(rates._idle) <= 1024 and not rates._rates
    last = Client("10.0.11.183")
    rates.note_taken(last, 5.0)
    assert rates.wait_s(last, 1, 5.0) == 1.0  # what a client did before is remembered

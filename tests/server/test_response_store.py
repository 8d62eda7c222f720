"""The store of responses: its limits hold after every call, and one owner's use costs another nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.response_store import ResponseStore, StoredItem, StoredResponse, StoreFull, StoreLimits

LIMITS = StoreLimits(max_responses=12, max_bytes=10**6, max_responses_per_owner=5, max_bytes_per_owner=10**5)
FEW_BYTES = StoreLimits(max_responses=1000, max_bytes=90_000, max_responses_per_owner=1000, max_bytes_per_owner=40_000)


class Running:
    def body(self) -> bytes:
        return b"{}"

    def cancel(self) -> bytes:
        return b"{}"


def made(name: str, owner: str = "a", size: int = 10, running: bool = False) -> StoredResponse:
    output = (StoredItem(f"msg_{name}", b"{}"),)
    return StoredResponse(name, owner, b"x" * size, (), output, running=Running() if running else None)


def check(store: ResponseStore) -> None:
    kept = [each for owned in store._owned.values() for each in owned.responses.values()]
    limits = store.limits
    assert store.num_responses == len(kept) <= limits.max_responses
    assert store.num_bytes == sum(each.num_bytes for each in kept) <= limits.max_bytes
    for owner, owned in store._owned.items():
        mine = [each for each in kept if each.owner == owner]
        assert 0 < len(mine) <= limits.max_responses_per_owner
        assert owned.num_bytes == sum(each.num_bytes for each in mine) <= limits.max_bytes_per_owner
        assert set(owned.by_item) == {item.id for each in mine for item in each.output}


@settings(max_examples=60)
@given(
    st.sampled_from([LIMITS, FEW_BYTES]),
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 40), st.sampled_from([10, 1000, 1200, 9000]), st.booleans(),
                  st.sampled_from(["put", "put", "get", "delete"])),
        min_size=30,
        max_size=200,
    ),
)  # fmt: skip
def test_limits_hold_after_every_call(limits: StoreLimits, calls: list[tuple[int, int, int, bool, str]]) -> None:
    store = ResponseStore(limits)
    running: dict[tuple[str, str], StoredResponse] = {}
    for owner_number, number, size, is_running, call in calls:
        owner, name = f"owner-{owner_number}", f"resp_{owner_number}_{number}"
        found = store.get(owner, name)
        if call == "put":
            response = made(name, owner, size, is_running)
            running.pop((owner, name), None)
            try:
                store.put(response)
            except StoreFull:
                assert is_running
            else:
                if is_running:
                    running[owner, name] = response
        elif call == "delete" and found is not None:
            store.delete(found)
            running.pop((owner, name), None)
        check(store)
        for (of, key), response in running.items():
            assert store.get(of, key) is response, "a response that is being generated is never dropped"


def test_the_least_recently_used_is_dropped_first() -> None:
    store = ResponseStore(LIMITS)
    for number in range(5):
        store.put(made(f"resp_{number}"))
    assert store.get("a", "resp_0") is not None, "used again"
    store.put(made("resp_5"))
    assert store.get("a", "resp_1") is None and store.item("a", "msg_resp_1") is None
    assert store.get("a", "resp_0") is not None and store.item("a", "msg_resp_0") is not None


def test_an_owner_within_its_share_loses_nothing_to_others() -> None:
    store = ResponseStore(FEW_BYTES)
    store.put(made("resp_small", "small"))
    for number in range(200):
        for owner in ("big-1", "big-2", "big-3", "big-4"):
            store.put(made(f"resp_{owner}_{number}", owner, size=1000))
    assert store.get("small", "resp_small") is not None and store.num_bytes > 80_000


def test_another_owner_finds_nothing() -> None:
    store = ResponseStore(LIMITS)
    store.put(made("resp_1", "a"))
    assert store.get("b", "resp_1") is None and store.item("b", "msg_resp_1") is None


def test_a_response_that_is_too_large_is_not_kept_and_drops_nothing() -> None:
    store = ResponseStore(LIMITS)
    store.put(made("resp_1"))
    store.put(made("resp_2", size=20_000))
    assert store.get("a", "resp_2") is None and store.get("a", "resp_1") is not None
    with pytest.raises(StoreFull, match="bytes"):
        store.put(made("resp_3", size=20_000, running=True))


def test_running_responses_are_bounded() -> None:
    store = ResponseStore(LIMITS)
    for number in range(5):
        store.put(made(f"resp_{number}", running=True))
    with pytest.raises(StoreFull):
        store.put(made("resp_6", running=True))
    store.put(made("resp_7"))
    assert store.get("a", "resp_7") is None, "nothing can be dropped for it"
    store.put(made("resp_0"))
    store.put(made("resp_8", running=True))
    assert store.get("a", "resp_0") is None, "it has ended, and was the oldest"


def test_a_response_that_was_replaced_since_is_not_deleted() -> None:
    """As a client deletes a background response while it ends."""
    store = ResponseStore(LIMITS)
    before, after = made("resp_1", running=True), made("resp_1")
    store.put(before)
    store.put(after)
    store.delete(before)
    assert store.get("a", "resp_1") is after
    store.delete(after)
    assert store.get("a", "resp_1") is None and store.num_bytes == 0

"""The clock of service against plain arithmetic."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.sched.fairness import MAX_IDLE_TENANTS, WeightedFairShares
from tests.tiers import examples

WEIGHTS = {"b": 2.0, "c": 0.5}


class SharesAgainstDicts(RuleBasedStateMachine):
    """Exact, for the costs and weights are powers of two and small integers."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = WeightedFairShares(WEIGHTS)
        self.counts = dict.fromkeys("abcd", 0)
        self.service = dict.fromkeys("abcd", 0.0)
        self.total = dict.fromkeys("abcd", 0.0)
        self.floor = 0.0

    @rule(tenant=st.sampled_from("abcd"))
    def arrive(self, tenant: str) -> None:
        if self.counts[tenant] == 0:
            active = [self.service[other] for other, count in self.counts.items() if count]
            self.service[tenant] = max(self.service[tenant], min(active, default=self.floor))
        self.counts[tenant] += 1
        self.shares.arrive(tenant)

    @precondition(lambda self: any(self.counts.values()))
    @rule(data=st.data())
    def depart(self, data: st.DataObject) -> None:
        tenant = data.draw(st.sampled_from([tenant for tenant, count in self.counts.items() if count]))
        self.counts[tenant] -= 1
        if self.counts[tenant] == 0:
            self.floor = max(self.floor, self.service[tenant])
        self.shares.depart(tenant)

    @rule(charges=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9)), max_size=8), bulk=st.booleans())
    def charge(self, charges: list[tuple[str, int]], bulk: bool) -> None:
        for tenant, cost in charges:
            self.total[tenant] += cost
            self.service[tenant] += cost / WEIGHTS.get(tenant, 1.0)
            if not bulk:
                self.shares.charge(tenant, cost)
        if bulk:
            indices = np.array([self.shares.index(tenant) for tenant, _ in charges], dtype=np.int64)
            self.shares.charge_many(indices, np.array([cost for _, cost in charges], dtype=np.float64))

    @invariant()
    def the_sums_agree(self) -> None:
        for tenant in "abcd":
            assert self.shares.service(tenant) == self.service[tenant]
            assert self.shares.total(tenant) == self.total[tenant]


TestSharesAgainstDicts = SharesAgainstDicts.TestCase
TestSharesAgainstDicts.settings = settings(max_examples=examples(25, 60), stateful_step_count=40, deadline=None)


def test_an_idle_tenant_returns_without_a_claim_on_the_past() -> None:
    shares = WeightedFairShares({})
    shares.arrive("idle")
    shares.depart("idle")
    shares.arrive("busy")
    shares.charge("busy", 1000.0)
    shares.arrive("idle")
    assert shares.service("idle") == shares.service("busy") == 1000.0
    served = []
    for _ in range(10):
        served.append(min(("idle", "busy"), key=shares.service))
        shares.charge(served[-1], 7.0)
    assert served.count("idle") == 5


def test_after_an_idle_time_all_tenants_start_level() -> None:
    shares = WeightedFairShares({})
    shares.arrive("busy")
    shares.arrive("quiet")
    shares.charge("busy", 1000.0)
    shares.depart("busy")
    shares.depart("quiet")
    shares.arrive("quiet")
    shares.arrive("busy")
    assert shares.service("quiet") == shares.service("busy")


def test_a_total_is_what_was_charged_not_the_lifted_clock() -> None:
    shares = WeightedFairShares({"b": 3.0})
    shares.arrive("a")
    shares.charge("a", 10.0)
    shares.arrive("b")
    assert shares.service("b") == 10.0 and shares.total("b") == 0.0
    shares.charge("b", 30.0)
    assert shares.service("b") == 20.0 and shares.total("b") == 30.0
    assert shares.total("unknown") == 0.0


def test_idle_tenants_are_forgotten_and_active_ones_keep_their_index() -> None:
    shares = WeightedFairShares({})
    shares.arrive("stays")
    index = shares.index("stays")
    shares.charge("stays", 5.0)
    for number in range(3 * MAX_IDLE_TENANTS):
        passer = f"passer {number}"
        shares.arrive(passer)
        assert shares.index(passer) <= MAX_IDLE_TENANTS + 1
        assert shares.service(passer) == shares.service("stays")
        shares.charge(passer, 1.0)
        assert shares.total(passer) == 1.0
        shares.depart(passer)
    assert len(shares) <= MAX_IDLE_TENANTS + 1
    assert shares.index("stays") == index
    assert shares.total("stays") == 5.0
    assert shares.total("passer 0") == 0.0


def test_weights_stay_with_their_tenants_as_more_come() -> None:
    weights = {f"t{number}": float(2 ** (number % 5)) for number in range(100)}
    shares = WeightedFairShares(weights)
    for tenant in weights:
        shares.arrive(tenant)
        shares.charge(tenant, 64.0)
    for tenant, weight in weights.items():
        before = shares.service(tenant)
        shares.charge(tenant, 64.0)
        assert shares.service(tenant) - before == 64.0 / weight and shares.total(tenant) == 128.0


def test_a_tenant_that_comes_and_goes_leaves_nothing_behind() -> None:
    shares = WeightedFairShares({})
    shares.arrive("stays")
    for turn in range(200):
        shares.arrive("flits")
        shares.charge("flits", 1.0)
        shares.arrive("stays")
        shares.depart("stays")
        shares.depart("flits")
        assert len(shares._active_heap) < 100, turn


def test_the_least_active_is_known_however_often_it_came_and_went() -> None:
    for num_turns in range(80):
        shares = WeightedFairShares({})
        shares.arrive("stays")
        for _ in range(num_turns):
            shares.arrive("flits")
            shares.depart("flits")
        shares.charge("flits", 7.0)
        shares.arrive("flits")
        shares.depart("stays")
        shares.arrive("new")
        assert shares.service("new") == 7.0


def test_a_tenant_of_an_empty_engine_starts_at_the_highest_clock_so_far() -> None:
    shares = WeightedFairShares({})
    for tenant, cost in (("a", 100.0), ("b", 40.0)):
        shares.arrive(tenant)
        shares.charge(tenant, cost)
    levels = {tenant: shares.service(tenant) for tenant in "ab"}
    for tenant in sorted(levels, key=lambda name: -levels[name]):
        shares.depart(tenant)
    shares.arrive("c")
    assert shares.service("c") == max(levels.values()) > min(levels.values())

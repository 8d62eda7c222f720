"""The choice of the preempted request, by hand."""

from collections import Counter
from collections.abc import Mapping
from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from quire.core.request import RequestGroup
from quire.sched.preemption import (
    PreemptionCandidate,
    PreemptionCandidates,
    can_suffice,
    choose_for_waiting,
    choose_victim,
)
from tests.sched.waiting_groups import group


def assigned(
    order: int, num_computed: int, priority: int = 0, num_rows: int = 1, tenant: str = ""
) -> PreemptionCandidate:
    return PreemptionCandidate(group(order, priority=priority, tenant=tenant), num_rows, num_computed)


def victim(
    some: list[PreemptionCandidate], immune: frozenset[int] = frozenset(), freed: Mapping[int, int] | None = None
) -> int | None:
    chosen = choose_victim(some, lambda f: f.order not in immune, lambda f: (freed or {}).get(f.order, 1))
    return None if chosen is None else chosen.order


def for_class(some: list[PreemptionCandidate], num_rows: int, num_blocks: int, freed: dict[int, int]) -> list[int]:
    def num_freed(one: RequestGroup) -> int:
        return freed[one.order]

    return sorted(
        each.group.order
        for each in choose_for_waiting(PreemptionCandidates(some, [], {}), num_rows, num_blocks, num_freed)
    )


def test_the_request_with_the_least_lost_work_is_preempted() -> None:
    assert victim([assigned(0, 1), assigned(1, 30), assigned(2, 20), assigned(3, 40)]) == 2


def test_of_equals_the_latest_is_preempted() -> None:
    assert victim([assigned(0, 5), assigned(1, 5), assigned(2, 5)]) == 2


def test_a_lower_class_is_preempted_before_less_lost_work() -> None:
    assert victim([assigned(0, 1), assigned(1, 2), assigned(2, 99, priority=1)]) == 2


def test_the_first_request_is_never_preempted() -> None:
    assert victim([assigned(4, 1)]) is None
    assert victim([assigned(4, 1), assigned(5, 9)]) == 5
    assert victim([assigned(0, 1, priority=1), assigned(5, 9, priority=0)]) == 0, "class comes before arrival"


def test_no_victim_that_would_free_nothing() -> None:
    assert victim([assigned(0, 9), assigned(1, 1), assigned(2, 5)], freed={1: 0}) == 2
    assert victim([assigned(0, 9), assigned(1, 1)], freed={1: 0}) is None
    assert victim([]) is None


def test_an_immune_group_is_no_victim() -> None:
    assert victim([assigned(0, 9), assigned(1, 1), assigned(2, 5)], immune=frozenset({1})) == 2


def test_class_preemption_is_minimal() -> None:
    """The one with least to lose frees too little; with the second there is enough, and the first is spared."""
    some = [assigned(0, 1), assigned(1, 2), assigned(2, 3)]
    assert for_class(some, 1, 4, {0: 1, 1: 5, 2: 9}) == [1]
    assert for_class(some, 1, 6, {0: 1, 1: 5, 2: 9}) == [0, 1]
    assert for_class(some, 1, 0, {0: 0, 1: 5, 2: 9}) == [0]
    assert for_class(some, 2, 1, {0: 1, 1: 5, 2: 9}) == [0, 1]


def test_rows_are_counted_by_group() -> None:
    some = [assigned(0, 1), assigned(1, 2, num_rows=3)]
    assert for_class(some, 3, 0, {0: 1, 1: 1}) == [1]
    assert for_class(some, 4, 0, {0: 1, 1: 1}) == [0, 1]


def test_no_victims_if_all_together_are_not_enough() -> None:
    some = [assigned(0, 1), assigned(1, 2)]
    assert for_class(some, 3, 0, {0: 1, 1: 5}) == []
    assert for_class(some, 1, 7, {0: 1, 1: 5}) == []
    assert for_class(some, 0, 0, {0: 1, 1: 5}) == []


def test_of_a_tenant_with_one_row_to_spare_the_one_is_taken_that_frees_enough() -> None:
    """The one with less to lose if it frees enough, else the other; never both."""
    least, most = assigned(0, 1, tenant="x"), assigned(1, 2, tenant="x")
    freed = {0: 2, 1: 3}
    for num_blocks, chosen in ((2, (least,)), (3, (most,)), (4, ())):
        victims = PreemptionCandidates([], [least, most], {"x": 1})
        assert choose_for_waiting(victims, 1, num_blocks, lambda one: freed[one.order]) == chosen
        assert can_suffice(victims, 1, num_blocks, lambda one: freed[one.order]) == bool(chosen)


def test_a_search_among_groups_of_several_rows_is_not_given_up_for_good() -> None:
    """Two rows can be spared. The group of two rows comes first by work and by blocks, and frees too few; the others
    would do, and are found once the first has more to lose."""
    others = [assigned(1, 5, tenant="x"), assigned(2, 6, tenant="x")]
    freed = {0: 5, 1: 4, 2: 4}
    for num_computed, chosen in ((1, []), (9, others)):
        victims = PreemptionCandidates([], [assigned(0, num_computed, num_rows=2, tenant="x"), *others], {"x": 2})
        assert list(choose_for_waiting(victims, 1, 8, lambda one: freed[one.order])) == chosen
        assert can_suffice(victims, 1, 8, lambda one: freed[one.order])


@st.composite
def running(draw: st.DrawFn) -> tuple[PreemptionCandidates, dict[int, int]]:
    """Groups of a lower class and of the same, and the blocks that each frees."""
    num_spare = {"x": draw(st.integers(0, 4)), "y": draw(st.integers(0, 4))}
    most_rows = draw(st.sampled_from([1, 3]))
    lower, equal, freed = [], [], {}
    for order in range(draw(st.integers(0, 7))):
        tenant, priority = draw(st.sampled_from(["x", "y"])), draw(st.sampled_from([0, 0, 1]))
        each = assigned(order, draw(st.integers(1, 9)), priority, draw(st.integers(1, most_rows)), tenant)
        if priority:
            lower.append(each)
        elif each.num_rows <= num_spare[tenant]:
            equal.append(each)
        freed[order] = draw(st.integers(0, 5))
    return PreemptionCandidates(lower, equal, num_spare), freed


@given(running(), st.integers(0, 5), st.integers(0, 12))
def test_victims_against_all_subsets(
    drawn: tuple[PreemptionCandidates, dict[int, int]], num_rows: int, num_blocks: int
) -> None:
    """What is chosen leaves every tenant its share. Nothing is chosen only if no subset would do, but for groups of
    several rows; and a search is given up for good only if none would do at all."""
    victims, freed = drawn

    def would_do(some: tuple[PreemptionCandidate, ...]) -> bool:
        lost: Counter[str] = Counter()
        for each in some:
            lost[each.group.request.tenant] += each.num_rows if each in victims.equal else 0
        within = all(lost[tenant] <= victims.num_spare[tenant] for tenant in lost)
        enough = sum(freed[each.group.order] for each in some) >= num_blocks
        return bool(some) and within and enough and sum(each.num_rows for each in some) >= num_rows

    everything = [*victims.lower, *victims.equal]
    subsets = chain.from_iterable(combinations(everything, count) for count in range(1, len(everything) + 1))
    possible = any(would_do(some) for some in subsets)
    chosen = choose_for_waiting(victims, num_rows, num_blocks, lambda one: freed[one.order])
    assert not chosen or would_do(chosen)
    if num_rows or num_blocks:  # else nothing is missing
        alone = all(each.num_rows == 1 for each in victims.equal)
        assert bool(chosen) == possible if alone else bool(chosen) <= possible
        suffices = can_suffice(victims, num_rows, num_blocks, lambda one: freed[one.order])
        assert suffices == possible if alone else suffices >= possible

"""The choice of the preempted request, by hand."""

from collections.abc import Mapping

from quire.core.request import RequestGroup
from quire.sched.preemption import PreemptionCandidate, choose_for_waiting, choose_victim
from tests.sched.waiting_groups import group


def assigned(order: int, num_computed: int, priority: int = 0, num_rows: int = 1) -> PreemptionCandidate:
    return PreemptionCandidate(group(order, priority=priority), num_rows, num_computed)


def victim(
    some: list[PreemptionCandidate], immune: frozenset[int] = frozenset(), freed: Mapping[int, int] | None = None
) -> int | None:
    chosen = choose_victim(some, lambda f: f.order not in immune, lambda f: (freed or {}).get(f.order, 1))
    return None if chosen is None else chosen.order


def for_class(some: list[PreemptionCandidate], num_rows: int, num_blocks: int, freed: dict[int, int]) -> list[int]:
    def num_freed(one: RequestGroup) -> int:
        return freed[one.order]

    return sorted(each.group.order for each in choose_for_waiting(some, num_rows, num_blocks, num_freed))


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

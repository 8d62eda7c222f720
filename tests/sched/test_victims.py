"""Who gives way, by hand."""

from collections.abc import Mapping

from quire.core.request import Family
from quire.sched.victims import Seated, choose_for_class, choose_victim
from tests.sched.waiting import family


def seated(order: int, num_computed: int, priority: int = 0, num_rows: int = 1) -> Seated:
    return Seated(family(order, priority=priority), num_rows, num_computed)


def victim(
    some: list[Seated], immune: frozenset[int] = frozenset(), freed: Mapping[int, int] | None = None
) -> int | None:
    chosen = choose_victim(some, lambda f: f.order not in immune, lambda f: (freed or {}).get(f.order, 1))
    return None if chosen is None else chosen.order


def for_class(some: list[Seated], num_rows: int, num_blocks: int, freed: dict[int, int]) -> list[int]:
    def num_freed(one: Family) -> int:
        return freed[one.order]

    return sorted(each.family.order for each in choose_for_class(some, num_rows, num_blocks, num_freed))


def test_the_least_lost_work_gives_way() -> None:
    assert victim([seated(0, 1), seated(1, 30), seated(2, 20), seated(3, 40)]) == 2


def test_of_equals_the_latest_gives_way() -> None:
    assert victim([seated(0, 5), seated(1, 5), seated(2, 5)]) == 2


def test_a_lower_class_gives_way_before_less_work_is_lost() -> None:
    assert victim([seated(0, 1), seated(1, 2), seated(2, 99, priority=1)]) == 2


def test_the_first_of_all_never_gives_way() -> None:
    assert victim([seated(4, 1)]) is None
    assert victim([seated(4, 1), seated(5, 9)]) == 5
    assert victim([seated(0, 1, priority=1), seated(5, 9, priority=0)]) == 0, "class comes before arrival"


def test_nobody_gives_way_for_nothing() -> None:
    assert victim([seated(0, 9), seated(1, 1), seated(2, 5)], freed={1: 0}) == 2
    assert victim([seated(0, 9), seated(1, 1)], freed={1: 0}) is None
    assert victim([]) is None


def test_who_may_not_go_stays() -> None:
    assert victim([seated(0, 9), seated(1, 1), seated(2, 5)], immune=frozenset({1})) == 2


def test_a_class_takes_no_more_seats_than_it_needs() -> None:
    """The one with least to lose frees too little; with the second there is enough, and the first is spared."""
    some = [seated(0, 1), seated(1, 2), seated(2, 3)]
    assert for_class(some, 1, 4, {0: 1, 1: 5, 2: 9}) == [1]
    assert for_class(some, 1, 6, {0: 1, 1: 5, 2: 9}) == [0, 1]
    assert for_class(some, 1, 0, {0: 0, 1: 5, 2: 9}) == [0]
    assert for_class(some, 2, 1, {0: 1, 1: 5, 2: 9}) == [0, 1]


def test_rows_count_by_family() -> None:
    some = [seated(0, 1), seated(1, 2, num_rows=3)]
    assert for_class(some, 3, 0, {0: 1, 1: 1}) == [1]
    assert for_class(some, 4, 0, {0: 1, 1: 1}) == [0, 1]


def test_nobody_is_asked_to_go_if_it_would_not_be_enough() -> None:
    some = [seated(0, 1), seated(1, 2)]
    assert for_class(some, 3, 0, {0: 1, 1: 5}) == []
    assert for_class(some, 1, 7, {0: 1, 1: 5}) == []
    assert for_class(some, 0, 0, {0: 1, 1: 5}) == []

"""Who gives way. Small pure functions over the families that sit."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from quire.core.request import Family


class Seated(NamedTuple):
    """A family that could give way."""

    family: Family
    num_rows: int
    num_computed: int  # positions: what bringing it back costs grows with them


def by_least_loss(seated: Seated) -> tuple[int, int, int]:
    """The least important class first, then the least lost work, then the latest arrival."""
    return (-seated.family.request.priority, seated.num_computed, -seated.family.order)


def choose_victim(
    seated: Iterable[Seated], may_go: Callable[[Family], bool], num_freed: Callable[[Family], int]
) -> Family | None:
    """Whom to preempt so that others can go on: never the one who comes first of all, nobody who would free nothing."""
    everyone = list(seated)
    first = min(everyone, key=lambda each: (each.family.request.priority, each.family.order), default=None)
    for each in sorted(everyone, key=by_least_loss):
        if each is not first and may_go(each.family) and num_freed(each.family) > 0:
            return each.family
    return None


def choose_for_class(
    lower: Iterable[Seated], num_rows: int, num_blocks: int, num_freed: Callable[[Family], int]
) -> tuple[Seated, ...]:
    """A smallest set of these that frees so many rows and blocks; none if all together do not."""
    chosen: list[Seated] = []
    freed: dict[int, int] = {}

    def enough(some: list[Seated]) -> bool:
        rows, blocks = sum(each.num_rows for each in some), sum(freed[each.family.order] for each in some)
        return rows >= num_rows and blocks >= num_blocks

    for each in sorted(lower, key=by_least_loss):
        if enough(chosen):
            break
        freed[each.family.order] = num_freed(each.family)
        chosen.append(each)
    if not enough(chosen):
        return ()
    for each in tuple(chosen):
        without = [other for other in chosen if other is not each]
        if enough(without):
            chosen = without
    return tuple(chosen)

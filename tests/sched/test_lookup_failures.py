"""A prefix look-up that raises an error ends its own request. All others go on as if it had not been there."""

from collections.abc import Callable

import pytest

from quire.core.ids import IntArray
from quire.core.request import BlockOwner, Sequence
from quire.core.step import FinishReason
from quire.kv.manager import KVManager
from quire.kv.radix_tree import PrefixMatch
from tests.sched.stepping import Bench, counting, oracle_output

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
PROMPT = counting(1, 10)
OTHER = counting(500, 5)


@pytest.fixture
def break_lookup(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Sequence]], list[BlockOwner]]:
    """Every look-up of this sequence's tokens raises an error; the requests that were looked up in vain."""

    def install(broken: Callable[[], Sequence]) -> list[BlockOwner]:
        failed: list[BlockOwner] = []
        original = KVManager.match

        def match(self: KVManager, owner: BlockOwner, tokens: IntArray, limit: int) -> PrefixMatch | None:
            if tokens is broken().tokens:
                failed.append(owner)
                raise KeyError("a broken node")
            return original(self, owner, tokens, limit)

        monkeypatch.setattr(KVManager, "match", match)
        return failed

    return install


@DEPTHS
def test_of_a_higher_class_that_needs_a_row(
    break_lookup: Callable[[Callable[[], Sequence]], list[BlockOwner]], depth: int
) -> None:
    bench = Bench(rows=2, depth=depth, oracle=True)
    low = [bench.add(counting(100 * i, 6), 9, priority=5) for i in (1, 2)]
    bench.turns(depth + 2)
    high = bench.add([50, 51], 4, priority=-5)
    later = bench.add([60, 61], 4, priority=-5)
    failed = break_lookup(lambda: high)
    bench.run()
    assert failed == [high.group.owner], "once"
    assert high.finish_reason is FinishReason.FAILED and high.id in bench.finished and not bench.emitted[high.id]
    assert bench.emitted[later.id] == oracle_output([60, 61], 4)
    assert [bench.emitted[each.id] for each in low] == [oracle_output(counting(100 * i, 6), 9) for i in (1, 2)]


@DEPTHS
@pytest.mark.parametrize("beams", [False, True], ids=["samples", "beams"])
@pytest.mark.parametrize("turns", range(4, 8))
@pytest.mark.parametrize("index", [1, 2])
def test_of_a_sibling_that_begins_again(
    break_lookup: Callable[[Callable[[], Sequence]], list[BlockOwner]], depth: int, turns: int, index: int, beams: bool
) -> None:
    """A preempted group is admitted again, and the prefix look-up of one of its forks fails."""
    bench = Bench(rows=4, depth=depth, oracle=True)
    add = bench.add_beams if beams else bench.add_group
    sequences = add(PROMPT, 8, 3, priority=1)
    other = bench.add(OTHER, 40, priority=0)
    bench.turns(turns)
    failed = break_lookup(lambda: sequences[index])
    urgent = bench.add([9], 2)
    bench.run()
    assert bench.emitted[other.id] == oracle_output(OTHER, 40)
    assert bench.emitted[urgent.id] == oracle_output([9], 2)
    assert len(bench.finished) == len(sequences) + 2, "each finish is reported once"
    assert failed == [sequences[0].group.owner], "once"
    assert FinishReason.FAILED in {sequence.finish_reason for sequence in sequences}
    if not beams:
        for sequence in sequences:
            emitted = bench.emitted[sequence.id]
            assert emitted == oracle_output(PROMPT, 8, sequence.index)[: len(emitted)]

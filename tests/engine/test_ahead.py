"""Kernels compiled ahead of the first step: begun early, waited for, and told of."""

from threading import Event

from quire.engine.ahead import Ahead
from quire.engine.phases import Phase, Watch
from quire.kernels.ahead import Compiled, CompilingAhead


def test_the_first_kernel_comes_before_the_others_and_all_are_told() -> None:
    phases: list[Phase] = []
    may_end, order = Event(), list[str]()

    def first() -> None:
        may_end.wait(10)
        order.append("first")

    def launched(play, num_threads):
        play()
        return Compiled(3, ("no C compiler",))

    ahead = Ahead(CompilingAhead(first, launched))
    order.append("loaded")
    may_end.set()
    ahead.compile(lambda: order.append("played"), 16, Watch(finished=phases.append))
    assert order == ["loaded", "first", "played"]
    [(name, _, detail)] = phases
    assert name == "kernels"
    assert detail == "3 compiled or found compiled, 1 left for later: no C compiler, in 16 threads"


def test_where_nothing_is_compiled_nothing_is_played_or_told() -> None:
    phases: list[Phase] = []
    Ahead(None).compile(lambda: phases.append(Phase("played", 0.0, "")), 4, Watch(finished=phases.append))
    assert phases == []

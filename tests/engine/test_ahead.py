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

    def launched(play, num_at_once):
        play()
        return Compiled(3, 2, f"{num_at_once} processes", ("no C compiler",))

    ahead = Ahead(CompilingAhead(first, launched))
    order.append("loaded")
    may_end.set()
    ahead.compile(lambda: order.append("played"), 16, Watch(finished=phases.append))
    assert order == ["loaded", "first", "played"]
    [(name, _, detail)] = phases
    assert name == "kernels"
    assert detail == "2 compiled in 16 processes, 1 found compiled, 1 left for later: no C compiler"


def test_what_was_found_is_not_said_to_be_compiled() -> None:
    assert Compiled(3, 3, "2 processes", ()).describe() == "3 compiled in 2 processes"
    assert Compiled(3, 0, "2 threads", ()).describe() == "3 found compiled"
    assert (
        Compiled(2, 3, "2 processes", ("no room",)).describe() == "3 compiled in 2 processes, 1 left for later: no room"
    )


def test_where_nothing_is_compiled_nothing_is_played_or_told() -> None:
    phases: list[Phase] = []
    Ahead(None).compile(lambda: phases.append(Phase("played", 0.0, "")), 4, Watch(finished=phases.append))
    assert phases == []

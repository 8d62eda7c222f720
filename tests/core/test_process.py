"""A process that is ours keeps what it has; whoever only measures leaves things as they were."""

import gc
import sys
from collections.abc import Iterator
from threading import Event, Thread
from weakref import finalize

import pytest

from quire.core.process import gc_frozen_imports, gc_postponed, gc_undisturbed
from tests import children


@pytest.fixture(autouse=True, scope="module")
def _frozen_again() -> Iterator[None]:
    yield
    gc.freeze()


def test_imports_run_without_collections_and_are_frozen() -> None:
    try:
        with gc_frozen_imports():
            assert not gc.isenabled()
            module = ["imported"]
        assert gc.isenabled() and gc.get_freeze_count() > 0
        assert not any(each is module for each in gc.get_objects())
    finally:
        gc.unfreeze()


def test_collection_is_postponed_and_resumes_afterwards() -> None:
    class Ring:
        def __init__(self) -> None:
            self.self = self

    freed: list[str] = []
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with gc_postponed():
            finalize(Ring(), freed.append, "ring")
            some = [[] for _ in range(1000)]  # enough that it would be looked for
            assert some and not freed and not gc.isenabled()
        assert gc.isenabled()
        gc.disable()
        with gc_postponed():
            pass
        assert not gc.isenabled(), "who has switched it off finds it off"
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)
    gc.collect()
    assert freed == ["ring"]


def test_collection_resumes_after_the_last_of_several_threads() -> None:
    inside, done = Event(), Event()

    def wait() -> None:
        with gc_postponed():
            inside.set()
            done.wait()

    other = Thread(target=wait)
    with gc_postponed():
        other.start()
        inside.wait()
    assert not gc.isenabled(), "the other one is still in it"
    done.set()
    other.join()
    assert gc.isenabled()


def test_gc_settings_are_restored_after_a_measurement() -> None:
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    before = (701, 11, 12)
    gc.set_threshold(*before)
    try:
        with gc_undisturbed():
            assert gc.get_freeze_count() > frozen and gc.get_threshold()[0] > before[0]
        assert gc.get_threshold() == before and gc.get_freeze_count() == 0
    finally:
        gc.set_threshold(*thresholds)


def test_a_frozen_heap_is_not_collected() -> None:
    code = """
import gc
from quire.core.process import freeze_heap
class Ring: pass
ring = Ring(); ring.self = ring; del ring
freeze_heap()
print(gc.get_freeze_count() > 1000, any(isinstance(each, Ring) for each in gc.get_objects()), gc.get_threshold()[0])
"""
    said = children.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True", "False", "20000"], "garbage of the start is not kept"

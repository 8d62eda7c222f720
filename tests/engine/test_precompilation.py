"""Kernels compiled ahead of the first step: begun early, waited for, and told of; weights are loaded beside them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Event

import pytest
import torch

from quire.config import EngineConfig
from quire.core.errors import BrokenModelFile
from quire.core.sampling import SamplingParams
from quire.engine import build
from quire.engine.build import Precompilation
from quire.engine.startup import StartupPhase, StartupReporter
from quire.formats.presets import SHAPES
from quire.kernels.interface import CompiledKernels, Finish, Precompiling
from quire.kernels.reference import ReferenceKernels
from quire.kernels.select import KernelChoice
from quire.llm import LLM
from quire.weights.allocate import UnfilledWeights, dummy_weights
from tests import children
from tests.bench.conftest import TINY


class Diary:
    """Compiles nothing, and has a list of what was done when."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.first_may_end = Event()
        self.first_may_end.set()

    def first(self) -> None:
        self.first_may_end.wait(10)
        self.order.append("first")

    @contextmanager
    def launched(self, play, num_at_once: int) -> Iterator[Finish]:
        play()
        self.order.append("begun")
        try:
            yield lambda: self.finish(num_at_once)
        finally:
            self.order.append("over")

    def finish(self, num_at_once: int) -> CompiledKernels:
        self.order.append("finished")
        return CompiledKernels(3, 2, f"{num_at_once} processes", ("no C compiler",))

    def note(self, phase: StartupPhase) -> None:
        self.order.append(f"told of {phase.name}")

    @property
    def ahead(self) -> Precompiling:
        return Precompiling(self.first, self.launched)


def test_the_first_kernel_comes_before_the_others_and_all_are_told() -> None:
    diary, phases = Diary(), list[StartupPhase]()
    diary.first_may_end.clear()
    ahead = Precompilation(diary.ahead)
    diary.order.append("made ready")
    diary.first_may_end.set()
    with ahead.compiling(lambda: diary.order.append("played"), 16, StartupReporter(finished=phases.append)):
        diary.order.append("loaded")
    assert diary.order == ["made ready", "first", "played", "begun", "loaded", "finished", "over"]
    assert [phase.name for phase in phases] == ["rehearsal", "kernels"]
    assert phases[1].detail == "2 compiled in 16 processes, 1 found compiled, 1 left for later: no C compiler"


def test_what_was_found_is_not_said_to_be_compiled() -> None:
    assert CompiledKernels(3, 3, "2 processes", ()).describe() == "3 compiled in 2 processes"
    assert CompiledKernels(3, 0, "2 threads", ()).describe() == "3 found compiled"
    assert (
        CompiledKernels(2, 3, "2 processes", ("no room",)).describe()
        == "3 compiled in 2 processes, 1 left for later: no room"
    )


def started(monkeypatch: pytest.MonkeyPatch, diary: Diary | None, watch: StartupReporter) -> build.BuiltEngine:
    """A model with norms of heads, by kernels that pack nothing; compiled ahead if there is a diary."""
    monkeypatch.setattr(build, "precompiling_for", lambda device: None if diary is None else diary.ahead)
    monkeypatch.setitem(SHAPES, "normed", replace(TINY, qk_norm=True))
    monkeypatch.setattr(build, "select_kernels", lambda *_: KernelChoice(ReferenceKernels(), "for a test"))
    settings = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "kv_cache_memory": 1 << 20}
    return build.build(EngineConfig("normed", **settings), watch)


def poisoned_room(*given: object) -> UnfilledWeights:
    """Whoever keeps anything of weights that have no values yet keeps this."""
    room = dummy_weights(*given)  # type: ignore[arg-type]
    for layer in room.weights.layers:
        for name in layer.__slots__:
            if (tensor := getattr(layer, name)) is not None:
                tensor.fill_(torch.nan)
    return room


def tokens(built: build.BuiltEngine) -> tuple[int, ...]:
    asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    [answer] = LLM.over(built).generate([[1, 2, 3]], asked, progress=False)
    return tuple(answer.outputs[0].token_ids)


def test_weights_are_loaded_while_kernels_are_compiled_and_the_model_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "dummy_weights", poisoned_room)
    diary = Diary()
    one = tokens(started(monkeypatch, diary, StartupReporter(finished=diary.note)))
    diary.order.remove("first")  # at any time before
    told = ["begun", "told of rehearsal", "told of weights", "finished", "told of kernels", "over", "told of warm-up"]
    assert diary.order[diary.order.index("told of kv cache") + 1 :][: len(told)] == told
    plain = Diary()
    assert tokens(started(monkeypatch, None, StartupReporter(finished=plain.note))) == one
    assert plain.order[1:4] == ["told of kernels", "told of weights", "told of kv cache"]


def test_a_file_that_cannot_be_read_ends_the_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    diary = Diary()

    def broken() -> None:
        raise BrokenModelFile("it changed while it was read.")

    monkeypatch.setattr(build, "dummy_weights", lambda *given: dummy_weights(*given)._replace(fill=broken))
    with pytest.raises(BrokenModelFile):
        started(monkeypatch, diary, StartupReporter(finished=diary.note))
    assert diary.order[-3:] == ["begun", "told of rehearsal", "over"], "and nobody waits for kernels"


def test_whoever_refuses_a_model_and_leaves_waits_for_the_first_kernel() -> None:
    """A thread that ends with its process is torn out of whatever code it is in: the compiler's calls that a crash."""
    refusing = """
import sys
from threading import Event
from quire.engine.build import Precompilation
from quire.kernels.interface import Precompiling

begun, refused = Event(), Event()

def first():
    begun.set()
    refused.wait()
    print("compiled")

Precompilation(Precompiling(first, None))
begun.wait()
refused.set()
raise SystemExit(3)
"""
    left = children.run([sys.executable, "-c", refusing], capture_output=True, text=True, check=False)
    assert (left.returncode, left.stdout) == (3, "compiled\n"), left.stderr

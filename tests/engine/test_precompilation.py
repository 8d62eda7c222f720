"""Kernels compiled before the first step: started early, awaited and reported; weights are loaded in parallel."""

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
from quire.engine import build, build_runner, first_steps
from quire.engine.first_steps import Precompilation
from quire.engine.startup import StartupPhase, StartupReporter
from quire.formats.presets import SHAPES
from quire.kernels.interface import CompiledKernels, Finish, Precompiling
from quire.kernels.reference import ReferenceKernels
from quire.kernels.select import KernelChoice
from quire.llm import LLM
from quire.weights.allocate import UnfilledWeights, dummy_weights
from tests import children
from tests.bench.conftest import TINY


class FakeCompiler:
    """Compiles nothing; records the order of events."""

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
        self.order.append(f"reported {phase.name}")

    @property
    def ahead(self) -> Precompiling:
        return Precompiling(self.first, self.launched)


def test_the_first_kernel_precedes_the_others_and_all_are_reported() -> None:
    compiler, phases = FakeCompiler(), list[StartupPhase]()
    compiler.first_may_end.clear()
    ahead = Precompilation(compiler.ahead)
    compiler.order.append("made ready")
    compiler.first_may_end.set()
    with ahead.compiling(lambda: compiler.order.append("played"), 16, StartupReporter(finished=phases.append)):
        compiler.order.append("loaded")
    assert compiler.order == ["made ready", "first", "played", "begun", "loaded", "finished", "over"]
    assert [phase.name for phase in phases] == ["dry run", "kernels"]
    assert phases[1].detail == "2 compiled in 16 processes, 1 found compiled, 1 left for later: no C compiler"


def test_cached_kernels_are_not_reported_as_compiled() -> None:
    assert CompiledKernels(3, 3, "2 processes", ()).describe() == "3 compiled in 2 processes"
    assert CompiledKernels(3, 0, "2 threads", ()).describe() == "3 found compiled"
    assert (
        CompiledKernels(2, 3, "2 processes", ("no unfilled",)).describe()
        == "3 compiled in 2 processes, 1 left for later: no unfilled"
    )


def started(
    monkeypatch: pytest.MonkeyPatch, compiler: FakeCompiler | None, watch: StartupReporter
) -> build.BuiltEngine:
    """A model with QK norm, with kernels that pack nothing; precompiled if there is a compiler."""
    monkeypatch.setattr(first_steps, "precompiling_for", lambda device: None if compiler is None else compiler.ahead)
    monkeypatch.setitem(SHAPES, "normed", replace(TINY, qk_norm=True))
    monkeypatch.setattr(build_runner, "select_kernels", lambda *_, **__: KernelChoice(ReferenceKernels(), "for a test"))
    settings = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "kv_cache_memory": 1 << 20}
    return build.build(EngineConfig("normed", **settings), watch)


def nan_weights(*given: object) -> UnfilledWeights:
    """Unfilled weights full of NaN, which code that reads them too early would keep."""
    unfilled = dummy_weights(*given)  # type: ignore[arg-type]
    for layer in unfilled.weights.layers:
        for name in layer.__slots__:
            if (tensor := getattr(layer, name)) is not None:
                tensor.fill_(torch.nan)
    return unfilled


def tokens(built: build.BuiltEngine) -> tuple[int, ...]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    [output] = LLM.over(built).generate([[1, 2, 3]], params, progress=False)
    return tuple(output.outputs[0].token_ids)


def test_weights_are_loaded_while_kernels_are_compiled_and_the_model_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build_runner, "dummy_weights", nan_weights)
    compiler = FakeCompiler()
    one = tokens(started(monkeypatch, compiler, StartupReporter(finished=compiler.note)))
    compiler.order.remove("first")  # at any time before
    events = ["begun", "reported dry run", "reported weights", "finished"]
    events += ["reported kernels", "over", "reported warm-up"]
    assert compiler.order[compiler.order.index("reported kv cache") + 1 :][: len(events)] == events
    plain = FakeCompiler()
    assert tokens(started(monkeypatch, None, StartupReporter(finished=plain.note))) == one
    assert plain.order[1:4] == ["reported kernels", "reported weights", "reported kv cache"]


def test_an_unreadable_file_stops_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = FakeCompiler()

    def broken() -> None:
        raise BrokenModelFile("it changed while it was read.")

    monkeypatch.setattr(build_runner, "dummy_weights", lambda *given: dummy_weights(*given)._replace(fill=broken))
    with pytest.raises(BrokenModelFile):
        started(monkeypatch, compiler, StartupReporter(finished=compiler.note))
    assert compiler.order[-3:] == ["begun", "reported dry run", "over"], "without waiting for kernels"


def test_exit_after_a_refused_model_waits_for_the_first_kernel() -> None:
    """A daemon thread is killed at process exit wherever it is: in the compiler that is a crash."""
    refusing = """
import sys
from threading import Event
from quire.engine.first_steps import Precompilation
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

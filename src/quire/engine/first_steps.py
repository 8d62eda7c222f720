"""What every rank runs before the first request: kernels are compiled, steps are warmed up and timed, graphs captured.

An engine without ranks is one rank. With several, all do the same in the same order, since a collective waits for all.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Thread

import torch

from quire.core.process_memory import release_libraries, trim_heap
from quire.dist.process_group import ProcessGroup
from quire.engine.resolved_config import GIB
from quire.engine.startup import StartupReporter
from quire.kernels.interface import Precompiling
from quire.kernels.select import KernelChoice, precompiling_for
from quire.models.decoder import Decoder
from quire.runner.cuda_graphs import StepTimes
from quire.runner.kv_store import KvStores
from quire.runner.model_runner import ModelRunner
from quire.runner.pipeline_parallel import StageRunner
from quire.runner.warmup import time_steps, warm_up


class Precompilation:
    """Kernel precompilation in the background. The first kernel is compiled at construction, to load the compiler."""

    __slots__ = ("_compiling", "_first")

    def __init__(self, compiling: Precompiling) -> None:
        self._compiling = compiling
        # Not a daemon: a process that refuses a model and exits must wait for it, or it is killed inside the compiler.
        self._first = Thread(target=compiling.first, name="quire-first-kernel")
        self._first.start()

    @contextmanager
    def compiling(self, dry_run: Callable[[], None], num_at_once: int, reporter: StartupReporter) -> Iterator[None]:
        """Compile the kernels that `dry_run` would launch while the block runs."""
        self._first.join()
        with self._compiling.launched(dry_run, num_at_once) as finish:
            reporter.done("dry run", "collects the kernels to compile")
            yield
            reporter.done("kernels", finish().describe())


def start_precompilation(device: torch.device, reporter: StartupReporter) -> Precompilation | None:
    """Start precompilation, if the device has kernels to compile. Takes about a second, while the model is located; the
    device's context is created meanwhile."""
    if device.type != "cpu":
        Thread(target=partial(torch.empty, 1, device=device), name="quire-context").start()
    compiling = precompiling_for(device.type)
    if compiling is None:
        return None
    reporter.done("compiler", "import")
    return Precompilation(compiling)


def dry_run(
    model: Decoder, stores: KvStores, runner: ModelRunner | StageRunner, group: ProcessGroup | None = None
) -> None:
    """All kernels launched before the first request, those that take longest to compile first. A rank does it alone."""
    assert isinstance(runner, ModelRunner), "no pipeline stage is on a GPU"
    with nullcontext() if group is None else group.alone():
        runner.dry_run()
        warm_up(model.truncated(), stores)


def first_steps(
    model: Decoder,
    stores: KvStores,
    runner: ModelRunner | StageRunner,
    choice: KernelChoice,
    reporter: StartupReporter,
) -> StepTimes | None:
    """Warm up, and time captured graphs, or on a CPU two steps. None: a GPU without graphs."""
    if runner.device.type == "cpu":  # elsewhere the weights are not in this memory, and little of it matters
        release_libraries()  # not later: what steps use comes back with these
        trim_heap()
    warm_up(model, stores, samples=isinstance(runner, ModelRunner))
    reporter.done("warm-up", choice.reason if choice.attention else "a chunk of a prompt and a decode")
    if runner.device.type == "cpu":
        times = time_steps(model, stores, time.monotonic, samples=isinstance(runner, ModelRunner))
        reporter.done("steps", _describe_times(times))
        return times
    if choice.row_kernels is None or not choice.capturable or isinstance(runner, StageRunner):
        return None
    return _capture_first_graphs(runner, reporter)


def _describe_times(times: StepTimes) -> str:
    return f"one row {1e3 * times.decode_s:.2f} ms · {1e6 * times.token_s:.1f} µs per prompt token"


def _capture_first_graphs(runner: ModelRunner, reporter: StartupReporter) -> StepTimes | None:
    """Capture the first CUDA graphs and time them; the rest when idle, and between steps."""
    for _ in range(runner.num_first):
        runner.prepare()
    step_times, launches = runner.step_times(), runner.launches
    size = f"{launches.captured_bytes / GIB:.2f} GiB"
    detail = f"{launches.captured} CUDA graph shapes captured ({size}), others when idle and between steps"
    if step_times is not None:
        detail += f" · {_describe_times(step_times)}"
    reporter.done("graphs", detail)
    return step_times

"""Precompiles the kernels of a step, many at once. Does not depend on single kernels.

A dry run of the step finds them. Kernels on disk are loaded by threads. Compiling holds the GIL, because Triton parses
Python sources in Python; so forked workers first put the missing kernels on disk.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton import AsyncCompileMode, knobs
from triton.runtime import KernelInterface, driver
from triton.runtime._async_compile import FutureKernel

from quire.kernels.gpu.compile_workers import CompileWorkers, call_in_workers
from quire.kernels.gpu.copy_blocks import copy_blocks
from quire.kernels.gpu.launch import dry_run_launches
from quire.kernels.interface import CompiledKernels, Finish

_Compile = Callable[[], Any]  # compiles a Triton kernel, or finds it on disk


class _CompileQueue(Executor):
    """Kernels to compile. Nothing is compiled before all are known."""

    def __init__(self) -> None:
        self.kernels: list[tuple[_Compile, Future[Any]]] = []

    def submit(self, compile_kernel: _Compile, /) -> Future[Any]:  # type: ignore[override]
        kernel: Future[Any] = Future()
        self.kernels.append((compile_kernel, kernel))
        return kernel

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel what was not compiled."""
        for _, kernel in self.kernels:
            if not kernel.done() and kernel.cancel():
                kernel.set_running_or_notify_cancel()


@contextmanager
def compiling_launched(run_step: Callable[[], None], num_at_once: int) -> Iterator[Finish]:
    """Compile all that `run_step` launches, in a dry run. A kernel that fails is compiled again at its real launch.

    Workers compile from entry on; the yielded function waits for them. On exit without it, compilation is abandoned.
    """
    launched = _Launched()
    try:
        launched.dry_run(run_step)
        stamp = launched.stamp()
        with _compile_in_workers(launched.queue, 0 if os.path.exists(stamp) else num_at_once) as workers:
            yield lambda: launched.finish(workers, stamp, num_at_once)
    finally:
        launched.close()


def compile_launched(run_step: Callable[[], None], num_at_once: int) -> CompiledKernels:
    """`compiling_launched`, waited for at once."""
    with compiling_launched(run_step, num_at_once) as finish:
        return finish()


class _Launched:
    """The launches of a dry run, to be compiled."""

    __slots__ = ("_errors", "_kernels", "_mode", "queue")

    def __init__(self) -> None:
        self.queue = _CompileQueue()
        self._errors: list[BaseException] = []
        self._kernels: set[KernelInterface[object]] = set()
        self._mode = AsyncCompileMode(self.queue, ignore_errors=True)

    def dry_run(self, run_step: Callable[[], None]) -> None:
        # In a separate context: the compile mode must not hold for later launches of this thread.
        copy_context().run(self._run_dry, run_step)

    def _run_dry(self, run_step: Callable[[], None]) -> None:
        self._mode.__enter__()
        try:
            with dry_run_launches(self._kernels):
                run_step()
        except Exception as error:  # the real step will raise it again
            self._errors.append(error)

    def stamp(self) -> Path:
        """The file whose existence says that all these kernels are on disk. The keys cover all that a compilation
        depends on."""
        digest = hashlib.sha256("\n".join(sorted(self._mode.future_kernels)).encode()).hexdigest()
        return Path(knobs.cache.dir, f"quire-{digest[:32]}")

    def finish(self, workers: CompileWorkers, stamp: Path, num_threads: int) -> CompiledKernels:
        num_workers, num_compiled = workers.collect()
        num_compiled += _load_all(self.queue, num_threads)
        self.close()
        failures = [failure for _, kernel in self.queue.kernels if (failure := kernel.exception()) is not None]
        if num_workers and not failures:
            with suppress(OSError):  # on a read-only cache, workers look again next time
                stamp.touch()
        compiled_by = f"{num_workers} processes" if num_workers else f"{num_threads} threads"
        errors = tuple(map(str, self._errors + failures))
        return CompiledKernels(len(self.queue.kernels) - len(failures), num_compiled, compiled_by, errors)

    def close(self) -> None:
        """Idempotent."""
        self.queue.shutdown()
        self._mode.__exit__(None, None, None)
        _forget_failed(self._kernels)


def _compile_in_workers(queue: _CompileQueue, max_workers: int) -> AbstractContextManager[CompileWorkers]:
    """Each call returns True if it compiled a kernel that was not on disk. Not tried with AMD's compiler."""
    max_workers = min(max_workers, len(queue.kernels))
    if max_workers < 2 or not hasattr(os, "fork") or torch.version.hip is not None:
        max_workers = 0
    calls = [partial(_compile_in_worker, compile_kernel) for compile_kernel, _ in queue.kernels]
    return call_in_workers(calls, max_workers)


def _compile_in_worker(compile_kernel: _Compile) -> bool:
    """In a worker, which must not use the GPU: a kernel and its launcher, which a C compiler builds."""
    with _record_compiled() as compiled:
        kernel = compile_kernel()
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return bool(compiled)


def _load_all(queue: _CompileQueue, num_threads: int) -> int:
    """Load all kernels, compiling those that are not on disk; the number of these."""
    with _record_compiled() as compiled, ThreadPoolExecutor(num_threads, thread_name_prefix="quire-compiling") as pool:
        for compile_kernel, kernel in queue.kernels:
            pool.submit(_compile_into, compile_kernel, kernel)
    return len(compiled)


def _compile_into(compile_kernel: _Compile, future: Future[Any]) -> None:
    try:
        kernel = compile_kernel()
        _ = kernel.run  # finds or builds the launcher, and loads the code onto the GPU
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(kernel)


@contextmanager
def _record_compiled() -> Iterator[list[str]]:
    """The names of kernels compiled meanwhile, without those found on disk."""
    compiled: list[str] = []
    previous = knobs.compilation.listener

    def listen(**event: Any) -> None:
        if not event["cache_hit"]:
            compiled.append(event["src"].name)
        if previous is not None:
            previous(**event)

    knobs.compilation.listener = listen
    try:
        yield compiled
    finally:
        knobs.compilation.listener = previous


def _forget_failed(kernels: Iterable[KernelInterface[object]]) -> None:
    """So that a later launch compiles again; Triton 3.6 would remember the failure."""
    for kernel in kernels:
        for compiled, *_ in getattr(kernel, "device_caches", {}).values():
            unfinished = [
                key for key, each in compiled.items() if isinstance(each, FutureKernel) and each.kernel is None
            ]
            for variant in unfinished:
                del compiled[variant]


def compile_first() -> None:
    """Compile one small kernel. The first takes a second longer than others: half a gigabyte of compiler is loaded and
    hashed. Other threads run meanwhile."""
    block = torch.empty(1, dtype=torch.int64, device="meta")
    store = torch.empty(1, 16, dtype=torch.int64, device="meta")
    compile_launched(lambda: copy_blocks(store, store, block, block), 1)

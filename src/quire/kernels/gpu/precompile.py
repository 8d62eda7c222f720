"""Compiles many kernels at once. Knows not which.

What is on disk is read by threads. Compiling is another matter: Triton reads Python sources with Python, which threads
do by turns. So children of this process put what is not there yet on disk before the threads look.
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

from quire.kernels.gpu.compile_workers import CompileWorkers, calling_in_children
from quire.kernels.gpu.copy_blocks import copy_blocks
from quire.kernels.gpu.launch import dry_run_launches
from quire.kernels.interface import CompiledKernels, Finish

_Compile = Callable[[], Any]  # makes a kernel of Triton's, or finds it on disk


class _CompileQueue(Executor):
    """Kernels to be compiled. None is before all are known."""

    def __init__(self) -> None:
        self.kernels: list[tuple[_Compile, Future[Any]]] = []

    def submit(self, compile_kernel: _Compile, /) -> Future[Any]:  # type: ignore[override]
        kernel: Future[Any] = Future()
        self.kernels.append((compile_kernel, kernel))
        return kernel

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nobody waits any more for what was not compiled."""
        for _, kernel in self.kernels:
            if not kernel.done() and kernel.cancel():
                kernel.set_running_or_notify_cancel()


@contextmanager
def compiling_launched(play: Callable[[], None], num_at_once: int) -> Iterator[Finish]:
    """All that `play` launches, which meanwhile launches nothing. What fails is left to whoever launches in earnest.

    Children are at it until somebody finishes. What nobody finishes is not compiled, and nobody waits for it.
    """
    launched = _Launched()
    try:
        launched.dry_run(play)
        stamp = launched.stamp()
        with _putting_on_disk(launched.wanted, 0 if os.path.exists(stamp) else num_at_once) as children:
            yield lambda: launched.finish(children, stamp, num_at_once)
    finally:
        launched.close()


def compile_launched(play: Callable[[], None], num_at_once: int) -> CompiledKernels:
    """The same, waited for at once."""
    with compiling_launched(play, num_at_once) as finish:
        return finish()


class _Launched:
    """What was launched in a rehearsal, and is to be compiled."""

    __slots__ = ("_errors", "_kernels", "_mode", "wanted")

    def __init__(self) -> None:
        self.wanted = _CompileQueue()
        self._errors: list[BaseException] = []
        self._kernels: set[KernelInterface[object]] = set()
        self._mode = AsyncCompileMode(self.wanted, ignore_errors=True)

    def dry_run(self, play: Callable[[], None]) -> None:
        copy_context().run(self._play, play)  # there alone the mode holds: whoever launches behind it is not in it

    def _play(self, play: Callable[[], None]) -> None:
        self._mode.__enter__()
        try:
            with dry_run_launches(self._kernels):
                play()
        except Exception as error:  # whatever it is, the steps themselves will meet it and be heard
            self._errors.append(error)

    def stamp(self) -> Path:
        """The file that says of these kernels that all are on disk; a key is all that a compilation depends on."""
        digest = hashlib.sha256("\n".join(sorted(self._mode.future_kernels)).encode()).hexdigest()
        return Path(knobs.cache.dir, f"quire-{digest[:32]}")

    def finish(self, children: CompileWorkers, stamp: Path, num_threads: int) -> CompiledKernels:
        num_children, num_made = children.hear()
        num_made += _make_ready(self.wanted, num_threads)
        self.close()
        failures = [failure for _, kernel in self.wanted.kernels if (failure := kernel.exception()) is not None]
        if num_children and not failures:
            with suppress(OSError):  # where nothing can be written, children look again next time
                stamp.touch()
        workers = f"{num_children} processes" if num_children else f"{num_threads} threads"
        told = tuple(map(str, self._errors + failures))
        return CompiledKernels(len(self.wanted.kernels) - len(failures), num_made, workers, told)

    def close(self) -> None:
        """Twice is as good as once."""
        self.wanted.shutdown()
        self._mode.__exit__(None, None, None)
        _forget_unfinished(self._kernels)


def _putting_on_disk(wanted: _CompileQueue, most_children: int) -> AbstractContextManager[CompileWorkers]:
    """True for each that was not there, and now is. With AMD's compiler this was never tried."""
    most_children = min(most_children, len(wanted.kernels))
    if most_children < 2 or not hasattr(os, "fork") or torch.version.hip is not None:
        most_children = 0
    calls = [partial(_was_made, compile_kernel) for compile_kernel, _ in wanted.kernels]
    return calling_in_children(calls, most_children)


def _was_made(compile_kernel: _Compile) -> bool:
    """In a child, which must leave the card alone: a kernel, and what launches it, which a C compiler builds."""
    with _making() as made:
        kernel = compile_kernel()
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return bool(made)


def _make_ready(wanted: _CompileQueue, num_threads: int) -> int:
    """How many of them were not on disk."""
    with _making() as made, ThreadPoolExecutor(num_threads, thread_name_prefix="quire-compiling") as crew:
        for compile_kernel, kernel in wanted.kernels:
            crew.submit(_settle, compile_kernel, kernel)
    return len(made)


def _settle(compile_kernel: _Compile, future: Future[Any]) -> None:
    try:
        kernel = compile_kernel()
        _ = kernel.run  # finds or builds what launches it, and sends its code to the card
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(kernel)


@contextmanager
def _making() -> Iterator[list[str]]:
    """The names of kernels that meanwhile are compiled, and not found on disk."""
    made: list[str] = []
    other = knobs.compilation.listener

    def listen(**told: Any) -> None:
        if not told["cache_hit"]:
            made.append(told["src"].name)
        if other is not None:
            other(**told)

    knobs.compilation.listener = listen
    try:
        yield made
    finally:
        knobs.compilation.listener = other


def _forget_unfinished(kernels: Iterable[KernelInterface[object]]) -> None:
    """Whoever launches one that failed has it compiled again; Triton 3.6 would remember the failure."""
    for kernel in kernels:
        for made, *_ in getattr(kernel, "device_caches", {}).values():
            unfinished = [key for key, each in made.items() if isinstance(each, FutureKernel) and each.kernel is None]
            for variant in unfinished:
                del made[variant]


def compile_first() -> None:
    """The first kernel takes a second more than others: half a gigabyte of compiler is loaded, and hashed to know which
    it is. Meanwhile other threads run."""
    block = torch.empty(1, dtype=torch.int64, device="meta")
    compile_launched(lambda: copy_blocks(torch.empty(1, 16, dtype=torch.int64, device="meta"), block, block), 1)

"""Compiles many kernels at once. Knows not which.

What is on disk is read by threads. Compiling is another matter: Triton reads Python sources with Python, which threads
do by turns. So children of this process put what is not there yet on disk before the threads look.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton import AsyncCompileMode, knobs
from triton.runtime import KernelInterface, driver
from triton.runtime._async_compile import FutureKernel

from quire.kernels.ahead import Compiled
from quire.kernels.gpu.copies import copy_blocks
from quire.kernels.gpu.forked import Answers, call_in_children
from quire.kernels.gpu.launch import rehearsal

_Compile = Callable[[], Any]  # makes a kernel of Triton's, or finds it on disk
_NOBODY = Answers(num_children=0, num_true=0)


class _Wanted(Executor):
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
            if kernel.cancel():
                kernel.set_running_or_notify_cancel()


def compile_launched(play: Callable[[], None], num_at_once: int) -> Compiled:
    """All that `play` launches, which meanwhile launches nothing. What fails is left to whoever launches in earnest."""
    wanted = _Wanted()
    errors: list[BaseException] = []
    launched: set[KernelInterface[object]] = set()
    with AsyncCompileMode(wanted, ignore_errors=True) as mode, wanted:
        try:
            with rehearsal(launched):
                play()
        except Exception as error:  # whatever it is, the steps themselves will meet it and be heard
            errors.append(error)
        stamp = _stamp(mode.future_kernels)
        num_children, num_made = _NOBODY if os.path.exists(stamp) else _put_on_disk(wanted, num_at_once)
        num_made += _make_ready(wanted, num_at_once)
    failures = [failure for _, kernel in wanted.kernels if (failure := kernel.exception()) is not None]
    if errors or failures:
        _forget_unfinished(launched)
    if num_children and not failures:
        with suppress(OSError):  # where nothing can be written, children look again next time
            stamp.touch()
    workers = f"{num_children} processes" if num_children else f"{num_at_once} threads"
    return Compiled(len(wanted.kernels) - len(failures), num_made, workers, tuple(map(str, errors + failures)))


def _stamp(keys: Iterable[str]) -> Path:
    """The file that says of these kernels that all are on disk; a key is all that a compilation depends on."""
    digest = hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()
    return Path(knobs.cache.dir, f"quire-{digest[:32]}")


def _put_on_disk(wanted: _Wanted, most_children: int) -> Answers:
    """True for each that was not there, and now is. With AMD's compiler this was never tried."""
    most_children = min(most_children, len(wanted.kernels))
    if most_children < 2 or not hasattr(os, "fork") or torch.version.hip is not None:
        return _NOBODY
    return call_in_children([partial(_was_made, compile_kernel) for compile_kernel, _ in wanted.kernels], most_children)


def _was_made(compile_kernel: _Compile) -> bool:
    """In a child, which must leave the card alone: a kernel, and what launches it, which a C compiler builds."""
    with _making() as made:
        kernel = compile_kernel()
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return bool(made)


def _make_ready(wanted: _Wanted, num_threads: int) -> int:
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

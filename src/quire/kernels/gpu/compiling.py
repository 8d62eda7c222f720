"""Compiles many kernels at once. Knows not which.

Triton's passes, ptxas and the C compiler that makes the launchers let other threads run: all but the tenth that reads
Python sources goes on side by side.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from triton import AsyncCompileMode
from triton.runtime import KernelInterface
from triton.runtime._async_compile import FutureKernel

from quire.kernels.ahead import Compiled
from quire.kernels.gpu.copies import copy_blocks
from quire.kernels.gpu.launch import rehearsal


class _Crew(ThreadPoolExecutor):
    """Threads that compile kernels, and make them ready to be launched."""

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads, thread_name_prefix="quire-compiling")
        self.futures: list[Future[Any]] = []

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        self.futures.append(super().submit(_made_ready, compile_kernel))
        return self.futures[-1]


def _made_ready(compile_kernel: Callable[[], Any]) -> Any:
    kernel = compile_kernel()
    _ = kernel.run  # builds what launches it, with a C compiler, and sends its code to the card
    return kernel


def compile_launched(play: Callable[[], None], num_threads: int) -> Compiled:
    """All that `play` launches, which meanwhile launches nothing. What fails is left to whoever launches in earnest."""
    crew = _Crew(num_threads)
    errors: list[BaseException] = []
    kernels: set[KernelInterface[object]] = set()
    try:
        with crew, AsyncCompileMode(crew, ignore_errors=True), rehearsal(kernels):
            play()
    except Exception as error:  # whatever it is, the steps themselves will meet it and be heard
        errors.append(error)
    failures = [failure for future in crew.futures if (failure := future.exception()) is not None]
    if errors or failures:
        _forget_unfinished(kernels)
    return Compiled(len(crew.futures) - len(failures), tuple(map(str, errors + failures)))


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

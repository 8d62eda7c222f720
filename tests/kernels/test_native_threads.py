"""The thread pool of the native kernels: results do not depend on it, idle threads sleep, and it is freed."""

import gc
from pathlib import Path

import pytest
import torch

from quire.kernels.cpu.native_kernels import NativeKernels
from quire.kernels.cpu.native_library import load_native
from tests.kernels.cpu_kernels import native_kernels, needs_native
from tests.kernels.stored_rows import drawn_rows, stored, weight_of
from tests.server.server_process import wait_until

pytestmark = needs_native

WEIGHT = weight_of(256, stored("Q4_0", drawn_rows("Q4_0", 200, 256)), stored("F16", drawn_rows("F16", 90, 256)))
X = torch.randn(24, 256, generator=torch.Generator().manual_seed(0))


def new_kernels(num_threads: int) -> NativeKernels:
    library = load_native()
    assert library is not None
    return NativeKernels(library, num_threads)


TASKS = Path("/proc/self/task")


def num_threads_of_this_process() -> int:
    return len(list(TASKS.iterdir()))


def state_of(task: Path) -> str:
    """As the kernel has it: R runs or could, S sleeps."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("num_threads", [1, 2, 4, 7])
def test_results_have_the_same_bits_with_any_number_of_threads(num_threads: int) -> None:
    kernels, alone = new_kernels(num_threads), native_kernels(1)
    packed, expected = kernels.pack(WEIGHT), alone.linear(X, alone.pack(WEIGHT), None)
    for count in (1, 2, 24):
        assert torch.equal(kernels.linear(X[:count], packed, None), expected[:count])


def test_threads_join_and_leave_between_steps() -> None:
    """A thread that was left out in one loop and is in the next must do the tasks of the next alone, and once."""
    kernels, alone = new_kernels(8), native_kernels(1)
    packed, expected = kernels.pack(WEIGHT), alone.linear(X, alone.pack(WEIGHT), None)
    for step in range(3000):
        kernels.set_threads((2, 8, 3, 1, 8)[step % 5])
        assert kernels.active_threads == (2, 8, 3, 1, 8)[step % 5]
        count = 1 + step % 3
        assert torch.equal(kernels.linear(X[:count], packed, None), expected[:count]), step
    kernels.set_threads(99)
    assert kernels.active_threads == 8, "no more than there are"


def test_idle_threads_sleep() -> None:
    before = {task.name for task in TASKS.iterdir()}
    kernels = new_kernels(4)
    packed = kernels.pack(WEIGHT)
    for _ in range(20):
        kernels.linear(X, packed, None)
    added = [task for task in TASKS.iterdir() if task.name not in before]
    assert len(added) >= 3, "torch may have added one of its own"
    wait_until(lambda: {state_of(task) for task in added} == {"S"})  # a thread that spins runs, or is ready to


def test_threads_and_memory_are_freed_with_the_kernels() -> None:
    x = torch.randn(2000, 1024)
    weight = weight_of(1024, stored("Q8_0", drawn_rows("Q8_0", 16, 1024)))

    def used() -> None:
        kernels = new_kernels(5)
        kernels.linear(x, kernels.pack(weight), None)  # activations as 16 bits: 5 MB of workspace

    used()
    gc.collect()
    num_threads, num_pages = num_threads_of_this_process(), resident_bytes()
    for _ in range(40):
        used()
        gc.collect()
    assert num_threads_of_this_process() == num_threads
    assert resident_bytes() - num_pages < 40 * 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_the_profile_has_the_time_of_products_and_begins_anew() -> None:
    kernels = new_kernels(2)
    kernels.profile()
    kernels.linear(X, kernels.pack(WEIGHT), None)
    assert kernels.profile().linear > 0
    assert kernels.profile().linear == 0

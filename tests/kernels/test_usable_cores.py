"""The number of threads follows the affinity mask, physical cores, fast cores and cgroup quotas: on trees of files."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.cpu.native_kernels import NativeKernels
from quire.kernels.cpu.usable_cores import UsableCores, count_cores, usable_cores
from quire.kernels.select import select_kernels
from tests.kernels.cpu_kernels import needs_native

CPUS = "sys/devices/system/cpu"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def siblings(*groups: str) -> dict[str, str]:
    """Groups such as "0,4" or "0-1": the hyper-threads of one core."""
    files: dict[str, str] = {}
    for group in groups:
        numbers = [int(word) for word in group.replace("-", ",").split(",")]
        files |= {f"{CPUS}/cpu{cpu}/topology/thread_siblings_list": group for cpu in numbers}
    return files


def count(root: Path, *allowed: int) -> UsableCores:
    return count_cores(frozenset(allowed), root)


def test_without_files_each_cpu_is_a_core(tmp_path: Path) -> None:
    assert count(tmp_path, 0, 1, 5) == (3, "3 cores")


@pytest.mark.parametrize("groups", [("0,4", "1,5", "2,6", "3,7"), ("0-1", "2-3", "4-5", "6-7")])
def test_one_thread_for_each_physical_core(groups: tuple[str, ...], tmp_path: Path) -> None:
    write(tmp_path, siblings(*groups))
    assert count(tmp_path, *range(8)) == (4, "4 cores, 8 hyper-threads")
    both = [int(word) for word in groups[0].replace("-", ",").split(",")]
    assert count(tmp_path, *both).num_threads == 1, "the mask allows both threads of one core"
    assert count(tmp_path, both[0]) == (1, "1 core")


def test_efficiency_cores_of_x86_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, siblings("0-1", "2-3", "4", "5") | {"sys/devices/cpu_core/cpus": "0-3"})
    write(tmp_path, {"sys/devices/cpu_atom/cpus": "4-5"})
    assert count(tmp_path, *range(6)) == (2, "2 cores, 2 slower ones left out, 4 hyper-threads")
    assert count(tmp_path, 4, 5) == (2, "2 cores"), "they are used where the mask allows no others"


def test_little_cores_of_arm_are_left_out_and_middle_ones_are_not(tmp_path: Path) -> None:
    capacities = (1024, 870, 870, 250, 250, 250)
    write(tmp_path, {f"{CPUS}/cpu{cpu}/cpu_capacity": str(each) for cpu, each in enumerate(capacities)})
    assert count(tmp_path, *range(6)) == (3, "3 cores, 3 slower ones left out")
    assert count(tmp_path, 3, 4, 5).num_threads == 3


@pytest.mark.parametrize(
    ("quota", "threads", "shown"),
    [("max 100000", 8, None), ("200000 100000", 2, "2"), ("150000 100000", 1, "1.5"), ("50000 100000", 1, "0.5"),
     ("6400000 100000", 8, None), ("", 8, None), ("0 0", 8, None)],
)  # fmt: skip
def test_a_quota_of_cgroup_v2(quota: str, threads: int, shown: str | None, tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/a.slice/b.scope", "sys/fs/cgroup/a.slice/b.scope/cpu.max": quota})
    found = count(tmp_path, *range(8))
    assert found.num_threads == threads
    assert found.reason == ("8 cores" if shown is None else f"8 cores, of which a quota allows {shown}")


def test_the_strictest_of_nested_cgroups_counts(tmp_path: Path) -> None:
    files = {"a/b/cpu.max": "400000 100000", "a/cpu.max": "300000 100000", "cpu.max": "max 100000"}
    write(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    write(tmp_path, {"proc/self/cgroup": "0::/a/b"})
    assert count(tmp_path, *range(8)).num_threads == 3


def test_a_container_sees_its_own_cgroup_as_the_top(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/docker/0123", "sys/fs/cgroup/cpu.max": "200000 100000"})
    assert count(tmp_path, *range(8)).num_threads == 2


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_a_quota_of_cgroup_v1(folder: str, tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "5:memory:/\n4:cpu,cpuacct:/inner\n0::/"})
    place = f"sys/fs/cgroup/{folder}/inner"
    write(tmp_path, {f"{place}/cpu.cfs_quota_us": "300000", f"{place}/cpu.cfs_period_us": "100000"})
    assert count(tmp_path, *range(8)).num_threads == 3
    write(tmp_path, {f"{place}/cpu.cfs_quota_us": "-1"})
    assert count(tmp_path, *range(8)).num_threads == 8


junk = st.text(max_size=30)


@given(junk, junk, junk, junk)
def test_any_contents_give_a_number_of_threads(
    tmp_path_factory: pytest.TempPathFactory, group: str, limit: str, cpus: str, sibling: str
) -> None:
    root = tmp_path_factory.mktemp("root")
    for name, text in {
        "proc/self/cgroup": f"0::/\n{group}",
        "sys/fs/cgroup/cpu.max": limit,
        "sys/devices/cpu_core/cpus": cpus,
        f"{CPUS}/cpu1/topology/thread_siblings_list": sibling,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    assert 1 <= count(root, 0, 1, 2).num_threads <= 3


def test_this_machine_has_a_thread_and_no_more_than_its_mask_allows() -> None:
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    assert 1 <= usable_cores().num_threads <= len(allowed)


@needs_native
def test_the_pool_has_as_many_threads_also_for_a_second_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first engine leaves one thread to torch, which says nothing about the second."""
    monkeypatch.setattr("quire.kernels.select.usable_cores", lambda: UsableCores(3, "a test"))
    for _ in range(2):
        choice = select_kernels("cpu")
        assert isinstance(choice.kernels, NativeKernels)
        choice.kernels.set_threads(99)
        assert (choice.kernels.active_threads, torch.get_num_threads()) == (3, 1)
        assert choice.reason.endswith("3 threads (a test)")
    given = select_kernels("cpu", threads=2)
    assert given.reason.endswith("2 threads (--threads)")

"""How many threads compute on a CPU: one for each fast physical core that this process may use, within its quota.

Reads what Linux tells about CPUs and cgroups below a folder. Does not depend on torch, nor on the load of the machine:
the thread pool itself uses fewer threads while other programs want the cores.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_CPUS = "sys/devices/system/cpu"
_GROUPS = "sys/fs/cgroup"
_FAST = 0.5  # of the fastest core's capacity; little cores of Arm have a quarter to a third of it


class UsableCores(NamedTuple):
    """A number of threads, with its reason."""

    num_threads: int
    reason: str

    def shared_by(self, num_ranks: int) -> "UsableCores":
        """The threads of one of several processes that compute a step together."""
        return UsableCores(max(1, self.num_threads // num_ranks), f"{self.reason}, shared by {num_ranks} ranks")


@cache
def usable_cores() -> UsableCores:
    """Those of this process, as they were when it was first asked."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return count_cores(frozenset(allowed), Path("/"))


def count_cores(allowed: frozenset[int], root: Path) -> UsableCores:
    """`allowed`: the CPUs of the affinity mask. `root`: the folder that holds `sys` and `proc`."""
    fast = _fast_cpus(allowed, root)
    cores = {_siblings(cpu, root) for cpu in fast}
    reasons = [f"{len(cores)} core{'s' if len(cores) > 1 else ''}"]
    if len(fast) < len(allowed):
        reasons.append(f"{len(allowed) - len(fast)} slower ones left out")
    if len(cores) < len(fast):
        reasons.append(f"{len(fast)} hyper-threads")
    quota = _quota(root)
    if quota is None or quota >= len(cores):
        return UsableCores(len(cores), ", ".join(reasons))
    reasons.append(f"of which a quota allows {quota:g}")
    return UsableCores(max(1, int(quota)), ", ".join(reasons))


def _fast_cpus(allowed: frozenset[int], root: Path) -> frozenset[int]:
    """Without efficiency cores, which would keep the others waiting at the end of each loop; they are used alone."""
    performance = _cpu_list(_read(root / "sys/devices/cpu_core/cpus"))
    if performance & allowed:  # hybrid x86; the others are in cpu_atom
        return performance & allowed
    capacities = {cpu: _number(_read(root / _CPUS / f"cpu{cpu}/cpu_capacity")) for cpu in allowed}  # Arm
    known = [capacity for capacity in capacities.values() if capacity]
    least = _FAST * max(known, default=0)
    return frozenset(cpu for cpu, capacity in capacities.items() if not capacity or capacity >= least)


def _siblings(cpu: int, root: Path) -> frozenset[int]:
    """The hyper-threads of a CPU's core, itself included."""
    return _cpu_list(_read(root / _CPUS / f"cpu{cpu}/topology/thread_siblings_list")) or frozenset({cpu})


def _quota(root: Path) -> float | None:
    """CPUs that the strictest cgroup around this process allows; None: there is no limit."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            limits += [_cpu_max(folder) for folder in _up(root / _GROUPS, path)]
        elif "cpu" in controllers.split(","):
            for name in ("cpu", controllers):
                limits += [_cfs_quota(folder) for folder in _up(root / _GROUPS / name, path)]
    return min((limit for limit in limits if limit is not None), default=None)


def _up(top: Path, path: str) -> Iterator[Path]:
    """A cgroup and those around it. A container may see its own as the top, so folders may be missing."""
    inner = PurePosixPath(path.lstrip("/"))
    for each in (inner, *inner.parents):
        yield top / each


def _cpu_max(folder: Path) -> float | None:
    """cgroup v2: "max 100000" or "150000 100000"."""
    words = _read(folder / "cpu.max").split()
    return _share(words[0], words[1]) if len(words) == 2 else None


def _cfs_quota(folder: Path) -> float | None:
    """cgroup v1: -1 means unlimited."""
    return _share(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _share(quota: str, period: str) -> float | None:
    given, of = _number(quota), _number(period)
    return given / of if given and of else None


def _number(text: str) -> int:
    return int(text) if text.strip().isdecimal() else 0


def _cpu_list(text: str) -> frozenset[int]:
    """ "0-3,8": the CPUs 0, 1, 2, 3 and 8."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _read(path: Path) -> str:
    """Empty if there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

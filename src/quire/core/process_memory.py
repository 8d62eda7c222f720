"""Resident memory of this process: what a start has used and the next requests do not is given back to the system.

Importing torch reads a hundred megabytes of its libraries once, most of which no step executes again, and loading a
model leaves free pieces in the C heap. Both stay resident unless they are released. Does nothing but on Linux.
"""

import ctypes
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_LINUX = sys.platform == "linux"
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if _LINUX else None  # glibc has it
_madvise = ctypes.CDLL(None).madvise if _LINUX else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_DONTNEED = 4
_SMAPS = Path("/proc/self/smaps")
_MIN_RESIDENT_KIB = 256  # of a mapping: shorter ones are not worth a system call


class Mapping(NamedTuple):
    """A range of this process's memory."""

    start: int
    stop: int
    flags: str  # as `r-xp`
    path: str
    resident_kib: int
    anonymous_kib: int  # written by this process: not in the file

    @property
    def is_library(self) -> bool:
        """Whether it holds pages of a library, all of them as they are in its file."""
        name = self.path.rpartition("/")[2]
        return "w" not in self.flags and self.anonymous_kib == 0 and (name.endswith(".so") or ".so." in name)


def read_mappings(lines: Iterable[str]) -> Iterator[Mapping]:
    """The mappings in `/proc/PID/smaps`: for each a line of its range, then a line of each figure."""
    head: list[str] = []
    sizes: dict[str, int] = {}
    for line in lines:
        fields = line.split(maxsplit=5)
        if not fields[0].endswith(":"):
            if head:
                yield _mapping(head, sizes)
            head, sizes = fields, {}
        elif len(fields) == 3 and fields[2] == "kB":
            sizes[fields[0]] = int(fields[1])
    if head:
        yield _mapping(head, sizes)


def _mapping(head: list[str], sizes: dict[str, int]) -> Mapping:
    start, _, stop = head[0].partition("-")
    path = head[5].rstrip() if len(head) > 5 else ""
    return Mapping(int(start, 16), int(stop, 16), head[1], path, sizes.get("Rss:", 0), sizes.get("Anonymous:", 0))


def release_libraries() -> int:
    """Give up the resident pages of libraries; the bytes. What is executed again comes back from the page cache, within
    microseconds. Takes some 15 ms: before the first request, not beside one."""
    if _madvise is None:
        return 0
    num_kib = 0
    try:
        text = _SMAPS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # a system that hides it
        return 0
    for each in read_mappings(text.splitlines()):
        if each.is_library and each.resident_kib >= _MIN_RESIDENT_KIB:
            released = _madvise(each.start, each.stop - each.start, _MADV_DONTNEED) == 0
            num_kib += each.resident_kib if released else 0
    return num_kib << 10


def trim_heap() -> None:
    """Return free memory of the C heap to the system. Otherwise, what a large piece of work took stays resident."""
    if _malloc_trim is not None:
        _malloc_trim(0)

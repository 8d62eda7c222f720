"""Memory that is given back to the system, and what must not be."""

import ctypes
import sys
from pathlib import Path

import pytest

from quire.core.process_memory import Mapping, read_mappings, release_libraries, trim_heap

SMAPS = """\
55d0c8a00000-55d0c8a21000 rw-p 00000000 00:00 0                          [heap]
Size:                132 kB
Rss:                 100 kB
Anonymous:           100 kB
VmFlags: rd wr mr mw me ac
7f0000000000-7f0000100000 r-xp 00000000 fe:00 5359459                    /a folder/torch/lib/libtorch_cpu.so
Size:               1024 kB
Rss:                 900 kB
Anonymous:             0 kB
THPeligible:           0
7f0000100000-7f0000200000 r--p 00100000 fe:00 5359459                    /a folder/torch/lib/libtorch_cpu.so
Rss:                 500 kB
Anonymous:           500 kB
7f0000300000-7f0000301000 r-xp 00000000 fe:00 17                         /usr/lib/libm.so.6
Rss:                   4 kB
"""


def test_mappings_are_read_with_their_sizes() -> None:
    heap, text, data, short = read_mappings(SMAPS.splitlines())
    assert text == Mapping(0x7F0000000000, 0x7F0000100000, "r-xp", "/a folder/torch/lib/libtorch_cpu.so", 900, 0)
    assert (heap.path, heap.resident_kib, heap.anonymous_kib) == ("[heap]", 100, 100)
    assert (data.anonymous_kib, short.resident_kib, short.path) == (500, 4, "/usr/lib/libm.so.6")


def test_only_unchanged_pages_of_libraries_may_be_given_up() -> None:
    """Written ones, such as addresses that the loader has filled in, are in no file."""
    heap, text, data, short = read_mappings(SMAPS.splitlines())
    assert [each.is_library for each in (heap, text, data, short)] == [False, True, False, True]
    assert not text._replace(flags="rw-p").is_library
    assert not text._replace(path="/a folder/model.gguf").is_library
    assert not text._replace(path="").is_library


def test_no_mappings_are_read_from_nothing() -> None:
    assert list(read_mappings([])) == []


@pytest.mark.skipif(sys.platform != "linux", reason="smaps is Linux's")
def test_pages_of_a_library_go_and_come_back_unchanged() -> None:
    import tokenizers.tokenizers as library

    path = Path(library.__file__).resolve()

    def pages() -> list[Mapping]:
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
        return [each for each in read_mappings(lines) if each.path == str(path) and each.flags == "r-xp"]

    [text] = pages()
    size = text.stop - text.start
    before = ctypes.string_at(text.start, size)
    assert pages()[0].resident_kib == size >> 10
    assert release_libraries() >= size // 2
    assert pages()[0].resident_kib < size >> 11
    assert ctypes.string_at(text.start, size) == before
    assert tokenizers_work()
    trim_heap()


def tokenizers_work() -> bool:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return Tokenizer(WordLevel({"a": 0}, unk_token="a")).encode("a").ids == [0]

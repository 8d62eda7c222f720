"""Compiles the native CPU kernels, and finds compiled ones. Does not depend on torch or the rest of the package.

A library is compiled for each set of instructions of an architecture, and named after a hash of its sources. Installing
quire from source compiles all of them into the package (`hatch_build.py`); where that was not possible, the one that
this CPU needs is compiled into the cache folder when it is first used.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "native"
CHOICE_VARIABLE = "QUIRE_CPU_KERNELS"  # for tests: the name of a variant, or "none"
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-w", "-pthread")


class Variant(NamedTuple):
    """One compilation of the kernels."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]  # that the CPU must have, as Linux names them

    @property
    def file_name(self) -> str:
        return f"quire_{self.name}_{source_hash()}.so"


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AVX512_FLAGS = ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")

# The best first.
VARIANTS = {
    "x86_64": (
        Variant(
            "amx_bf16",
            (*_AVX512_FLAGS, "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
            _AVX512 | {"avx512_vnni", "amx_tile", "amx_bf16"},
        ),
        Variant("avx512_vnni", (*_AVX512_FLAGS, "-mavx512vnni"), _AVX512 | {"avx512_vnni"}),
        Variant("avx512", _AVX512_FLAGS, _AVX512),
        Variant("avx_vnni", ("-mavx2", "-mfma", "-mf16c", "-mavxvnni"), _AVX2 | {"avx_vnni"}),
        Variant("avx2", ("-mavx2", "-mfma", "-mf16c"), _AVX2),
    ),
    "aarch64": (
        Variant(
            "neon_i8mm",
            ("-march=armv8.2-a+dotprod+fp16+i8mm", "-fno-schedule-insns"),
            frozenset({"asimd", "asimddp", "asimdhp", "i8mm"}),
        ),
        Variant(
            "neon_dotprod",
            ("-march=armv8.2-a+dotprod+fp16", "-fno-schedule-insns"),
            frozenset({"asimd", "asimddp", "asimdhp"}),
        ),
        Variant("neon", ("-march=armv8-a", "-fno-schedule-insns"), frozenset({"asimd"})),
    ),
}


def source_hash() -> str:
    """Of the sources and the flags: a library of other sources is never loaded."""
    flags = [(variant.name, variant.flags) for variant in VARIANTS.get(platform.machine(), ())]
    digest = hashlib.sha256(repr((_FLAGS, flags)).encode())
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def cpu_flags() -> frozenset[str]:
    """The instruction sets of this CPU, as Linux names them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


class UnknownVariant(Exception):
    """The environment names a variant that does not exist on this architecture."""


def known_variants() -> tuple[Variant, ...]:
    """Those of this architecture, the best first; empty on other systems than Linux."""
    return VARIANTS.get(platform.machine(), ()) if platform.system() == "Linux" else ()


def considered_variants() -> tuple[Variant, ...]:
    """All known ones; or the one that the environment names, or none."""
    known, chosen = known_variants(), os.environ.get(CHOICE_VARIABLE, "")
    names = (*(variant.name for variant in known), "none")
    if chosen and chosen not in names:
        raise UnknownVariant(f"{CHOICE_VARIABLE} is {chosen!r}, and here it may be {', '.join(names)}, or unset.")
    return tuple(variant for variant in known if chosen in ("", variant.name))


def usable_variants() -> tuple[Variant, ...]:
    """Those considered that this CPU can run, the best first."""
    flags = cpu_flags()
    return tuple(variant for variant in considered_variants() if variant.features <= flags)


def why_none_usable() -> str:
    """Why `usable_variants` is empty."""
    considered = considered_variants()
    if not considered:
        here = f"{platform.system()} on {platform.machine()}"
        return f"switched off by {CHOICE_VARIABLE}" if known_variants() else f"none for {here}"
    least = considered[-1]
    return f"{least.name} needs {', '.join(sorted(least.features - cpu_flags()))}, which this CPU lacks"


def compiler() -> str | None:
    """The C++ compiler of this machine: $CXX, g++, c++ or clang++."""
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    return None


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/quire/kernels`, or the same under `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "quire" / "kernels"


def find_library(variant: Variant) -> Path | None:
    """A compiled library of these sources, in the package or in the cache folder."""
    for folder in (SOURCES, cache_folder()):
        if (folder / variant.file_name).is_file():
            return folder / variant.file_name
    return None


class CompilationFailed(Exception):
    """The compiler's first error, or why it was not started."""


def compile_variant(variant: Variant, folder: Path) -> Path:
    """Compile into a folder. The library appears when it is complete."""
    program = compiler()
    if program is None:
        raise CompilationFailed("no C++ compiler is installed (g++ or clang++)")
    target = folder / variant.file_name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".compile-", dir=folder) as scratch:
            made = Path(scratch) / "library.so"
            command = [program, *_FLAGS, *variant.flags, str(SOURCES / "api.cpp"), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
            if done.returncode != 0:
                raise CompilationFailed(next(iter(done.stderr.splitlines()), f"{program} exited {done.returncode}"))
            made.replace(target)
    except OSError as error:
        raise CompilationFailed(str(error)) from error
    return target


def compile_all(folder: Path = SOURCES) -> tuple[Path, ...]:
    """Every variant of this architecture that the compiler knows: an older one may lack the newest instructions."""
    if compiler() is None:
        return ()

    def compiled(variant: Variant) -> Path | None:
        if (folder / variant.file_name).is_file():
            return folder / variant.file_name
        try:
            return compile_variant(variant, folder)
        except CompilationFailed:
            return None

    with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        return tuple(path for path in pool.map(compiled, known_variants()) if path is not None)

"""`quire --version`: the version, what it runs on and what it was built with. Imports no torch: it answers at once."""

import platform
from collections.abc import Iterator
from importlib import metadata

from quire.kernels.cpu.native_build import compiler, find_library, known_variants, usable_variants
from quire.version import __version__

_PACKAGES = ("torch", "triton", "tokenizers", "gguf", "starlette", "uvicorn", "llguidance")


def describe_build() -> Iterator[str]:
    """The lines that are printed."""
    yield f"quire {__version__}"
    yield f"  python    {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield f"  packages  {' · '.join(f'{name} {_version(name)}' for name in _PACKAGES)}"
    yield f"  kernels   {_kernels()}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _kernels() -> str:
    """The native CPU kernels that are compiled, and the best of them that this CPU can run."""
    compiled = [variant.name for variant in known_variants() if find_library(variant) is not None]
    if not compiled:
        when = "compiled at the first start" if compiler() else "there is no C++ compiler, torch computes alone"
        return f"no native CPU kernels yet: {when}"
    best = next((variant.name for variant in usable_variants() if variant.name in compiled), None)
    used = "this CPU can use none of them" if best is None else f"this CPU uses {best}"
    return f"native CPU kernels for {', '.join(compiled)}; {used}"

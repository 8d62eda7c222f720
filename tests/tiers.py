"""Two tiers: `make test` runs few examples of each kind, `make test-long` (`pytest --long`) runs all of them.

With a GPU the tests of the kernels run all of them too: the interpreter is what makes them slow.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

LONG_VARIABLE = "QUIRE_TEST_LONG"  # set by --long before any test is imported; processes that tests start inherit it
HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))


def is_long(*, gpu: bool = False) -> bool:
    """Whether everything runs. gpu: for tests of kernels, which run everything where there is a GPU."""
    return os.environ.get(LONG_VARIABLE) == "1" or (gpu and HAS_GPU)


def examples(short: int, long: int, *, gpu: bool = False) -> int:
    """How many random examples a test tries."""
    return long if is_long(gpu=gpu) else short


def choices(short: Sequence[T], long: Sequence[T], *, gpu: bool = False) -> Sequence[T]:
    """What random examples are drawn from."""
    return long if is_long(gpu=gpu) else short


def long_only(values: Iterable[Any], *, gpu: bool = False) -> list[Any]:
    """Parameters that only the long tier tries. A tuple is one set of parameters."""
    mark = pytest.mark.long(gpu=gpu)
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=mark) for each in values]

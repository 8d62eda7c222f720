"""Fault injection: named sites where a test can make one request fail. They do nothing unless a test has armed them.

At each site the loop handles values of a single request; an error there fails that request only.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum


class FaultSite(Enum):
    """Where a fault is injected. The values are in the error message."""

    DECODE_FRAME = "decode frame"
    ADD = "add"
    PREFIX_LOOKUP = "prefix look-up"
    ALLOCATE = "allocate"
    BUILD_BATCH = "build batch"
    GRAMMAR_MASK = "grammar mask"
    FORWARD = "forward"
    LOGITS_PROCESSORS = "logits processors"
    PENALTIES = "penalties"
    SAMPLE = "sample"
    LOGPROBS = "logprobs"
    GRAMMAR_ADVANCE = "grammar advance"
    STOP_CHECK = "stop check"
    ENCODE_FRAME = "encode frame"


class InjectedFault(RuntimeError):
    """The error that a test injects."""


_armed: dict[FaultSite, int] = {}  # the request or sequence that fails, by site; empty outside tests


def any_armed() -> bool:
    """Whether a test has armed any site."""
    return bool(_armed)


def trip(site: FaultSite, name: int) -> None:
    """Fail if this request or sequence is armed at this site."""
    if _armed and _armed.get(site) == name:
        raise InjectedFault(f"{site.value} of {name}")


def trip_any(site: FaultSite, names: Iterable[int]) -> None:
    """Fail if one of these is armed at this site."""
    if _armed and _armed.get(site) in set(names):
        raise InjectedFault(f"{site.value} of {_armed[site]}")


@contextmanager
def armed(site: FaultSite, name: int) -> Iterator[None]:
    """Make one request or sequence fail at a site while the block runs."""
    _armed[site] = name
    try:
        yield
    finally:
        del _armed[site]

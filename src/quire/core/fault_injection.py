"""Named places where a test may let one request fail. Nothing happens at them unless a test has armed them.

Each is a site of the loop at which a request's own values are handled; whatever fails there fails that request alone.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum


class FaultSite(Enum):
    """Where. The values are what a failure says."""

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
    """What a test ordered."""


_armed: dict[FaultSite, int] = {}  # by site, the request or sequence that fails there; empty but in tests


def trip(site: FaultSite, name: int) -> None:
    """This request, or sequence, has come here."""
    if _armed and _armed.get(site) == name:
        raise InjectedFault(f"{site.value} of {name}")


def trip_any(site: FaultSite, names: Iterable[int]) -> None:
    """So have all of these."""
    if _armed and _armed.get(site) in set(names):
        raise InjectedFault(f"{site.value} of {_armed[site]}")


@contextmanager
def armed(site: FaultSite, name: int) -> Iterator[None]:
    """Let one request, or sequence, fail at a site for as long as the block runs."""
    _armed[site] = name
    try:
        yield
    finally:
        del _armed[site]

"""How long a thread of a kernel spins for its next piece of work before it sleeps. Knows OpenMP's settings alone.

OpenMP's own choice is some milliseconds, on the belief that nobody else wants the core. Where a front, a client or
another program does, whoever holds the work waits for those that spin: steps took ten times as long (docs/log.md).
Read once, when OpenMP is loaded: it must be set before torch is imported.
"""

from collections.abc import Mapping

_SPINS = {"GOMP_SPINCOUNT": "1000"}  # some microseconds; what libgomp takes where threads outnumber the cores
_CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")


def brief_spins(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with threads that soon sleep, unless it says something about that already."""
    if any(name in environment for name in _CHOICES):
        return dict(environment)
    return {**environment, **_SPINS}

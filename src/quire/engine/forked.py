"""A process that was forked from one that had run a model: the threads that computed there did not come along."""

import os

from quire.core.errors import EngineFailed

_homes: set[int] = set()  # processes in which an engine was built; a forked one finds its parent's here


def check_not_forked() -> None:
    """Whoever went on would wait for these threads for ever, or be ended by the library that misses them."""
    if _homes and os.getpid() not in _homes:
        raise EngineFailed(
            "This process was forked from one that had loaded a model, and cannot compute. Start it another way, as "
            'multiprocessing.get_context("spawn") does, or load models in the forked processes alone.'
        )


def note_home() -> None:
    _homes.add(os.getpid())

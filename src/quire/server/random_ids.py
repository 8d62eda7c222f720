"""Ids that nobody can choose or guess. Drawn from the system many at a time: a call of it for each would let go of the
interpreter, which other threads then keep for milliseconds.
"""

import os

ID_BYTES = 8
_DRAWN_AT_ONCE = 256


class RandomIds:
    """May be asked by several threads."""

    __slots__ = ("_unused",)

    def __init__(self) -> None:
        self._unused: list[str] = []

    def draw(self) -> str:
        """One that was not given before, in hexadecimal."""
        while True:
            try:
                return self._unused.pop()
            except IndexError:
                drawn = os.urandom(ID_BYTES * _DRAWN_AT_ONCE).hex()
                self._unused += [drawn[start : start + 2 * ID_BYTES] for start in range(0, len(drawn), 2 * ID_BYTES)]

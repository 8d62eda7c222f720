"""Keys in their order, and the neighbours of any run among them. Knows nothing of what they stand for.

They lie in short pieces: whoever comes or goes moves a few others, however many there are. (As in `sortedcontainers`;
these fifty lines are no reason for another package below the offline engine.)
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

_LONGEST_PIECE = 512  # keys: arbitrary, 4 KiB to move at most


class SortedKeys:
    """A set of distinct keys."""

    __slots__ = ("_bounds", "_longest", "_pieces")

    def __init__(self, longest_piece: int = _LONGEST_PIECE) -> None:
        self._longest = longest_piece
        self._pieces: list[list[bytes]] = [[]]  # only one that is alone may be empty
        self._bounds: list[bytes] = []  # of all pieces but the first: no key of theirs is smaller

    def add(self, key: bytes) -> None:
        at = bisect_right(self._bounds, key)
        piece = self._pieces[at]
        insort(piece, key)
        if len(piece) > self._longest:
            middle = len(piece) // 2
            self._pieces[at : at + 1] = [piece[:middle], piece[middle:]]
            self._bounds.insert(at, piece[middle])

    def remove(self, key: bytes) -> None:
        at = bisect_right(self._bounds, key)
        piece = self._pieces[at]
        place = bisect_left(piece, key)
        assert piece[place] == key, key
        del piece[place]
        if not piece and self._bounds:
            del self._pieces[at]
            del self._bounds[max(at - 1, 0)]

    def around(self, run: bytes) -> list[bytes]:
        """The last key before a run and the first that is not, as far as there are any."""
        at = bisect_right(self._bounds, run)
        piece = self._pieces[at]
        place = bisect_left(piece, run)
        near = piece[max(place - 1, 0) : place + 1]
        if place == 0 and at > 0:
            near = self._pieces[at - 1][-1:] + near
        if place == len(piece) and at < len(self._bounds):
            near = near + self._pieces[at + 1][:1]
        return near

    def __len__(self) -> int:
        return sum(len(piece) for piece in self._pieces)

    def __iter__(self) -> Iterator[bytes]:
        return (key for piece in self._pieces for key in piece)

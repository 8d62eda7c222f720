"""Prompt lookup in hindsight: whether each token of a row is what two tokens before it would have drafted.

A draft that was never made is judged by the token that came: so the governor knows what drafts of a row would gain
before it pays for one. One hash table of all rows holds which token followed two others last; it forgets what others
overwrite, and a row that starts anew finds nothing of its predecessor. Every operation is on arrays of rows.
"""

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import IndexArray, IntArray, Row

MAX_TEXT = 16_384  # tokens of a row that are entered when it starts: as many as are searched for drafts
_ENTRIES_PER_ROW = 4096
_MIN_BITS, _MAX_BITS = 16, 20  # of the number of entries, 8 bytes each
_CONTEXT = 2  # tokens that must be the same; prompt lookup asks for at least as many
_FACTORS = [np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)]  # odd
_TAG_SHIFT, _MIX_SHIFT = np.uint64(32), np.uint64(29)
_SCALARS = [int(each) for each in _FACTORS]
_WORD = (1 << 64) - 1
_HIT, _MISS = np.array([True]), np.array([False])


class LookupHits:
    """What followed what in every row."""

    __slots__ = ("_before", "_entries", "_last", "_num_starts", "_place_shift", "_salts")

    def __init__(self, max_rows: int) -> None:
        bits = min(max((max_rows * _ENTRIES_PER_ROW - 1).bit_length(), _MIN_BITS), _MAX_BITS)
        self._place_shift = np.uint64(64 - bits)
        self._entries: NDArray[np.uint64] = np.zeros(1 << bits, dtype=np.uint64)  # tag of the context, token
        self._salts: NDArray[np.uint64] = np.zeros(max_rows, dtype=np.uint64)  # by row, of what it holds
        self._before: NDArray[np.uint64] = np.zeros(max_rows, dtype=np.uint64)  # the last token but one
        self._last: NDArray[np.uint64] = np.zeros(max_rows, dtype=np.uint64)
        self._num_starts = 0

    def start(self, row: Row, tokens: IntArray, continuation: IntArray) -> None:
        """A row starts with these tokens; `continuation`: what drafts are taken from besides them."""
        self._num_starts += 1
        self._salts[row] = self._num_starts
        for text in (tokens[-MAX_TEXT:], np.concatenate([tokens[-_CONTEXT:], continuation])):
            if len(text) > _CONTEXT:
                known = text.astype(np.uint64)
                keys = _keys(self._salts[row : row + 1], known[:-2], known[1:-1])
                self._entries[keys >> self._place_shift] = _entries(keys, known[2:])  # of equal keys the last
        self._before[row], self._last[row] = (0, 0, *tokens[-_CONTEXT:].tolist())[-_CONTEXT:]

    def note(self, rows: IndexArray, tokens: IntArray) -> NDArray[np.bool_]:
        """Of each row its next token: whether that followed the two before it when they last occurred."""
        if len(rows) == 1:
            return _HIT if self._note_one(rows.item(), tokens.item()) else _MISS
        came = tokens.astype(np.uint64)
        keys = _keys(self._salts[rows], self._before[rows], self._last[rows])
        places, entries = keys >> self._place_shift, _entries(keys, came)
        hits: NDArray[np.bool_] = self._entries[places] == entries
        self._entries[places] = entries
        self._before[rows] = self._last[rows]
        self._last[rows] = came
        return hits

    def note_one(self, row: Row, token: int) -> bool:
        """`note` of one row."""
        return self._note_one(row, token)

    def _note_one(self, row: int, token: int) -> bool:
        """With integers of Python: a fifth of the time of arrays."""
        first, second, third = _SCALARS
        before, last = self._before.item(row), self._last.item(row)
        mixed = (self._salts.item(row) * first ^ before * second ^ last * third) & _WORD
        key = (mixed ^ mixed >> 29) * first & _WORD
        place, entry = key >> self._place_shift.item(), (key << 32 & _WORD) | token
        hit: bool = self._entries.item(place) == entry
        self._entries[place] = entry
        self._before[row], self._last[row] = last, token
        return hit


def _keys(salts: NDArray[np.uint64], before: NDArray[np.uint64], last: NDArray[np.uint64]) -> NDArray[np.uint64]:
    first, second, third = _FACTORS
    mixed = (salts * first) ^ (before * second) ^ (last * third)  # modulo 2**64
    keys: NDArray[np.uint64] = (mixed ^ (mixed >> _MIX_SHIFT)) * first
    return keys


def _entries(keys: NDArray[np.uint64], tokens: NDArray[np.uint64]) -> NDArray[np.uint64]:
    entries: NDArray[np.uint64] = (keys << _TAG_SHIFT) | tokens
    return entries

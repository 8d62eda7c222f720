"""Compact binary encoding of numbers and text. Does not depend on their meaning.

A count is 7 bits a byte, the lowest first, the top bit set on all but the last. An array of counts is its length, the
bytes each takes (1, 2, 4 or 8), then the numbers; these, and reals, are little-endian.
"""

from collections.abc import Iterable
from struct import Struct, pack

import numpy as np
from numpy.typing import NDArray

_REAL = Struct("<d")
_LONGEST_COUNT = 10  # bytes
_FEW = 64  # numbers of an array that are packed faster without numpy
_LETTERS = {1: "B", 2: "H", 4: "I", 8: "Q"}
_WIDTHS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}  # bytes of a number


class UnreadableRecord(Exception):
    """The bytes are not a valid encoding, or end too early."""

    def __init__(self, message: str, *, at_end: bool = False) -> None:
        super().__init__(message)
        self.at_end = at_end


class RecordEncoder:
    """Appends encoded values to `data`."""

    __slots__ = ("data",)

    def __init__(self) -> None:
        self.data = bytearray()

    def count(self, number: int) -> None:
        assert number >= 0, number
        while number > 0x7F:
            self.data.append(number & 0x7F | 0x80)
            number >>= 7
        self.data.append(number)

    def signed(self, number: int) -> None:
        self.count(2 * number if number >= 0 else -2 * number - 1)

    def real(self, number: float) -> None:
        self.data += _REAL.pack(number)

    def text(self, text: str) -> None:
        encoded = text.encode("utf-8", "surrogatepass")
        self.count(len(encoded))
        self.data += encoded

    def array(self, numbers: Iterable[int] | NDArray[np.int32]) -> None:
        held = numbers if isinstance(numbers, np.ndarray) else list(numbers)
        if not len(held):
            self.data += b"\0\1"
        elif len(held) <= _FEW:
            few: list[int] = held.tolist() if isinstance(held, np.ndarray) else held
            width = self._begin_array(len(few), min(few), max(few))
            self.data += pack(f"<{len(few)}{_LETTERS[width]}", *few)
        else:
            many = np.asarray(held)
            width = self._begin_array(len(many), int(many.min()), int(many.max()))
            self.data += many.astype(_WIDTHS[width]).tobytes()

    def _begin_array(self, length: int, least: int, largest: int) -> int:
        """The bytes that each number takes."""
        assert least >= 0, least
        width = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4 if largest < 1 << 32 else 8
        self.count(length)
        self.data.append(width)
        return width

    def reals(self, numbers: NDArray[np.float32]) -> None:
        self.count(len(numbers))
        self.data += numbers.astype("<f4").tobytes()


class RecordDecoder:
    """Reads the same values in the same order."""

    __slots__ = ("_data", "position")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    @property
    def at_end(self) -> bool:
        return self.position == len(self._data)

    def raw(self, length: int) -> bytes:
        stop = self.position + length
        if stop > len(self._data):
            raise self._ended()
        taken = self._data[self.position : stop]
        self.position = stop
        return taken

    def count(self) -> int:
        number, first = 0, self.position
        for place, byte in enumerate(self._data[first : first + _LONGEST_COUNT]):
            number |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                self.position = first + place + 1
                return number
        self.position = min(first + _LONGEST_COUNT, len(self._data))
        if self.position < first + _LONGEST_COUNT:
            raise self._ended()
        raise UnreadableRecord(f"there is no number at byte {self.position}")

    def _ended(self) -> UnreadableRecord:
        return UnreadableRecord(f"it ends inside a record, at byte {len(self._data)}", at_end=True)

    def signed(self) -> int:
        number = self.count()
        return number // 2 if number % 2 == 0 else -(number + 1) // 2

    def real(self) -> float:
        number: float = _REAL.unpack(self.raw(_REAL.size))[0]
        return number

    def text(self) -> str:
        try:
            return self.raw(self.count()).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as broken:
            raise UnreadableRecord(f"there is no text before byte {self.position}") from broken

    def array(self) -> NDArray[np.int64]:
        return self._numbers().astype(np.int64)

    def integers(self) -> NDArray[np.int32]:
        return self._numbers().astype(np.int32)

    def _numbers(self) -> NDArray[np.unsignedinteger]:
        length, width = self.count(), self.raw(1)[0]
        if width not in _WIDTHS:
            raise UnreadableRecord(f"there is no array before byte {self.position}")
        return np.frombuffer(self.raw(length * width), dtype=_WIDTHS[width])

    def reals(self) -> NDArray[np.float32]:
        return np.frombuffer(self.raw(4 * self.count()), dtype="<f4").astype(np.float32)

"""Text that comes in pieces, read as if it were there already. Knows nothing of what it means.

A reader is a generator that yields when it needs more text, so that it is written as if the whole text lay before it,
and cannot see where the pieces were cut. Whoever reads ahead without being sure keeps a record; what was recorded can
be had back, and a record has a limit, at which the tape reads as if it ended.
"""

import re
from collections.abc import Generator
from typing import TypeVar

Answer = TypeVar("Answer")
Reading = Generator[None, None, Answer]

MAX_RECORD_CHARACTERS = 1 << 18  # of a call whose function is not certain yet; arbitrary, far above what models write
SPACE = re.compile(r"[ \t\r\n]+")  # JSON's


class Markers:
    """Strings that may come anywhere in a text. None may lie inside another, or which comes first would be unclear."""

    __slots__ = ("_beginnings", "_longest", "pattern", "strings")

    def __init__(self, *strings: str) -> None:
        assert all(strings)
        assert not any(one in other for one in strings for other in strings if one != other), strings
        self.strings = strings
        self.pattern = re.compile("|".join(re.escape(string) for string in strings))
        self._beginnings = {string[:length] for string in strings for length in range(1, len(string))}
        self._longest = max(len(string) for string in strings) - 1

    def num_unsure(self, text: str, start: int) -> int:
        """How many of the last characters could be the beginning of a marker."""
        for length in range(min(self._longest, len(text) - start), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


class StreamReader:
    """The text of one continuation, and how much of it is read."""

    __slots__ = ("_ended", "_place", "_record", "_room", "_text")

    def __init__(self) -> None:
        self._text = ""
        self._place = 0
        self._ended = False
        self._record: list[str] | None = None
        self._room = 0

    def feed(self, text: str) -> None:
        assert not self._ended, "no text comes after the end"
        self._text = self._text[self._place :] + text
        self._place = 0

    def end(self) -> None:
        self._ended = True

    @property
    def is_dry(self) -> bool:
        """Nothing is left, and nothing more will come."""
        return self._ended and self._place == len(self._text)

    def record(self) -> None:
        """From here on, remember what is taken."""
        assert self._record is None
        self._record = []
        self._room = MAX_RECORD_CHARACTERS

    def forget(self) -> None:
        self._record = None

    def spill(self) -> str:
        """Everything since `record`, which ends; nothing if there is no record."""
        text = "".join(self._record or ())
        self._record = None
        return text

    @property
    def ahead(self) -> str:
        """The next character if it is there: cheaper than `peek`, which waits for it."""
        return "" if self._is_full else self._text[self._place : self._place + 1]

    def peek(self) -> Reading[str]:
        """The next character; empty where the text ends."""
        while not self._is_full and self._place == len(self._text):
            if self._ended:
                return ""
            yield
        return "" if self._is_full else self._text[self._place]

    def take(self, num_characters: int = 1) -> str:
        """Characters that were seen to be there."""
        piece = self._text[self._place : self._place + num_characters]
        assert len(piece) == num_characters
        self._place += num_characters
        if self._record is not None:
            self._record.append(piece)
            self._room -= num_characters
        return piece

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """As much as is there and matches, perhaps nothing. Whoever reads on must read the rest to the same end."""
        end = len(self._text) if self._record is None else min(len(self._text), self._place + self._room)
        match = pattern.match(self._text, self._place, end)
        return "" if match is None else self.take(match.end() - match.start())

    def take_all(self) -> str:
        return self.take(len(self._text) - self._place)

    def take_before(self, markers: Markers) -> str:
        """What is there and certainly lies before the next marker."""
        match = markers.pattern.search(self._text, self._place)
        if match is not None:
            num_sure = match.start() - self._place
        else:
            num_unsure = 0 if self._ended else markers.num_unsure(self._text, self._place)
            num_sure = len(self._text) - self._place - num_unsure
        return self.take(num_sure if self._record is None else min(num_sure, self._room))

    def which(self, markers: Markers) -> str:
        """The marker that stands here complete; empty if none does."""
        match = markers.pattern.match(self._text, self._place)
        return "" if match is None else match[0]

    def accept(self, string: str) -> Reading[bool]:
        """Takes a string if it comes next."""
        while True:
            ahead = self._text[self._place : self._place + len(string)]
            if ahead == string:
                break
            if self._ended or not string.startswith(ahead):
                return False
            yield
        if self._record is not None and self._room < len(string):
            return False
        self.take(len(string))
        return True

    def accept_cut(self, string: str) -> bool:
        """Takes what is left if it is the beginning of a string that the end of the text cut off."""
        rest = self._text[self._place :]
        if not self._ended or not rest or not string.startswith(rest):
            return False
        self.take_all()
        return True

    def skip_space(self) -> Reading[str]:
        """Takes JSON's white space, and says what comes after it."""
        while True:
            letter = self.ahead or (yield from self.peek())
            if letter not in (" ", "\n", "\t", "\r"):
                return letter
            self.take_run(SPACE)

    @property
    def _is_full(self) -> bool:
        return self._record is not None and self._room <= 0

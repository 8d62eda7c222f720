"""Stream reader: incremental text behind the interface of a complete one. Does not depend on its meaning.

A parser is a generator (`Reading`) that yields when it needs more text. It is written as if the whole text were there,
and cannot see where the text was split. A parser that reads ahead on a guess sets a mark first; `take_marked` returns
the text since then. Marked text is bounded: at MAX_MARKED_CHARACTERS the reader behaves as at the end of the text.
"""

import re
from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
Reading = Generator[None, None, Result]

MAX_MARKED_CHARACTERS = 1 << 18  # of a call whose function is not certain yet; arbitrary, far above real calls
SPACE = re.compile(r"[ \t\r\n]+")  # JSON's


class Markers:
    """Strings to search for. None contains another, so the first match is unambiguous."""

    __slots__ = ("_max_prefix", "_prefixes", "pattern", "strings")

    def __init__(self, *strings: str) -> None:
        assert all(strings)
        assert not any(one in other for one in strings for other in strings if one != other), strings
        self.strings = strings
        self.pattern = re.compile("|".join(re.escape(string) for string in strings))
        self._prefixes = {string[:length] for string in strings for length in range(1, len(string))}
        self._max_prefix = max(len(string) for string in strings) - 1

    def num_partial(self, text: str, start: int) -> int:
        """Number of last characters that may be the prefix of a marker."""
        for length in range(min(self._max_prefix, len(text) - start), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0


class StreamReader:
    """The output text of one sequence and a read position."""

    __slots__ = ("_ended", "_marked", "_num_markable", "_place", "_text")

    def __init__(self) -> None:
        self._text = ""
        self._place = 0
        self._ended = False
        self._marked: list[str] | None = None
        self._num_markable = 0

    def feed(self, text: str) -> None:
        assert not self._ended, "text after the end"
        self._text = self._text[self._place :] + text
        self._place = 0

    def end(self) -> None:
        self._ended = True

    @property
    def at_end(self) -> bool:
        """All text was fed and taken."""
        return self._ended and self._place == len(self._text)

    def mark(self) -> None:
        """Remember the text taken from here on."""
        assert self._marked is None
        self._marked = []
        self._num_markable = MAX_MARKED_CHARACTERS

    def drop_mark(self) -> None:
        self._marked = None

    def take_marked(self) -> str:
        """The text since `mark`, and drops the mark; empty without one."""
        text = "".join(self._marked or ())
        self._marked = None
        return text

    @property
    def next_char(self) -> str:
        """The next character, or empty if it has not arrived. Cheaper than `peek`, which waits."""
        return "" if self._is_full else self._text[self._place : self._place + 1]

    def peek(self) -> Reading[str]:
        """The next character; empty at the end of the text."""
        while not self._is_full and self._place == len(self._text):
            if self._ended:
                return ""
            yield
        return "" if self._is_full else self._text[self._place]

    def take(self, num_characters: int = 1) -> str:
        """The next characters, which must have arrived."""
        text = self._text[self._place : self._place + num_characters]
        assert len(text) == num_characters
        self._place += num_characters
        if self._marked is not None:
            self._marked.append(text)
            self._num_markable -= num_characters
        return text

    def take_match(self, pattern: re.Pattern[str]) -> str:
        """The longest match in the arrived text, perhaps empty. The caller must accept a match cut anywhere."""
        end = len(self._text) if self._marked is None else min(len(self._text), self._place + self._num_markable)
        match = pattern.match(self._text, self._place, end)
        return "" if match is None else self.take(match.end() - match.start())

    def take_all(self) -> str:
        return self.take(len(self._text) - self._place)

    def take_before(self, markers: Markers) -> str:
        """The text that has arrived and is certainly before the next marker."""
        match = markers.pattern.search(self._text, self._place)
        if match is not None:
            num_sure = match.start() - self._place
        else:
            num_partial = 0 if self._ended else markers.num_partial(self._text, self._place)
            num_sure = len(self._text) - self._place - num_partial
        return self.take(num_sure if self._marked is None else min(num_sure, self._num_markable))

    def marker_here(self, markers: Markers) -> str:
        """The complete marker at this position; empty if there is none."""
        match = markers.pattern.match(self._text, self._place)
        return "" if match is None else match[0]

    def accept(self, string: str) -> Reading[bool]:
        """Takes a string if it is next."""
        while True:
            arrived = self._text[self._place : self._place + len(string)]
            if arrived == string:
                break
            if self._ended or not string.startswith(arrived):
                return False
            yield
        if self._marked is not None and self._num_markable < len(string):
            return False
        self.take(len(string))
        return True

    def accept_truncated(self, string: str) -> bool:
        """Takes the rest of the text if it is a prefix of the string, truncated by the end of the output."""
        rest = self._text[self._place :]
        if not self._ended or not rest or not string.startswith(rest):
            return False
        self.take_all()
        return True

    def skip_space(self) -> Reading[str]:
        """Takes JSON white space. Returns the next character."""
        while True:
            char = self.next_char or (yield from self.peek())
            if char not in (" ", "\n", "\t", "\r"):
                return char
            self.take_match(SPACE)

    @property
    def _is_full(self) -> bool:
        return self._marked is not None and self._num_markable <= 0

"""One answer as a row of pieces: thoughts, texts and calls, each whole before the next begins. Knows no API.

Chat completions tell them side by side; the surfaces that list them in order are written from here.
"""

import uuid
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from quire.output_parsing.events import OutputEvent, PlainText, ReasoningText, ToolArguments, ToolStart


class OutputItemKind(Enum):
    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


class OutputItem:
    """One of them, as far as it has been said."""

    __slots__ = ("_texts", "cut", "key", "kind", "name", "place")

    def __init__(self, kind: OutputItemKind, place: int, name: str = "") -> None:
        self.kind = kind
        self.place = place  # in the answer
        self.name = name  # of the tool that is called
        self.key = uuid.uuid4().hex  # what its ids are made of
        self.cut = False  # the answer's length ended it
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        self._texts.append(text)

    @property
    def text(self) -> str:
        """Of a call: its arguments, as JSON."""
        return "".join(self._texts)


class ItemOpened(NamedTuple):
    piece: OutputItem


class ItemDelta(NamedTuple):
    piece: OutputItem
    text: str


class ItemClosed(NamedTuple):
    piece: OutputItem


Step = ItemOpened | ItemDelta | ItemClosed


class OutputItems:
    """The pieces of one answer, and what happens to them."""

    __slots__ = ("_num_closed", "pieces")

    def __init__(self) -> None:
        self.pieces: list[OutputItem] = []
        self._num_closed = 0

    def hear(self, events: Iterable[OutputEvent]) -> list[Step]:
        steps: list[Step] = []
        for event in events:
            match event:
                case PlainText(text):
                    self._say(OutputItemKind.TEXT, text, steps)
                case ReasoningText(text):
                    self._say(OutputItemKind.THOUGHT, text, steps)
                case ToolStart(_, name):
                    self._open(OutputItemKind.CALL, name, steps)
                case ToolArguments(_, text):
                    assert self._is_open(OutputItemKind.CALL), "arguments outside of a call"
                    self._say(OutputItemKind.CALL, text, steps)
        return steps

    def end(self, *, cut: bool) -> list[Step]:
        """Nothing more comes. An answer without a word is an empty text."""
        steps: list[Step] = []
        if not self.pieces:
            self._open(OutputItemKind.TEXT, "", steps)
        self.pieces[-1].cut = cut
        self._close(steps)
        return steps

    def _say(self, kind: OutputItemKind, text: str, steps: list[Step]) -> None:
        if not text:
            return
        if not self._is_open(kind):
            self._open(kind, "", steps)
        self.pieces[-1].add(text)
        steps.append(ItemDelta(self.pieces[-1], text))

    def _is_open(self, kind: OutputItemKind) -> bool:
        return len(self.pieces) > self._num_closed and self.pieces[-1].kind is kind

    def _open(self, kind: OutputItemKind, name: str, steps: list[Step]) -> None:
        self._close(steps)
        self.pieces.append(OutputItem(kind, len(self.pieces), name))
        steps.append(ItemOpened(self.pieces[-1]))

    def _close(self, steps: list[Step]) -> None:
        if len(self.pieces) > self._num_closed:
            steps.append(ItemClosed(self.pieces[-1]))
            self._num_closed = len(self.pieces)

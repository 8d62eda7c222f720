"""One answer as a row of pieces: thoughts, texts and calls, each whole before the next begins. Knows no API.

Chat completions tell them side by side; the surfaces that list them in order are written from here.
"""

import uuid
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from quire.speech.events import SpeechEvent, Text, Thought, ToolArguments, ToolStart


class PieceKind(Enum):
    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


class Piece:
    """One of them, as far as it has been said."""

    __slots__ = ("_texts", "cut", "key", "kind", "name", "place")

    def __init__(self, kind: PieceKind, place: int, name: str = "") -> None:
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


class Opened(NamedTuple):
    piece: Piece


class Grown(NamedTuple):
    piece: Piece
    text: str


class Closed(NamedTuple):
    piece: Piece


Step = Opened | Grown | Closed


class Turn:
    """The pieces of one answer, and what happens to them."""

    __slots__ = ("_num_closed", "pieces")

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._num_closed = 0

    def hear(self, events: Iterable[SpeechEvent]) -> list[Step]:
        steps: list[Step] = []
        for event in events:
            match event:
                case Text(text):
                    self._say(PieceKind.TEXT, text, steps)
                case Thought(text):
                    self._say(PieceKind.THOUGHT, text, steps)
                case ToolStart(_, name):
                    self._open(PieceKind.CALL, name, steps)
                case ToolArguments(_, text):
                    assert self._is_open(PieceKind.CALL), "arguments outside of a call"
                    self._say(PieceKind.CALL, text, steps)
        return steps

    def end(self, *, cut: bool) -> list[Step]:
        """Nothing more comes. An answer without a word is an empty text."""
        steps: list[Step] = []
        if not self.pieces:
            self._open(PieceKind.TEXT, "", steps)
        self.pieces[-1].cut = cut
        self._close(steps)
        return steps

    def _say(self, kind: PieceKind, text: str, steps: list[Step]) -> None:
        if not text:
            return
        if not self._is_open(kind):
            self._open(kind, "", steps)
        self.pieces[-1].add(text)
        steps.append(Grown(self.pieces[-1], text))

    def _is_open(self, kind: PieceKind) -> bool:
        return len(self.pieces) > self._num_closed and self.pieces[-1].kind is kind

    def _open(self, kind: PieceKind, name: str, steps: list[Step]) -> None:
        self._close(steps)
        self.pieces.append(Piece(kind, len(self.pieces), name))
        steps.append(Opened(self.pieces[-1]))

    def _close(self, steps: list[Step]) -> None:
        if len(self.pieces) > self._num_closed:
            steps.append(Closed(self.pieces[-1]))
            self._num_closed = len(self.pieces)

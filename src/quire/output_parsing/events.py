"""What a continuation says, piece by piece. Knows nothing of the ways in which models write it."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PlainText:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """The call with this index begins: its function is certain. Ids are the server's to give."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of the JSON text of a call's arguments; joined, the pieces are the whole text."""

    index: int
    text: str


SpeechEvent = PlainText | ReasoningText | ToolStart | ToolArguments


class OutputParser(Protocol):
    """Hears the text of one continuation in pieces, cut anywhere."""

    def push(self, text: str) -> list[SpeechEvent]:
        """What is certain after some more text."""
        ...

    def finish(self) -> list[SpeechEvent]:
        """No more text comes: whatever was held back is told."""
        ...


def merged(events: Iterable[SpeechEvent]) -> list[SpeechEvent]:
    """The same speech in as few events as can be: neighbours that continue each other become one."""
    whole: list[SpeechEvent] = []
    for (kind, index), group in groupby(events, key=_thread):
        if kind is ToolStart:
            whole += group
            continue
        text = "".join(event.text for event in group if not isinstance(event, ToolStart))
        if text and kind is ToolArguments:
            whole.append(ToolArguments(index, text))
        elif text:
            whole.append(PlainText(text) if kind is PlainText else ReasoningText(text))
    return whole


def _thread(event: SpeechEvent) -> tuple[type, int]:
    return type(event), event.index if isinstance(event, ToolStart | ToolArguments) else -1

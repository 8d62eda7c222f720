"""Output events: text, reasoning and tool calls of one generated sequence. Does not depend on tool formats."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Reasoning that precedes the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """Tool call `index` starts: its function name is certain. The server assigns call ids."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A fragment of the arguments' JSON text. The fragments of a call concatenate to the whole text."""

    index: int
    text: str


OutputEvent = PlainText | ReasoningText | ToolStart | ToolArguments


class OutputParser(Protocol):
    """Incremental parser of one sequence. Where the text is split does not change the merged events."""

    def push(self, text: str) -> list[OutputEvent]:
        """The events that are certain after this text."""
        ...

    def finish(self) -> list[OutputEvent]:
        """End of output: the events held back so far."""
        ...


def merge_events(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """The same output in the fewest events: neighbours of one kind and call are joined."""
    merged: list[OutputEvent] = []

    def kind_and_call(event: OutputEvent) -> tuple[type, int]:
        return type(event), event.index if isinstance(event, ToolStart | ToolArguments) else -1

    for (kind, index), group in groupby(events, key=kind_and_call):
        if kind is ToolStart:
            merged += group
            continue
        text = "".join(event.text for event in group if not isinstance(event, ToolStart))
        if text and kind is ToolArguments:
            merged.append(ToolArguments(index, text))
        elif text:
            merged.append(PlainText(text) if kind is PlainText else ReasoningText(text))
    return merged

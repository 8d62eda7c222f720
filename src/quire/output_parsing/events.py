"""Output events: text, reasoning and tool calls of one generated sequence; and what parsers emit them with.

Does not depend on tool formats.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from quire.output_parsing.reader import Markers, Reading, StreamReader


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
Schemas = Mapping[str, Mapping[str, object]]  # function name -> JSON schema of its parameters


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


class TrailingSpace:
    """Holds back trailing white space until more text follows: before a call or a tag it is dropped."""

    __slots__ = ("_space",)

    def __init__(self) -> None:
        self._space: list[str] = []

    def push(self, text: str) -> str:
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return ""
        released = "".join((*self._space, body))
        self._space = [text[len(body) :]]
        return released

    def drop(self) -> None:
        self._space.clear()

    def finish(self) -> str:
        space = "".join(self._space)
        self._space.clear()
        return space


class EventEmitter:
    """Collects events. White space between a text and a call, or after a call, is dropped."""

    __slots__ = ("_after_call", "_events", "_num_calls", "_trailing", "schemas")

    def __init__(self, schemas: Schemas) -> None:
        self.schemas = schemas
        self._events: list[OutputEvent] = []
        self._num_calls = 0
        self._trailing = TrailingSpace()
        self._after_call = False

    def emit_text(self, text: str) -> None:
        released = self._trailing.push(text)
        if released:
            self._events.append(PlainText(released))
            self._after_call = False

    def start_call(self, name: str) -> None:
        """Starts the next call. Arguments emitted from here on belong to it."""
        self._trailing.drop()
        self._events.append(ToolStart(self._num_calls, name))
        self._num_calls += 1
        self._after_call = True

    def emit_arguments(self, text: str) -> None:
        assert self._num_calls > 0
        if text:
            self._events.append(ToolArguments(self._num_calls - 1, text))

    def drain(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return merge_events(events) if len(events) > 1 else events  # mostly one; this runs for every token

    def finish(self) -> list[OutputEvent]:
        space = self._trailing.finish()
        if space and not self._after_call:
            self._events.append(PlainText(space))
        return self.drain()


def emit_text_until(reader: StreamReader, emitter: EventEmitter, markers: Markers) -> Reading[str]:
    """Emits everything up to the next marker as text. Returns that marker; empty at the end of the output."""
    while True:
        emitter.emit_text(reader.take_before(markers))
        marker = reader.marker_here(markers)
        if marker or reader.at_end:
            return marker
        yield


def skip_call_end(reader: StreamReader, emitter: EventEmitter, *ends: str) -> Reading[None]:
    """Skips the closing strings of a call. Each may be missing, or truncated by the end of the output."""
    for end in ends:
        reader.mark()
        yield from reader.skip_space()
        if (yield from reader.accept(end)) or reader.accept_truncated(end):
            reader.drop_mark()
        else:
            emitter.emit_text(reader.take_marked())

"""What was understood so far, as events. Knows nothing of where it was read."""

from collections.abc import Mapping

from quire.output_parsing.events import PlainText, SpeechEvent, ToolArguments, ToolStart, merged
from quire.output_parsing.reader import Markers, Reading, StreamReader

Schemas = Mapping[str, Mapping[str, object]]  # the parameters of each function, as JSON schema


class TrailingSpace:
    """Keeps back white space at the end of a text that may turn out not to belong to it."""

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
    """Collects events. White space between a text and a call, or after a call, belongs to neither."""

    __slots__ = ("_after_call", "_events", "_num_calls", "_trailing", "schemas")

    def __init__(self, schemas: Schemas) -> None:
        self.schemas = schemas
        self._events: list[SpeechEvent] = []
        self._num_calls = 0
        self._trailing = TrailingSpace()
        self._after_call = False

    def say(self, text: str) -> None:
        released = self._trailing.push(text)
        if released:
            self._events.append(PlainText(released))
            self._after_call = False

    def call(self, name: str) -> None:
        """The next call begins; what is argued from here on are its arguments."""
        self._trailing.drop()
        self._events.append(ToolStart(self._num_calls, name))
        self._num_calls += 1
        self._after_call = True

    def argue(self, text: str) -> None:
        assert self._num_calls > 0
        if text:
            self._events.append(ToolArguments(self._num_calls - 1, text))

    def drain(self) -> list[SpeechEvent]:
        events, self._events = self._events, []
        return merged(events) if len(events) > 1 else events  # mostly one, and this runs for every token

    def finish(self) -> list[SpeechEvent]:
        space = self._trailing.finish()
        if space and not self._after_call:
            self._events.append(PlainText(space))
        return self.drain()


def say_until(tape: StreamReader, voice: EventEmitter, markers: Markers) -> Reading[str]:
    """Everything up to a marker is text. The marker that stands next; empty where the text ends."""
    while True:
        voice.say(tape.take_before(markers))
        marker = tape.which(markers)
        if marker or tape.is_dry:
            return marker
        yield


def close(tape: StreamReader, voice: EventEmitter, *ends: str) -> Reading[None]:
    """Passes over the end of a call, if it is there: several strings that may each be missing, or cut off."""
    for end in ends:
        tape.record()
        yield from tape.skip_space()
        if (yield from tape.accept(end)) or tape.accept_cut(end):
            tape.forget()
        else:
            voice.say(tape.spill())

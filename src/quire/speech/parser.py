"""Puts a parser together from a manner of speaking. Knows nothing of the single formats."""

from collections.abc import Callable

from quire.speech.detect import Manner
from quire.speech.events import SpeechEvent, SpeechParser, Text
from quire.speech.formats import GENERIC
from quire.speech.reasoning import ThoughtSplitter
from quire.speech.tape import Reading, Tape
from quire.speech.voice import Schemas, Voice


class CallParser:
    """Runs the reader of one tool format over text as it comes."""

    __slots__ = ("_reading", "_tape", "_voice")

    def __init__(self, read: Callable[[Tape, Voice], Reading[None]], schemas: Schemas) -> None:
        self._tape = Tape()
        self._voice = Voice(schemas)
        self._reading = read(self._tape, self._voice)

    def push(self, text: str) -> list[SpeechEvent]:
        self._tape.feed(text)
        next(self._reading, None)
        return self._voice.drain()

    def finish(self) -> list[SpeechEvent]:
        self._tape.end()
        next(self._reading, None)
        assert self._tape.is_dry, "a reader leaves nothing behind"
        return self._voice.finish()


class PlainParser:
    """All of it is text."""

    __slots__ = ()

    def push(self, text: str) -> list[SpeechEvent]:
        return [Text(text)] if text else []

    def finish(self) -> list[SpeechEvent]:
        return []


def make_parser(
    manner: Manner, *, tools: bool, reasoning: bool, forced_thought: bool = False, schemas: Schemas | None = None
) -> SpeechParser:
    """A parser for one continuation.

    `tools` and `reasoning` say whether to look for calls and thoughts; `forced_thought`, that the prompt ends inside a
    thought (`ReasoningTags.is_open_after`); `schemas`, what the functions' arguments may be, by name.
    """
    answer: SpeechParser = CallParser((manner.tools or GENERIC).read, schemas or {}) if tools else PlainParser()
    if reasoning and manner.reasoning is not None:
        return ThoughtSplitter(manner.reasoning, answer, forced=forced_thought)
    return answer

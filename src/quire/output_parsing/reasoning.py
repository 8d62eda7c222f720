"""Parts thoughts from the answer. Thoughts stand first, between tags; they are never searched for calls."""

from dataclasses import dataclass

from quire.core.errors import ConfigError, shown
from quire.output_parsing.emitter import TrailingSpace
from quire.output_parsing.events import OutputParser, ReasoningText, SpeechEvent
from quire.output_parsing.reader import Markers, Reading, StreamReader


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """Between what a model writes its thoughts."""

    name: str
    start: str
    end: str
    needs_special_tokens: bool = False  # the tags are special tokens, which detokenizing must not skip

    def is_open_after(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside a thought, so that the answer shows only the end tag."""
        return prompt.rstrip().endswith(self.start)

    def is_closed_after(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with a thought that is over: the model is not to think."""
        return prompt.rstrip().endswith(self.end)


THINK = ReasoningTags("think", "<think>", "</think>")
MISTRAL_THINK = ReasoningTags("mistral", "[THINK]", "[/THINK]", needs_special_tokens=True)
REASONING_TAGS = {tags.name: tags for tags in (THINK, MISTRAL_THINK)}


def tags_by_name(name: str) -> ReasoningTags:
    """The tags that an operator named."""
    if name not in REASONING_TAGS:
        known = ", ".join(sorted(REASONING_TAGS))
        raise ConfigError(f"There are no reasoning tags {shown(name)}; choose one of {known}.")
    return REASONING_TAGS[name]


class ReasoningSplitter:
    """Tells thoughts, and passes the answer on to a parser that knows nothing of them.

    White space beside the tags belongs to neither side: line breaks after a tag, any at the end of a thought.
    """

    __slots__ = ("_answer", "_events", "_reading", "_tags", "_tape", "_trailing")

    def __init__(self, tags: ReasoningTags, answer: OutputParser, *, forced: bool) -> None:
        self._tags = tags
        self._answer = answer
        self._events: list[SpeechEvent] = []
        self._tape = StreamReader()
        self._trailing = TrailingSpace()
        self._reading = self._read(forced)

    def push(self, text: str) -> list[SpeechEvent]:
        self._tape.feed(text)
        next(self._reading, None)
        return self._drain()

    def finish(self) -> list[SpeechEvent]:
        self._tape.end()
        next(self._reading, None)
        self._events += self._answer.finish()
        return self._drain()

    def _read(self, forced: bool) -> Reading[None]:
        self._tape.record()
        yield from self._tape.skip_space()
        if (yield from self._tape.accept(self._tags.start)):
            self._tape.forget()
            yield from self._skip_line_breaks()
            yield from self._read_thought("")
        elif forced:
            yield from self._read_thought(self._tape.spill().lstrip("\n"))
        else:
            self._events += self._answer.push(self._tape.spill())
        while True:
            self._events += self._answer.push(self._tape.take_all())
            if self._tape.is_dry:
                return
            yield

    def _read_thought(self, beginning: str) -> Reading[None]:
        markers = Markers(self._tags.end)
        self._think(beginning)
        while not self._tape.which(markers):
            self._think(self._tape.take_before(markers))
            if self._tape.is_dry:
                self._events.append(ReasoningText(self._trailing.finish()))
                return
            if not self._tape.which(markers):
                yield
        self._tape.take(len(self._tags.end))  # what the trailing still holds back is never told
        yield from self._skip_line_breaks()

    def _skip_line_breaks(self) -> Reading[None]:
        while (yield from self._tape.peek()) == "\n":
            self._tape.take()

    def _think(self, text: str) -> None:
        self._events.append(ReasoningText(self._trailing.push(text)))

    def _drain(self) -> list[SpeechEvent]:
        events = [event for event in self._events if not isinstance(event, ReasoningText) or event.text]
        self._events.clear()
        return events

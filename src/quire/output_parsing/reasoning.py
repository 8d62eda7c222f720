"""Reasoning splitter: separates reasoning from the answer. Reasoning comes first, between tags, and is not searched
for tool calls."""

from dataclasses import dataclass

from quire.core.errors import ConfigError, shown
from quire.output_parsing.events import OutputEvent, OutputParser, ReasoningText, TrailingSpace
from quire.output_parsing.reader import Markers, Reading, StreamReader


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags around a model's reasoning."""

    name: str
    start: str
    end: str

    def is_open_after(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside reasoning: the output then has the end tag only."""
        return prompt.rstrip().endswith(self.start)

    def is_closed_after(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with closed reasoning: the model must not reason."""
        return prompt.rstrip().endswith(self.end)


THINK = ReasoningTags("think", "<think>", "</think>")
MISTRAL_THINK = ReasoningTags("mistral", "[THINK]", "[/THINK]")
_THINKING_PARSERS = {"deepseek_r1", "qwen3", "qwen3_thinking", "glm45"}  # of vLLM and SGLang, for <think>
REASONING_TAGS = {tags.name: tags for tags in (THINK, MISTRAL_THINK)}


def tags_by_name(name: str) -> ReasoningTags:
    """The tags of `--reasoning-parser`."""
    if name not in REASONING_TAGS:
        known = ", ".join(sorted(REASONING_TAGS))
        hint = f" The tags of {name} are {THINK.name} here." if name.replace("-", "_") in _THINKING_PARSERS else ""
        raise ConfigError(f"There are no reasoning tags {shown(name)}; choose one of {known}.{hint}")
    return REASONING_TAGS[name]


class ReasoningSplitter:
    """Emits reasoning and passes the answer to another parser, which sees no tags.

    White space beside the tags is dropped: line breaks after a tag, any white space before the end tag.
    """

    __slots__ = ("_answer_parser", "_events", "_reader", "_reading", "_tags", "_trailing")

    def __init__(self, tags: ReasoningTags, answer_parser: OutputParser, *, starts_in_reasoning: bool) -> None:
        self._tags = tags
        self._answer_parser = answer_parser
        self._events: list[OutputEvent] = []
        self._reader = StreamReader()
        self._trailing = TrailingSpace()
        self._reading = self._read(starts_in_reasoning)

    def push(self, text: str) -> list[OutputEvent]:
        self._reader.feed(text)
        next(self._reading, None)
        return self._drain()

    def finish(self) -> list[OutputEvent]:
        self._reader.end()
        next(self._reading, None)
        self._events += self._answer_parser.finish()
        return self._drain()

    def _read(self, starts_in_reasoning: bool) -> Reading[None]:
        self._reader.mark()
        yield from self._reader.skip_space()
        if (yield from self._reader.accept(self._tags.start)):
            self._reader.drop_mark()
            yield from self._skip_line_breaks()
            yield from self._read_reasoning("")
        elif starts_in_reasoning:
            yield from self._read_reasoning(self._reader.take_marked().lstrip("\n"))
        else:
            self._events += self._answer_parser.push(self._reader.take_marked())
        while True:
            self._events += self._answer_parser.push(self._reader.take_all())
            if self._reader.at_end:
                return
            yield

    def _read_reasoning(self, beginning: str) -> Reading[None]:
        markers = Markers(self._tags.end)
        self._emit(beginning)
        while not self._reader.marker_here(markers):
            self._emit(self._reader.take_before(markers))
            if self._reader.at_end:
                self._events.append(ReasoningText(self._trailing.finish()))
                return
            if not self._reader.marker_here(markers):
                yield
        self._reader.take(len(self._tags.end))  # white space still held back is dropped
        yield from self._skip_line_breaks()

    def _skip_line_breaks(self) -> Reading[None]:
        while (yield from self._reader.peek()) == "\n":
            self._reader.take()

    def _emit(self, text: str) -> None:
        self._events.append(ReasoningText(self._trailing.push(text)))

    def _drain(self) -> list[OutputEvent]:
        events = [event for event in self._events if not isinstance(event, ReasoningText) or event.text]
        self._events.clear()
        return events

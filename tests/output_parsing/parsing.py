"""A parser's ear for the tests: text cut in pieces, heard to the end."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from quire.output_parsing.emitter import Schemas
from quire.output_parsing.events import PlainText, ReasoningText, SpeechEvent, ToolArguments, ToolStart, merged
from quire.output_parsing.parser import DetectedFormat, make_parser
from quire.output_parsing.reasoning import ReasoningTags
from quire.output_parsing.tool_formats import ToolFormat


def pieces_of(text: str, cuts: Iterable[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


def hear(
    tool_format: ToolFormat | None,
    pieces: Sequence[str],
    *,
    tags: ReasoningTags | None = None,
    forced_thought: bool = False,
    schemas: Schemas | None = None,
) -> list[SpeechEvent]:
    parser = make_parser(
        DetectedFormat(tool_format, tags),
        tools=tool_format is not None,
        reasoning=tags is not None,
        forced_thought=forced_thought,
        schemas=schemas,
    )
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged([*events, *parser.finish()])


def calls(*named: tuple[str, str]) -> list[SpeechEvent]:
    """The events of calls with these names and arguments."""
    return [
        event
        for index, (name, arguments) in enumerate(named)
        for event in (ToolStart(index, name), ToolArguments(index, arguments))
    ]


def text_of(events: Iterable[SpeechEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, PlainText))


def thought_of(events: Iterable[SpeechEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ReasoningText))


def has_call(events: Iterable[SpeechEvent]) -> bool:
    return any(isinstance(event, ToolStart) for event in events)

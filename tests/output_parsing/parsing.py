"""Helpers of the parser tests: split a text, parse the parts, and read the merged events."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from quire.output_parsing.events import (
    OutputEvent,
    PlainText,
    ReasoningText,
    Schemas,
    ToolArguments,
    ToolStart,
    merge_events,
)
from quire.output_parsing.parser import DetectedFormat, make_parser
from quire.output_parsing.reasoning import ReasoningTags
from quire.output_parsing.tool_formats import ToolFormat


def split_at(text: str, cuts: Iterable[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


def parse(
    tool_format: ToolFormat | None,
    parts: Sequence[str],
    *,
    tags: ReasoningTags | None = None,
    starts_in_reasoning: bool = False,
    schemas: Schemas | None = None,
) -> list[OutputEvent]:
    parser = make_parser(
        DetectedFormat(tool_format, tags),
        tools=tool_format is not None,
        reasoning=tags is not None,
        starts_in_reasoning=starts_in_reasoning,
        schemas=schemas,
    )
    events = [event for part in parts for event in parser.push(part)]
    return merge_events([*events, *parser.finish()])


def calls(*named: tuple[str, str]) -> list[OutputEvent]:
    """The events of calls with these names and arguments."""
    return [
        event
        for index, (name, arguments) in enumerate(named)
        for event in (ToolStart(index, name), ToolArguments(index, arguments))
    ]


def text_of(events: Iterable[OutputEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, PlainText))


def reasoning_of(events: Iterable[OutputEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ReasoningText))


def has_call(events: Iterable[OutputEvent]) -> bool:
    return any(isinstance(event, ToolStart) for event in events)

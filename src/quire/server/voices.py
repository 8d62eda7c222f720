"""How a model speaks: the events that its text is made of, and the seam to whoever knows a model's format.

A voice makes one parser for each continuation. The plain voice has no thoughts and no tools: all is text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.core.errors import InvalidParameter
from quire.core.grammar import Grammar

Tool = Mapping[str, object]


class Text(NamedTuple):
    """A piece of the answer."""

    text: str


class Thought(NamedTuple):
    """A piece of what comes before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A call of a tool begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


SpeechEvent = Text | Thought | ToolStart | ToolArguments


class SpeechParser(Protocol):
    """The events of one continuation."""

    def push(self, text: str) -> list[SpeechEvent]: ...

    def finish(self) -> list[SpeechEvent]: ...  # no more text comes: what was held back


class ToolChoice(NamedTuple):
    """Whether a tool must be called ("required"), may be ("auto") or not ("none"), or which one ("named")."""

    mode: str = "auto"
    name: str | None = None


class Voice(Protocol):
    """What the server must know of a model's format."""

    def parser(self, *, tools: Sequence[Tool], prompt: str) -> SpeechParser:
        """For one continuation of this prompt, which may end in the middle of a thought and may call these tools."""
        ...

    def tool_grammar(self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool, prompt: str) -> Grammar:
        """What a continuation that must call a tool may say."""
        ...


class PlainParser:
    """All is text."""

    __slots__ = ()

    def push(self, text: str) -> list[SpeechEvent]:
        return [Text(text)] if text else []

    def finish(self) -> list[SpeechEvent]:
        return []


class PlainVoice:
    """A model of which nothing is known."""

    __slots__ = ()

    def parser(self, *, tools: Sequence[Tool], prompt: str) -> SpeechParser:
        return PlainParser()

    def tool_grammar(self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool, prompt: str) -> Grammar:
        raise InvalidParameter(
            "This model's chat template has no format for tool calls that is known here, so none can be required; "
            'use tool_choice: "auto" or "none".',
            param="tool_choice",
        )


PLAIN = PlainVoice()

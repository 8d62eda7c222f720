"""Output items: one choice as an ordered list of reasoning, text and tool calls. Does not depend on an API.

Each item is complete before the next one opens. Chat completions stream the kinds side by side; the Responses and
Messages APIs list them in order and are written from these items.
"""

import uuid
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from quire.output_parsing.events import OutputEvent, PlainText, ReasoningText, ToolArguments, ToolStart


class OutputItemKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    TOOL_CALL = "tool_call"


class OutputItem:
    """One item and its text so far."""

    __slots__ = ("_texts", "index", "key", "kind", "name", "truncated")

    def __init__(self, kind: OutputItemKind, index: int, name: str = "") -> None:
        self.kind = kind
        self.index = index  # in the output
        self.name = name  # of the called tool
        self.key = uuid.uuid4().hex  # the API's ids are made from it
        self.truncated = False  # the output ended by length
        self._texts: list[str] = []

    def append(self, text: str) -> None:
        self._texts.append(text)

    @property
    def text(self) -> str:
        """The text; of a tool call, its arguments as JSON."""
        return "".join(self._texts)


class ItemOpened(NamedTuple):
    item: OutputItem


class ItemDelta(NamedTuple):
    item: OutputItem
    text: str


class ItemClosed(NamedTuple):
    item: OutputItem


ItemEvent = ItemOpened | ItemDelta | ItemClosed


class OutputItems:
    """The items of one choice. Turns parser events into item events."""

    __slots__ = ("_num_closed", "items")

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._num_closed = 0

    def add(self, events: Iterable[OutputEvent]) -> list[ItemEvent]:
        item_events: list[ItemEvent] = []
        for event in events:
            match event:
                case PlainText(text):
                    self._append(OutputItemKind.TEXT, text, item_events)
                case ReasoningText(text):
                    self._append(OutputItemKind.REASONING, text, item_events)
                case ToolStart(_, name):
                    self._open(OutputItemKind.TOOL_CALL, name, item_events)
                case ToolArguments(_, text):
                    assert self._is_open(OutputItemKind.TOOL_CALL), "arguments outside of a call"
                    self._append(OutputItemKind.TOOL_CALL, text, item_events)
        return item_events

    def finish(self, *, truncated: bool) -> list[ItemEvent]:
        """Closes the last item. Empty output is one empty text item."""
        item_events: list[ItemEvent] = []
        if not self.items:
            self._open(OutputItemKind.TEXT, "", item_events)
        self.items[-1].truncated = truncated
        self._close(item_events)
        return item_events

    def _append(self, kind: OutputItemKind, text: str, item_events: list[ItemEvent]) -> None:
        if not text:
            return
        if not self._is_open(kind):
            self._open(kind, "", item_events)
        self.items[-1].append(text)
        item_events.append(ItemDelta(self.items[-1], text))

    def _is_open(self, kind: OutputItemKind) -> bool:
        return len(self.items) > self._num_closed and self.items[-1].kind is kind

    def _open(self, kind: OutputItemKind, name: str, item_events: list[ItemEvent]) -> None:
        self._close(item_events)
        self.items.append(OutputItem(kind, len(self.items), name))
        item_events.append(ItemOpened(self.items[-1]))

    def _close(self, item_events: list[ItemEvent]) -> None:
        if len(self.items) > self._num_closed:
            item_events.append(ItemClosed(self.items[-1]))
            self._num_closed = len(self.items)

"""Writes the chunks of one streamed answer: what never changes is encoded once, a piece of text alone each time."""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Label:
    """What all bodies of one answer share."""

    model: str
    prefix: str  # of its id: chatcmpl or cmpl
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, object]:
        return {"id": f"{self.prefix}-{self.key}", "object": kind, "created": self.created, "model": self.model}


class Frames:
    """`before` and `after` are what a choice says around its text, as JSON."""

    __slots__ = ("_after", "_before", "_head", "_heads")

    def __init__(self, head: Mapping[str, object], before: bytes, after: bytes) -> None:
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._before = before
        self._after = after + b"]}\n\n"
        self._heads: dict[int, bytes] = {}

    def text(self, index: int, text: str) -> bytes:
        """The usual chunk, as cheaply as it goes."""
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = self._head + b'{"index":%d,' % index + self._before
        return head + _encode(text) + self._after

    def choice(self, choice: Mapping[str, object], extra: Mapping[str, object] | None = None) -> bytes:
        """Any other chunk; `extra` stands beside the choices."""
        return self._head + _encode(choice) + b"]" + self._tail(extra)

    def last(self, extra: Mapping[str, object]) -> bytes:
        """A chunk of no choice."""
        return self._head + b"]" + self._tail(extra)

    @staticmethod
    def _tail(extra: Mapping[str, object] | None) -> bytes:
        return b"," + _encode(extra)[1:] + b"\n\n" if extra else b"}\n\n"

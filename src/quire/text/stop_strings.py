"""Matches stop strings in streamed text (Aho-Corasick). Does not depend on tokens.

The stop string that completes first ends the text; of several that complete at the same character, the longest.
Chunk boundaries make no difference. Each character costs O(1) amortized, for any number and length of strings.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class ReleasedText(NamedTuple):
    """Text that is final, and the stop string that ended it, if any."""

    text: str
    stop: str | None


@dataclass(slots=True)
class _AutomatonNode:
    """A prefix of some stop string."""

    depth: int
    fallback: "_AutomatonNode | None" = (
        None  # the longest proper suffix of this prefix that is a prefix too; None at the root
    )
    match: str | None = None  # the longest stop string that ends here
    held: int = 0  # how many of the last characters could still be the start of a stop string
    children: dict[str, "_AutomatonNode"] = field(default_factory=dict)


class StopStrings:
    """A compiled set of stop strings. Immutable; shared by all sequences of a request."""

    __slots__ = ("_root",)

    def __init__(self, strings: Iterable[str]) -> None:
        self._root = _AutomatonNode(depth=0)
        for string in strings:
            assert string, "stop strings are checked to be non-empty"
            node = self._root
            for letter in string:
                node = node.children.setdefault(letter, _AutomatonNode(depth=node.depth + 1))
            node.match = string
        self._link()

    def __bool__(self) -> bool:
        return bool(self._root.children)

    @property
    def start(self) -> _AutomatonNode:
        return self._root

    def step(self, node: _AutomatonNode, letter: str) -> _AutomatonNode:
        """The node of the longest prefix of a stop string that the text now ends with."""
        current: _AutomatonNode | None = node
        while current is not None:
            child = current.children.get(letter)
            if child is not None:
                return child
            current = current.fallback
        return self._root

    def _link(self) -> None:
        """Breadth first: a node's fallback is shorter, so it is already complete."""
        queue = deque([self._root])
        while queue:
            node = queue.popleft()
            for letter, child in node.children.items():
                child.fallback = self._root if node.fallback is None else self.step(node.fallback, letter)
                child.match = child.match or child.fallback.match
                child.held = child.depth if child.children else child.fallback.held
                queue.append(child)


class StopMatcher:
    """Matches one text. Holds back a tail that could be the start of a stop string."""

    __slots__ = ("_held", "_include", "_node", "_strings")

    def __init__(self, strings: StopStrings, include_in_output: bool = False) -> None:
        self._strings = strings
        self._include = include_in_output
        self._node = strings.start
        self._held = ""

    def push(self, text: str, armed: bool = True) -> ReleasedText:
        """Add text. Strings that complete while not `armed` are ignored (below min_tokens)."""
        if not self._strings:
            return ReleasedText(text, None)
        unsure = self._held + text
        for place, letter in enumerate(text, start=len(self._held) + 1):
            self._node = self._strings.step(self._node, letter)
            if armed and self._node.match is not None:
                self._held = ""
                end = place if self._include else place - len(self._node.match)
                return ReleasedText(unsure[:end], self._node.match)
        sure = len(unsure) - self._node.held
        self._held = unsure[sure:]
        return ReleasedText(unsure[:sure], None)

    def finish(self) -> str:
        """The text held back; call it at the end of the text."""
        held, self._held = self._held, ""
        return held

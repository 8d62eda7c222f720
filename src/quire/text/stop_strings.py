"""Stop strings in text that arrives in pieces. Knows nothing of tokens.

The stop string that is complete first ends the text; of several complete at the same character, the longest.
Where the pieces are cut makes no difference. One step per character, however long text and strings are
(Aho-Corasick).
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class ReleasedText(NamedTuple):
    """Text that is certain, and the stop string that ended it."""

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
    held: int = 0  # how many of the last characters could still begin a stop string
    children: dict[str, "_AutomatonNode"] = field(default_factory=dict)


class StopStrings:
    """A compiled set of stop strings. Shared by all sequences of a request, never changed."""

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
        """The longest prefix of a stop string that the text now ends in."""
        current: _AutomatonNode | None = node
        while current is not None:
            child = current.children.get(letter)
            if child is not None:
                return child
            current = current.fallback
        return self._root

    def _link(self) -> None:
        """Shorter prefixes first, so that whatever a node falls back to is already finished."""
        queue = deque([self._root])
        while queue:
            node = queue.popleft()
            for letter, child in node.children.items():
                child.fallback = self._root if node.fallback is None else self.step(node.fallback, letter)
                child.match = child.match or child.fallback.match
                child.held = child.depth if child.children else child.fallback.held
                queue.append(child)


class StopMatcher:
    """The place of one text in its stop strings; it keeps back what could be the beginning of one."""

    __slots__ = ("_held", "_include", "_node", "_strings")

    def __init__(self, strings: StopStrings, include_in_output: bool = False) -> None:
        self._strings = strings
        self._include = include_in_output
        self._node = strings.start
        self._held = ""

    def push(self, text: str, armed: bool = True) -> ReleasedText:
        """Take more text. Strings completed while not `armed` do not stop it (too few tokens yet)."""
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
        """No more text comes: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

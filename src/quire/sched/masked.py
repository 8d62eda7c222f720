"""Rows whose every token is chosen under a mask: each needs its last token known before its next is planned.

Such a row cruises like any other, but sits out every step that is planned while its last one is in flight. Knows
neither grammars nor masks.
"""

from collections.abc import Iterator

from quire.core.ids import Row


class MaskedRows:
    """In which step each of them last chose a token."""

    __slots__ = ("_chose",)

    def __init__(self) -> None:
        self._chose: dict[Row, int] = {}

    def __len__(self) -> int:
        return len(self._chose)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._chose)

    def note(self, row: Row, step: int) -> None:
        """It chooses a token in this step."""
        self._chose[row] = step

    def forget(self, row: Row) -> None:
        """It leaves; it may not have been one of them."""
        self._chose.pop(row, None)

    def unknown(self, last_absorbed: int) -> list[Row]:
        """Those whose last token is still in flight."""
        return [row for row, step in self._chose.items() if step > last_absorbed]

"""Steps that attention is measured by: how long their sequences are, and what they ask for at the least. No torch."""

from random import Random
from typing import NamedTuple


class Span(NamedTuple):
    """One sequence of a step."""

    num_before: int  # keys that are there
    num_new: int  # tokens

    @property
    def length(self) -> int:
        return self.num_before + self.num_new


class Work(NamedTuple):
    """One layer of one step: decodes alone, or chunks alone."""

    name: str
    spans: tuple[Span, ...]

    @property
    def decodes(self) -> bool:
        return all(span.num_new == 1 for span in self.spans)

    def num_read(self, window: int) -> int:
        """Keys that some query sees, each counted once; window: 0 for none."""
        return sum(min(each.length, window + each.num_new - 1 if window else each.length) for each in self.spans)

    def num_scores(self, window: int) -> int:
        """Pairs of a query and a key that it sees."""
        return sum(_num_scores(each.length, window) - _num_scores(each.num_before, window) for each in self.spans)


def _num_scores(length: int, window: int) -> int:
    """Of so many tokens from the first on."""
    growing = min(length, window or length)
    return growing * (growing + 1) // 2 + (length - growing) * window


def even(rows: int, length: int) -> Work:
    return Work(f"decode {rows}x{length}", (Span(length - 1, 1),) * rows)


def uneven(rows: int, shortest: int, longest: int) -> Work:
    """Lengths at equal distances, in an order of no meaning."""
    lengths = [shortest + (longest - shortest) * row // (rows - 1) for row in range(rows)]
    Random(0).shuffle(lengths)
    return Work(f"decode {rows}x{shortest}..{longest}", tuple(Span(length - 1, 1) for length in lengths))


def chunks(count: int, num_new: int, num_before: int = 0) -> Work:
    before = f"+{num_before}" if num_before else ""
    name = f"chunk {num_new}{before}" if count == 1 else f"chunks {count}x{num_new}{before}"
    return Work(name, (Span(num_before, num_new),) * count)


# Those that docs/performance/gpu.md has the field's figures for, and those that differ from them as real steps do.
WORKS = (
    even(1, 1024), even(8, 1024), even(32, 1024), even(64, 1024), even(128, 1024), even(256, 1024), even(64, 4096),
    even(16, 16384), uneven(64, 100, 1900), uneven(256, 100, 1900),
    chunks(1, 512), chunks(1, 2048), chunks(1, 8192), chunks(1, 32768), chunks(4, 512), chunks(16, 128, 896),
    chunks(1, 2048, 6144),
)  # fmt: skip

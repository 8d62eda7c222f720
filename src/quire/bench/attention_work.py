"""Steps that attention is measured by: how long their sequences are, and what they ask for at the least. No torch."""

import re
from random import Random
from typing import NamedTuple

from quire.core.errors import ConfigError, shown

_DECODE = re.compile(r"decode ([0-9]{1,9})x([0-9]{1,9})(?:\.\.([0-9]{1,9}))?")
_CHUNKS = re.compile(r"chunks? (?:([0-9]{1,9})x)?([0-9]{1,9})(?:\+([0-9]{1,9}))?")
_MOST_KEYS = 1 << 23  # of all sequences: 32 GiB a layer with 8 key heads of 128


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


def find(name: str) -> Work:
    """A step by such a name, whatever its numbers: decode 24x700, decode 9x10..2000, chunk 300+5000, chunks 3x40."""
    decode, chunk = _DECODE.fullmatch(name), _CHUNKS.fullmatch(name)
    if decode is not None:
        rows, shortest, longest = int(decode[1]), int(decode[2]), int(decode[3] or decode[2])
        _check(name, rows * longest, rows > 0 and 0 < shortest <= longest and (rows > 1 or decode[3] is None))
        return even(rows, shortest) if decode[3] is None else uneven(rows, shortest, longest)
    if chunk is not None:
        count, num_new, num_before = int(chunk[1] or 1), int(chunk[2]), int(chunk[3] or 0)
        _check(name, count * (num_new + num_before), count > 0 and num_new > 1)
        return chunks(count, num_new, num_before)
    raise ConfigError(
        f"there is no step {shown(name)}; steps are written as in the table: decode 64x4096 (rows, and keys of each), "
        "decode 64x100..1900, chunk 2048+6144 (tokens behind so many keys), chunks 16x128+896."
    )


def _check(name: str, most_keys: int, is_step: bool) -> None:
    if not is_step:
        raise ConfigError(
            f"{name} is no step: there is 1 row or chunk at the least, 1 key to a row and 2 tokens to a chunk; of two "
            "lengths, for 2 rows or more, the shorter comes first."
        )
    if most_keys > _MOST_KEYS:
        raise ConfigError(
            f"{name} has up to {most_keys:,} keys, more than the {_MOST_KEYS:,} that are measured at most; ask for "
            "fewer or shorter sequences."
        )

"""Attention steps that `quire bench kernels` measures: their sequences, and the bytes and products they need.

A separate file: the command line parses step names without torch.
"""

import re
from random import Random
from typing import NamedTuple

from quire.core.errors import ConfigError, shown

_DECODE = re.compile(r"decode ([0-9]{1,9})x([0-9]{1,9})(?:\.\.([0-9]{1,9}))?")
_VERIFY = re.compile(r"verify ([0-9]{1,9})x([0-9]{1,9})\+([2-8])")
_CHUNKS = re.compile(r"chunks? (?:([0-9]{1,9})x)?([0-9]{1,9})(?:\+([0-9]{1,9}))?")
_MAX_KEYS = 1 << 23  # of all sequences: 32 GiB a layer with 8 KV heads of dimension 128


class QuerySpan(NamedTuple):
    """One sequence of a step."""

    num_before: int  # keys in the KV cache
    num_new: int  # tokens

    @property
    def length(self) -> int:
        return self.num_before + self.num_new


class AttentionStep(NamedTuple):
    """One layer of one step: decodes alone, rows that verify drafts alone, or chunks alone."""

    name: str
    spans: tuple[QuerySpan, ...]
    verifies: bool = False

    @property
    def decodes(self) -> bool:
        return all(span.num_new == 1 for span in self.spans)

    def num_read(self, window: int) -> int:
        """Keys that any query reads, each counted once. Window 0: none."""
        return sum(min(each.length, window + each.num_new - 1 if window else each.length) for each in self.spans)

    def num_scores(self, window: int) -> int:
        """Pairs of a query and a key that it reads."""
        return sum(_num_scores(each.length, window) - _num_scores(each.num_before, window) for each in self.spans)


def _num_scores(length: int, window: int) -> int:
    """Pairs of the first `length` tokens of a sequence."""
    growing = min(length, window or length)
    return growing * (growing + 1) // 2 + (length - growing) * window


def decode_step(rows: int, length: int) -> AttentionStep:
    return AttentionStep(f"decode {rows}x{length}", (QuerySpan(length - 1, 1),) * rows)


def mixed_decode_step(rows: int, shortest: int, longest: int) -> AttentionStep:
    """Lengths at equal distances, shuffled."""
    lengths = [shortest + (longest - shortest) * row // (rows - 1) for row in range(rows)]
    Random(0).shuffle(lengths)
    return AttentionStep(f"decode {rows}x{shortest}..{longest}", tuple(QuerySpan(length - 1, 1) for length in lengths))


def verify_step(rows: int, length: int, queries: int) -> AttentionStep:
    """Rows with some queries each, the last of which reads `length` keys."""
    return AttentionStep(f"verify {rows}x{length}+{queries}", (QuerySpan(length - queries, queries),) * rows, True)


def prefill_step(count: int, num_new: int, num_before: int = 0) -> AttentionStep:
    before = f"+{num_before}" if num_before else ""
    name = f"chunk {num_new}{before}" if count == 1 else f"chunks {count}x{num_new}{before}"
    return AttentionStep(name, (QuerySpan(num_before, num_new),) * count)


# Steps with figures of other engines in docs/performance/gpu.md, and steps of mixed lengths, as servers have them.
STANDARD_STEPS = (
    *(decode_step(rows, 1024) for rows in (1, 8, 32, 64, 128, 256)),
    decode_step(64, 4096), decode_step(16, 16384), mixed_decode_step(64, 100, 1900), mixed_decode_step(256, 100, 1900),
    *(prefill_step(1, num_new) for num_new in (512, 2048, 8192, 32768)),
    prefill_step(4, 512), prefill_step(16, 128, 896), prefill_step(1, 2048, 6144),
)  # fmt: skip


def find_step(name: str) -> AttentionStep:
    """The step of a name such as decode 24x700, decode 9x10..2000, verify 16x900+4, chunk 300+5000, chunks 3x40."""
    decode, chunk, verify = _DECODE.fullmatch(name), _CHUNKS.fullmatch(name), _VERIFY.fullmatch(name)
    if verify is not None:
        rows, length, queries = int(verify[1]), int(verify[2]), int(verify[3])
        _check(name, rows * length, rows > 0 and length >= queries)
        return verify_step(rows, length, queries)
    if decode is not None:
        rows, shortest, longest = int(decode[1]), int(decode[2]), int(decode[3] or decode[2])
        _check(name, rows * longest, rows > 0 and 0 < shortest <= longest and (rows > 1 or decode[3] is None))
        return decode_step(rows, shortest) if decode[3] is None else mixed_decode_step(rows, shortest, longest)
    if chunk is not None:
        count, num_new, num_before = int(chunk[1] or 1), int(chunk[2]), int(chunk[3] or 0)
        _check(name, count * (num_new + num_before), count > 0 and num_new > 1)
        return prefill_step(count, num_new, num_before)
    raise ConfigError(
        f"there is no step {shown(name)}; steps are written as in the table: decode 64x4096 (rows, and keys of each), "
        "decode 64x100..1900, verify 64x1024+4 (queries of each row), "
        "chunk 2048+6144 (tokens + earlier keys), chunks 16x128+896."
    )


def _check(name: str, most_keys: int, is_step: bool) -> None:
    if not is_step:
        raise ConfigError(
            f"{name} is not a valid step: it needs at least 1 row or chunk, 1 key per row and 2 tokens per chunk; in a "
            "range of lengths, for 2 rows or more, the shorter comes first."
        )
    if most_keys > _MAX_KEYS:
        raise ConfigError(
            f"{name} has up to {most_keys:,} keys, and the limit is {_MAX_KEYS:,}; request fewer or shorter sequences."
        )

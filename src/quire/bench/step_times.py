"""Times of whole steps by their shape: decoding rows of some context beside chunks of prompts, or rows that verify
drafts, through the real runner.

The plans are made by hand, so nothing is scheduled, and no step waits for the result of another. Contexts are reserved,
not computed: what attention reads is whatever the cache holds. Does not depend on the engine.
"""

import re
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.bench.attention_steps import AttentionStep, QuerySpan, find_step
from quire.core.errors import ConfigError
from quire.core.ids import Row, SequenceId
from quire.core.sampling import RowSampling
from quire.core.step import Chunk, ChunkOutput, Drafts, Grants, Pending, RowStart, Runner, StepPlan

if TYPE_CHECKING:
    from quire.bench.observer import DeviceClock

_AT_ONCE = 8  # steps launched before the first is waited for: the device never waits for the host
_ROUNDS = 3  # of which the median counts
_STARTED_AT_ONCE = 64  # rows in one step while contexts are set up
_JOINT = re.compile(r"\s*&\s*")


class RaggedStep(NamedTuple):
    """What to time: decoding rows, chunks, or both; or decoding rows with drafts."""

    name: str
    decodes: tuple[QuerySpan, ...] = ()
    chunks: tuple[QuerySpan, ...] = ()
    num_drafts: int = 0  # of each decoding row

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) * (1 + self.num_drafts) + sum(span.num_new for span in self.chunks)

    @property
    def num_advanced(self) -> int:
        """Tokens that a decoding row gains in the timed steps, at most."""
        return (1 + _ROUNDS * _AT_ONCE) * (1 + self.num_drafts)

    def num_blocks(self, block_size: int) -> int:
        lengths = [span.length + self.num_advanced for span in self.decodes] + [span.length for span in self.chunks]
        return sum(_num_blocks(length, block_size) for length in lengths)


class StepFigure(NamedTuple):
    """The time of one step."""

    name: str
    num_tokens: int
    milliseconds: float
    captured: bool  # it ran as a CUDA graph

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.num_tokens / self.milliseconds


STANDARD_RAGGED_STEPS = (
    "decode 1x1024", "decode 16x1024", "decode 64x1024", "decode 256x1024",
    "chunk 128", "chunk 256", "chunk 384", "chunk 512", "chunk 1024", "chunk 2048", "chunk 8192",
    "decode 32x1024 & chunk 224", "decode 32x1024 & chunk 352", "decode 32x1024 & chunk 480",
    "decode 32x1024 & chunk 992", "decode 64x1024 & chunk 448+2048", "decode 64x1024 & chunks 4x112",
)  # fmt: skip


def find_ragged_step(name: str) -> RaggedStep:
    """The step of a name such as decode 64x1024, chunk 512+2048, decode 32x1000 & chunks 4x100, verify 16x1024+4."""
    parts = [find_step(part) for part in _JOINT.split(name.strip())]
    if any(part.verifies for part in parts):
        return _verifying_step(name, parts)
    decodes, chunks = [part for part in parts if part.decodes], [part for part in parts if not part.decodes]
    if len(decodes) > 1 or len(chunks) > 1:
        raise ConfigError(f"{name!r} names two parts of one kind; a step is written as decode 32x1000 & chunks 4x100.")
    return RaggedStep(" & ".join(part.name for part in parts), _spans(decodes), _spans(chunks))


def _verifying_step(name: str, parts: list[AttentionStep]) -> RaggedStep:
    if len(parts) > 1:
        raise ConfigError(f"{name!r} has rows that verify drafts beside others; time them alone: {parts[0].name}.")
    [part] = parts
    last = tuple(QuerySpan(span.length - 1, 1) for span in part.spans)
    return RaggedStep(part.name, last, num_drafts=part.spans[0].num_new - 1)


def _spans(parts: list[AttentionStep]) -> tuple[QuerySpan, ...]:
    return parts[0].spans if parts else ()


def measure_steps(
    runner: Runner,
    steps: Many[RaggedStep],
    *,
    num_blocks: int,
    block_size: int,
    max_rows: int,
    clock: "DeviceClock | None",
    num_captured: Callable[[], int],
) -> Iterator[StepFigure]:
    """The figures one by one. `clock`: of the device; None: it computes a step before `launch` returns."""
    for step in steps:
        _check(step, num_blocks, block_size, max_rows)
    next_step = 0
    for step in steps:
        plans = _Plans(step, block_size, next_step)
        for plan in plans.set_up():
            runner.launch(plan).wait()
        runner.launch(plans.timed()).wait()
        before = num_captured()
        times_ms = [1000 * _seconds_each(runner, plans, clock) for _ in range(_ROUNDS)]
        captured = num_captured() - before == _ROUNDS * _AT_ONCE
        yield StepFigure(step.name, step.num_tokens, median(times_ms), captured)
        next_step = plans.next_step


def _seconds_each(runner: Runner, plans: "_Plans", clock: "DeviceClock | None") -> float:
    """The mean time of a few steps behind each other."""
    made = [plans.timed() for _ in range(_AT_ONCE)]
    begun_s, first = time.perf_counter(), None if clock is None else clock.mark()
    pending: list[Pending] = [runner.launch(plan) for plan in made]
    last = None if clock is None else clock.mark()
    for each in pending:
        each.wait()
    if first is None or last is None:
        return (time.perf_counter() - begun_s) / _AT_ONCE
    return last.seconds_since(first) / _AT_ONCE


def _num_blocks(length: int, block_size: int) -> int:
    return -(-length // block_size)


def _check(step: RaggedStep, num_blocks: int, block_size: int, max_rows: int) -> None:
    num_rows = len(step.decodes) + len(step.chunks)
    if num_rows > max_rows:
        raise ConfigError(f"{step.name} has {num_rows} rows, and the engine {max_rows}; use --max-num-seqs {num_rows}.")
    needed = step.num_blocks(block_size)
    if needed > num_blocks:
        raise ConfigError(
            f"{step.name} holds {needed * block_size:,} tokens, and the KV cache {num_blocks * block_size:,}; "
            "request fewer or shorter sequences."
        )


class _Plans:
    """The plans of one step: first its rows get their contexts, then the same step again and again."""

    def __init__(self, step: RaggedStep, block_size: int, first_step: int) -> None:
        self.next_step = first_step
        self._block_size = block_size
        self._step = step
        self._num_granted = 0
        self._chunk_grants: Grants | None = None
        self._running: tuple[Row, ...] = ()  # rows of the chunks of the last plan

    def set_up(self) -> Iterator[StepPlan]:
        """Empty rows, then decoding ones; each starts by computing its last known token."""
        yield self._plan(reset=True)
        num_rows = len(self._step.decodes)
        for first in range(0, num_rows, _STARTED_AT_ONCE):
            rows = range(first, min(first + _STARTED_AT_ONCE, num_rows))
            spans = [self._step.decodes[row] for row in rows]
            more = self._step.num_advanced + num_rows // _STARTED_AT_ONCE + 2
            longest = [span.length + more for span in spans]
            starts = [_start(Row(row), span.length, most) for row, span, most in zip(rows, spans, longest, strict=True)]
            last = [QuerySpan(span.length - 1, 1) for span in spans]
            yield self._plan(starts=tuple(starts), grants=self._grant(rows, longest), chunks=_chunks(rows, last),
                             num_decoding=first)  # fmt: skip

    def timed(self) -> StepPlan:
        """The step. The chunks of the last one start again."""
        rows = range(len(self._step.decodes), len(self._step.decodes) + len(self._step.chunks))
        lengths = [span.length for span in self._step.chunks]
        if self._chunk_grants is None:
            self._chunk_grants = self._grant(rows, lengths)
        releases, self._running = self._running, tuple(Row(row) for row in rows)
        starts = [_start(Row(row), length, length + 2) for row, length in zip(rows, lengths, strict=True)]
        return self._plan(releases=releases, starts=tuple(starts), grants=self._chunk_grants,
                          chunks=_chunks(rows, self._step.chunks), num_decoding=len(self._step.decodes),
                          drafts=self._drafts())  # fmt: skip

    def _drafts(self) -> Drafts:
        num_rows, each = len(self._step.decodes), self._step.num_drafts
        if not each:
            return Drafts()
        return Drafts(np.arange(num_rows, dtype=np.int32), np.full(num_rows, each, dtype=np.int32))

    def _grant(self, rows: range, lengths: Many[int]) -> Grants:
        """New blocks for these rows, one row after the other."""
        counts = [_num_blocks(length, self._block_size) for length in lengths]
        first = self._num_granted + 1  # behind the null block
        self._num_granted += sum(counts)
        return Grants(
            np.repeat(np.array(rows, dtype=np.int32), counts), np.arange(first, first + sum(counts), dtype=np.int32)
        )

    def _plan(self, **parts: object) -> StepPlan:
        self.next_step += 1
        return StepPlan(self.next_step - 1, **parts)  # type: ignore[arg-type]


def _start(row: Row, num_known: int, max_length: int) -> RowStart:
    tokens = np.full(num_known, 1, dtype=np.int32)
    return RowStart(row, SequenceId(row), 0, tokens, num_known, max_length, RowSampling(end_ids=()))


def _chunks(rows: range, spans: Many[QuerySpan]) -> tuple[Chunk, ...]:
    return tuple(
        Chunk(Row(row), span.num_before, span.num_new, ChunkOutput.SAMPLE)
        for row, span in zip(rows, spans, strict=True)
    )

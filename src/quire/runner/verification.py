"""Verifies drafts: the inputs of a step whose rows have several positions, and the sampling of one after the other.

The first pass samples a token for every row, as in any step. The next samples the second position of the rows that go
on and whose token is the one drafted, and so on. Each pass is the sampler as it is: penalties, bias, ends and logprobs
need nothing of their own, and every token is the one that a step without drafts would have given. The
results of a pass are read on the host: for devices that compute a step before `launch` returns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import IntArray, Row
from quire.core.step import Drafts, FinishedRow, FinishReason, Masks, StepResult, TopLogprobs, Verified
from quire.kernels.row_interface import DraftOutcome, RowColumns
from quire.kernels.transfers import HostCopy
from quire.runner.drafters import Drafted
from quire.runner.row_table import RowTable
from quire.sampling.logprobs import RowScores
from quire.sampling.row_params import SamplingBatch


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens of distinct rows, being copied to the host."""

    rows: IntArray
    outcome: HostCopy  # [5, n] int64: token, alive, finite, stop, length
    scores: RowScores | None

    def wait(self, step: int) -> StepResult:
        return step_result(step, self.rows, self.outcome.wait(), None if self.scores is None else self.scores.wait())


def step_result(
    step: int,
    rows: IntArray,
    outcome: NDArray[np.int64],  # [5, n]: token, alive, finite, stop, length
    scores: dict[Row, TopLogprobs] | None = None,
) -> StepResult:
    """One token of each of these rows."""
    if scores is None and outcome[1:].tobytes() == _all_go_on(len(rows)):  # in a fraction of the time of reductions
        return StepResult(step, rows, outcome[0].astype(np.int32))
    tokens, alive, finite, stop, length = outcome
    emitted = (alive & finite).astype(np.bool_)
    over = np.flatnonzero(alive & (stop | length | (1 - finite)))
    ended = tuple(FinishedRow(Row(int(rows[i])), finish_reason(finite[i], stop[i])) for i in over)
    logprobs: dict[Row, tuple[TopLogprobs, ...]] = {row: (top,) for row, top in (scores or {}).items()}
    if not emitted.all():
        emitting = set(rows[emitted].tolist())
        logprobs = {row: top for row, top in logprobs.items() if row in emitting}
    return StepResult(step, rows[emitted], tokens[emitted].astype(np.int32), ended, logprobs)


@lru_cache(maxsize=16)
def _all_go_on(num_rows: int) -> bytes:
    """What follows the tokens in an outcome in which every row has one and goes on."""
    return np.repeat(np.array([1, 1, 0, 0], dtype=np.int64), num_rows).tobytes()


def join_passes(step: int, results: list[StepResult]) -> StepResult:
    """The result of a step whose rows emitted one token after the other."""
    if not results:
        return StepResult(step)
    logprobs: dict[Row, tuple[TopLogprobs, ...]] = {}
    for result in results:
        for row, scores in result.logprobs.items():
            logprobs[row] = (*logprobs.get(row, ()), *scores)
    return StepResult(
        step,
        np.concatenate([result.rows for result in results]),
        np.concatenate([result.tokens for result in results]),
        tuple(over for result in results for over in result.ended),
        logprobs,
        passes=tuple(accumulate(len(result.rows) for result in results[:-1])),
    )


@dataclass(frozen=True, slots=True)
class SampledPasses:
    """The tokens of a step with drafts, one pass after the other."""

    passes: list[SampledTokens]
    drafted: Drafted

    def wait(self, step: int) -> StepResult:
        return join_passes(step, [each.wait(step) for each in self.passes])


def verified(drafts: Drafts, drafted: Drafted | None, result: StepResult) -> Verified:
    """What became of a plan's drafts."""
    if drafted is None:
        return nothing_verified(drafts)
    if len(drafts) == len(drafted.rows) == 1:
        gained = max(np.count_nonzero(result.rows == drafts.rows) - 1, 0)
        counts, sources = drafted.counts.astype(np.int32), drafted.final_sources
        return Verified(drafts.rows, counts, np.array([gained], dtype=np.int32), sources)
    most = int(drafts.rows.max()) + 1
    num_drafted, num_gained = np.zeros(most, dtype=np.int32), np.zeros(most, dtype=np.int32)
    num_drafted[drafted.rows] = drafted.counts
    sources = np.zeros(most, dtype=np.int32)
    sources[drafted.rows] = drafted.final_sources
    for rows, _ in list(result.each_pass())[1:]:
        num_gained[rows] += 1
    return Verified(drafts.rows, num_drafted[drafts.rows], num_gained[drafts.rows], sources[drafts.rows])


class VerifiedTokens(NamedTuple):
    """What rows emitted in a step with drafts."""

    result: StepResult
    numbers: IntArray  # of each token its pass


def greedy_result(step: int, rows: IntArray, counts: IntArray, drafted: DraftOutcome) -> VerifiedTokens:
    """The tokens of greedy rows, each with `counts[i]` drafts, pass by pass, as `sample_passes` samples them."""
    if len(rows) == 1:
        numbers = np.arange(drafted.advances.item())
        row_of, outcome = np.repeat(rows, len(numbers)), drafted.outcome[:, : len(numbers)]
    else:
        row_of, numbers, outcome = _by_pass(rows, counts, drafted)
    result = step_result(step, row_of, outcome)
    emitted = numbers[(outcome[1] & outcome[2]).astype(np.bool_)]
    passes = np.searchsorted(emitted, np.arange(1, emitted.max(initial=0) + 1))
    return VerifiedTokens(result._replace(passes=tuple(passes.tolist())), emitted.astype(np.int32))


def _by_pass(
    rows: IntArray, counts: IntArray, drafted: DraftOutcome
) -> tuple[IntArray, NDArray[np.int64], NDArray[np.int64]]:
    """Of what was reached: rows, passes and outcome, pass by pass."""
    lines = counts + 1
    starts = lines.cumsum() - lines
    numbers = np.arange(drafted.outcome.shape[1]) - np.repeat(starts, lines)
    taken = np.flatnonzero(numbers < np.repeat(drafted.advances, lines))
    order = taken[np.argsort(numbers[taken], kind="stable")]
    return np.repeat(rows, lines)[order], numbers[order], drafted.outcome[:, order]


def nothing_verified(drafts: Drafts) -> Verified:
    """No row of a plan had a draft."""
    none = np.zeros(len(drafts), dtype=np.int32)
    return Verified(drafts.rows, none, none)


# Samples one token for each row of a batch and advances these rows.
SamplePass = Callable[[Tensor, SamplingBatch, Masks | None], SampledTokens]


def sample_passes(
    logits: Tensor,  # [n + drafts, vocab] float32: of the rows of the batch, then after each draft
    batch: SamplingBatch,
    drafted: Drafted,
    sample: SamplePass,
    masked: tuple[Row, ...],
    masks: Masks | None,
) -> SampledPasses:
    """Sample each row's tokens, as long as they are those drafted; of masked rows, as long as there are masks."""
    num_rows = len(batch.host_rows)
    place_of = np.zeros(int(batch.host_rows.max()) + 1, dtype=np.int64)
    place_of[batch.host_rows] = np.arange(num_rows)
    places = place_of[drafted.rows]  # in the pass before; then of the rows that are left
    starts, counts, rows = np.cumsum(drafted.counts) - drafted.counts, drafted.counts, drafted.rows
    passes = [sample(logits[:num_rows], batch, None if masks is None else masks.of_pass(0))]
    is_masked = np.isin(rows, masked)
    for number in range(int(drafted.counts.max())):
        tokens, alive, finite, stop, length = passes[-1].outcome.wait()[:, places]
        goes_on = (alive & finite & (1 - stop) & (1 - length)).astype(np.bool_) & (number < counts)
        goes_on &= tokens == drafted.tokens[np.minimum(starts + number, len(drafted.tokens) - 1)]
        following = None if masks is None else masks.of_pass(number + 1)
        if following is not None:
            goes_on &= ~is_masked | np.isin(rows, following.rows)
            is_masked = is_masked[goes_on]
        rows, starts, counts = rows[goes_on], starts[goes_on], counts[goes_on]
        if not len(rows):
            break
        lines = torch.from_numpy(num_rows + starts + number)
        device_rows = torch.from_numpy(rows.astype(np.int64))
        positions = batch.positions[torch.from_numpy(place_of[rows])] + number + 1
        passes.append(sample(logits[lines], SamplingBatch(device_rows, rows, positions), _of_rows(following, rows)))
        places = np.arange(len(rows))
    return SampledPasses(passes, drafted)


def _of_rows(masks: Masks | None, rows: IntArray) -> Masks | None:
    """The masks of these rows; None if they have none."""
    if masks is None:
        return None
    kept = np.isin(masks.rows, rows)
    return Masks(masks.rows[kept], masks.bits[kept]) if kept.any() else None


class DraftLines(NamedTuple):
    """The rows of a step and their drafts as lines of a row table: one position each."""

    lines: IntArray
    columns: RowColumns


def draft_lines(table: RowTable, decoding: IntArray, drafted: Drafted) -> DraftLines:
    """First the decoding rows, then the drafts, each as a row that is longer by the drafts before it. A model that
    writes the keys and values of all lines of a layer before it reads any computes them as if one after the other."""
    rows = torch.from_numpy(np.concatenate([decoding, np.repeat(drafted.rows, drafted.counts)]).astype(np.int64))
    ahead = np.concatenate([np.zeros(len(decoding), dtype=np.int64), draft_numbers(drafted)])
    last_tokens = table.last_tokens[rows]
    last_tokens[len(decoding) :] = torch.from_numpy(drafted.tokens.astype(np.int64))
    columns = RowColumns(
        tables=table.tables[rows],
        lengths=table.lengths[rows] + torch.from_numpy(ahead),
        max_lengths=table.max_lengths[rows],
        last_tokens=last_tokens,
        alive=table.alive[rows],
    )
    return DraftLines(np.arange(len(rows), dtype=np.int32), columns)


def draft_numbers(drafted: Drafted) -> NDArray[np.int64]:
    """Of each draft its number in its row, from 1 on."""
    starts = np.cumsum(drafted.counts) - drafted.counts
    numbers: NDArray[np.int64] = np.arange(len(drafted.tokens)) - np.repeat(starts, drafted.counts) + 1
    return numbers


def finish_reason(finite: int, stop: int) -> FinishReason:
    if not finite:
        return FinishReason.ERROR
    return FinishReason.STOP if stop else FinishReason.LENGTH

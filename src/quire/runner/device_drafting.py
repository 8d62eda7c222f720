"""Drafts on the device: the tokens of every row, drafters that read them there, and steps that verify their drafts.

For runners with steps in flight, where only the device knows a row's latest tokens. The host decides how many drafts a
row has; the device always computes that many, and where a drafter finds nothing it takes any token: a wrong draft
costs the same as none. So the layout of a step is known when it is launched, and a captured graph serves every step
with as many rows and drafts. See `drafters` for what the drafters do, and `device_draft_model` for a model that drafts.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import IntArray, Row
from quire.core.speculative import DRAFTERS
from quire.core.step import Drafts, ForcedTokens, Masks, RowStart, StepPlan, StepResult
from quire.kernels.draft_interface import (
    LENGTH_SHIFT,
    MAX_NGRAM,
    PLANTED_UNIT,
    REFERENCE_DRAFT_KERNELS,
    DraftKernels,
    VerifyInputs,
)
from quire.kernels.interface import StepLayout
from quire.kernels.row_interface import EndColumns, RowKernels, Sampled
from quire.kernels.transfers import HostCopy, upload, upload_integers
from quire.runner.cuda_graphs import GraphCapturer
from quire.runner.device_draft_model import MOST_DRAFTS, DeviceDraftModel
from quire.runner.draft_model import DraftModelConfig
from quire.runner.drafters import Drafted
from quire.runner.graph_shapes import MAX_QUERIES
from quire.runner.row_table import RowTable
from quire.runner.verification import join_passes, step_result
from quire.sampling.logprobs import LineScores
from quire.sampling.sampler import Sampler

MAX_HISTORY = 16_384  # tokens of a row that prompt lookup searches: 64 KiB
MAX_CONTINUATION = 4096  # tokens of the tree's continuation that a row keeps
_UNKNOWN: IntArray = np.empty(0, dtype=np.int32)
_END_MASK = (1 << LENGTH_SHIFT) - 1
_NO_TOKEN = -1
_MOST = MOST_DRAFTS
_FORCED_WIDTH = 4 * MAX_QUERIES  # tokens of a forced text that are uploaded; a row is a step behind its start at most


class RowHistory(NamedTuple):
    """The rows of a step and what the device knows of them."""

    rows: Tensor  # [n] int64
    lengths: Tensor  # [n] int64: known tokens
    history: Tensor  # [max_rows + 1, width] int32: position p at p % width

    def tails(self, count: int) -> Tensor:
        """[n, count] int32: the last tokens of each row, the last first; -1 where there is none."""
        at = self.lengths[:, None] - 1 - torch.arange(count, device=self.rows.device)
        found = self.history[self.rows[:, None], at % self.history.shape[1]]
        return torch.where(at >= 0, found, -1)


class DeviceDrafter(Protocol):
    """Proposes tokens by operations that can be captured."""

    def start(self, starts: Many[RowStart]) -> None:
        """Rows start: upload what they are to be drafted from."""

    def propose(self, texts: RowHistory, count: int) -> Tensor:
        """[n, count] int64: tokens that may follow; -1 where it knows none."""


class SuffixDrafter:
    """Prompt lookup and the prefix tree: what followed a row's last tokens where they occurred before.

    The tree's continuation is a text of its own, behind the last tokens that were known when the row started: there the
    row follows it from the first token on. What is found there counts before what is found in the row's own tokens.
    """

    def __init__(
        self,
        max_rows: int,
        max_length: int,
        device: torch.device,
        *,
        ngram: bool = True,
        tree: bool = True,
        kernels: DraftKernels = REFERENCE_DRAFT_KERNELS,
    ) -> None:
        assert ngram or tree
        self._ngram = ngram
        self._match_suffix = kernels.match_suffix
        width = min(max_length, MAX_CONTINUATION) + MAX_NGRAM
        self._continuations: Tensor | None = None
        if tree:
            self._continuations = torch.zeros(max_rows + 1, width, dtype=torch.int32, device=device)
        self._num_following = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)

    def start(self, starts: Many[RowStart]) -> None:
        if self._continuations is None:
            return
        texts: dict[int, IntArray] = {}
        for start in starts:
            text = np.concatenate([start.tokens[-MAX_NGRAM:], start.continuation[:MAX_CONTINUATION]])
            texts[start.row] = text if len(start.continuation) else text[:0]
        write_lines(self._continuations, {row: (0, text) for row, text in texts.items() if len(text)})
        rows, lengths = upload_integers(
            self._num_following.device, np.array(list(texts)), np.array([len(text) for text in texts.values()])
        )
        self._num_following[rows] = lengths

    def propose(self, texts: RowHistory, count: int) -> Tensor:
        tails, numbers = texts.tails(MAX_NGRAM), torch.arange(count, device=texts.rows.device)
        proposed = torch.full_like(tails, _NO_TOKEN)[:, :1].expand(-1, count)
        if self._ngram:
            width = texts.history.shape[1]
            ends = texts.lengths - 1
            begins = (texts.lengths - width).clamp(min=0)
            place = self._match_suffix(texts.history, texts.rows, begins, ends, tails) & _END_MASK
            at = place[:, None] + numbers % (texts.lengths - place).clamp(min=1)[:, None]  # a loop goes on as a loop
            followed = texts.history[texts.rows[:, None], at % width]
            proposed = torch.where((place > 0)[:, None], followed, proposed)
        if self._continuations is not None:
            known = self._num_following[texts.rows]
            place = self._match_suffix(self._continuations, texts.rows, known * 0, known - 1, tails) & _END_MASK
            at = place[:, None] + numbers
            followed = self._continuations[texts.rows[:, None], at.clamp(max=self._continuations.shape[1] - 1)]
            proposed = torch.where((place > 0)[:, None] & (at < known[:, None]), followed, proposed)
        return proposed.long()


def write_lines(table: Tensor, lines: dict[int, tuple[int, IntArray]]) -> None:
    """Write tokens to lines of a table, each from a position on, modulo the width, in one upload."""
    if not lines:
        return
    width = table.shape[1]
    kept = {row: (first + max(len(text) - width, 0), text[-width:]) for row, (first, text) in lines.items()}
    rows = np.repeat(np.array(list(kept), dtype=np.int64), [len(text) for _, text in kept.values()])
    places = np.concatenate([np.arange(first, first + len(text)) % width for first, text in kept.values()])
    tokens = np.concatenate([text for _, text in kept.values()])
    at, values = upload_integers(table.device, rows * width + places, tokens)
    table.view(-1)[at] = values.int()


class DraftConfig(NamedTuple):
    """How drafts are made and verified."""

    drafter: DeviceDrafter | None  # None: only a model drafts
    kernels: DraftKernels = REFERENCE_DRAFT_KERNELS
    planted: Tensor | None = None  # for measurements: see `VerifyRows`
    model: DraftModelConfig | None = None  # drafts where the drafter knows nothing


class DeviceDrafting:
    """The token history of all rows, the drafter that reads it, and the drafts of a draft model."""

    def __init__(self, table: RowTable, max_length: int, setup: DraftConfig, max_lines: int) -> None:
        """`max_lines`: of a verifying step."""
        width = max_length if setup.model is not None else min(max_length, MAX_HISTORY)  # a model reads all of it
        table.history = torch.zeros(len(table.lengths), width, dtype=torch.int32, device=table.device)
        self._history = table.history
        self._table = table
        self._drafter, self._kernels, self._planted, _ = setup
        self._model: DeviceDraftModel | None = None
        # Inputs of the lines of the last step: a captured model leaves them here for captured verification.
        self._tokens = torch.zeros(max_lines, dtype=torch.int64, device=table.device)
        # Drafts that were made before the step, by row; -1: not. A captured model reads them here.
        self._made = torch.full((len(table.lengths), _MOST), _NO_TOKEN, dtype=torch.int64, device=table.device)
        self._any_made = False

    def add_model(
        self, config: DraftModelConfig, sampler: Sampler, row_kernels: RowKernels, capturer: GraphCapturer
    ) -> DeviceDraftModel:
        """A draft model makes the drafts of all rows that are under no grammar, before the step."""
        find = None if self._drafter is None else self._found
        facts = (sampler, self._kernels, row_kernels, capturer, self._made, find)
        self._model = DeviceDraftModel(config, self._table, *facts)
        return self._model

    def plant_acceptance(self, chance: float) -> None:
        """For measurements: any draft is accepted with this probability, whatever it is."""
        assert self._planted is not None, "drafts are compared with what is sampled"
        self._planted.fill_(round(chance * PLANTED_UNIT))

    def start(self, starts: tuple[RowStart, ...]) -> None:
        """Rows start with their known tokens."""
        if starts:
            write_lines(self._history, {start.row: (0, start.tokens) for start in starts})
            if self._drafter is not None:
                self._drafter.start(starts)

    def choose(self, plan: StepPlan) -> Drafted | None:
        """The drafts of a plan that its step computes; None: none. A draft model makes them now."""
        drafted = drafts_computed(plan.drafts, plan.forced)
        if self._model is None:
            return drafted
        free = ~np.isin(drafted.rows, plan.masked)
        counts, sources = drafted.counts.copy(), drafted.sources.copy()
        counts[free] = self._model.draft(drafted.rows[free], counts[free])
        sources[free] = DRAFTERS.index(self._model.source)
        kept = counts > 0
        if not kept.any():
            return None
        rows = drafted.rows[kept]
        by_text = None if self._drafter is None else self._model.by_text(rows).wait
        return Drafted(rows, counts[kept], _UNKNOWN, sources[kept], by_text)

    def _found(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """[n, most] int64: what the drafter proposes; -1 where it knows none."""
        if self._drafter is None:
            return torch.full_like(rows, _NO_TOKEN)[:, None].expand(-1, _MOST)
        return self._drafter.propose(RowHistory(rows, lengths, self._history), _MOST)

    def make(self, drafted: Drafted, rows: Many[Row], forced: Many[ForcedTokens]) -> "MaskedDrafts | None":
        """Draft for those of these rows that have drafts, before the step: the host asks what they are while the device
        computes it. What a grammar forces comes first. Call for every step with drafts."""
        if self._any_made and self._model is None:  # a model has made those of all other rows
            self._made.fill_(_NO_TOKEN)
        at = np.flatnonzero(np.isin(drafted.rows, rows))
        self._any_made = bool(len(at))
        if not self._any_made:
            return None
        host_rows = drafted.rows[at]
        (device_rows,) = upload_integers(self._table.device, host_rows)
        lengths = self._table.lengths[device_rows]
        drafts = self._forced(host_rows, lengths, forced, self._found(device_rows, lengths))
        drafts = self._whole(device_rows, drafts)
        self._made[device_rows] = drafts
        return MaskedDrafts(host_rows, drafted.counts[at], HostCopy(drafts))

    def _forced(self, rows: IntArray, lengths: Tensor, forced: Many[ForcedTokens], drafts: Tensor) -> Tensor:
        """The drafts, with what grammars force in their place, from where each row is."""
        texts = {span.row: (span.start, span.tokens[:_FORCED_WIDTH]) for span in forced if len(span.tokens)}
        if not texts:
            return drafts
        table = np.full((len(rows), _FORCED_WIDTH), _NO_TOKEN, dtype=np.int64)
        starts = np.zeros(len(rows), dtype=np.int64)
        for place, row in enumerate(rows.tolist()):
            if row in texts:
                starts[place], tokens = texts[Row(row)]
                table[place, : len(tokens)] = tokens
        flat, begins = upload_integers(drafts.device, table.reshape(-1), starts)
        at = (lengths - begins)[:, None] + torch.arange(drafts.shape[1], device=drafts.device)
        found = flat.view(len(rows), -1).gather(1, at.clamp(0, _FORCED_WIDTH - 1))
        return torch.where((at >= 0) & (at < _FORCED_WIDTH) & (found >= 0), found, drafts)

    def reject(self, lines: NDArray[np.int64]) -> None:
        """The drafts of these lines of the step are not accepted, whatever is sampled before them."""
        if len(lines):
            self._tokens.index_fill_(0, upload(lines, self._tokens.device), _NO_TOKEN)

    def inputs(self, rows: Tensor, starts: Tensor, num_lines: int, queries: int) -> "VerifyBatch":
        """Draft, and lay out a step with the rows' last tokens and drafts. Captured."""
        table = self._table
        drafts = self._made[rows, : queries - 1]
        if self._model is None and self._drafter is not None:
            found = self._drafter.propose(RowHistory(rows, table.lengths[rows], self._history), queries - 1)
            drafts = torch.where(drafts >= 0, drafts, found)
        drafts = self._whole(rows, drafts)
        inputs = self._kernels.verify_inputs(rows, starts, drafts, table.columns, table.block_size, num_lines)
        self._tokens[:num_lines].copy_(inputs.tokens)
        layout = StepLayout(
            positions=inputs.positions,
            slots=inputs.slots,
            tables=inputs.tables,
            query_starts=inputs.query_starts,
            context_lengths=inputs.context_lengths,
            max_lengths=inputs.max_lengths,
            max_queries=queries,
        )
        return VerifyBatch(inputs, layout)

    def _whole(self, rows: Tensor, drafts: Tensor) -> Tensor:
        """The drafts of these rows, with their last tokens where nothing is known."""
        return torch.where(drafts >= 0, drafts, self._table.last_tokens[rows][:, None])

    def tokens(self, num_lines: int) -> Tensor:
        """[lines] int64: inputs of the lines of the last step."""
        return self._tokens[:num_lines]

    def finish(
        self, sampled: Sampled, rows: Tensor, starts: Tensor, positions: Tensor, ends: EndColumns, queries: int
    ) -> Tensor:  # [5, queries, rows] int64
        """Accept what was drafted rightly, and advance the rows. Captured."""
        tokens = self.tokens(len(positions))
        return self._kernels.verify_rows(
            sampled, tokens, rows, starts, positions, ends, self._table.state, queries, self._planted
        )


class VerifyBatch(NamedTuple):
    inputs: VerifyInputs
    layout: StepLayout


class MaskedDrafts(NamedTuple):
    """Drafts of rows under a grammar, which are made before their step, being copied to the host."""

    rows: IntArray
    counts: NDArray[np.int64]
    tokens: HostCopy  # [n, most] int64

    def wait(self) -> dict[Row, IntArray]:
        tokens = self.tokens.wait().astype(np.int32)
        return {Row(row): tokens[at, : self.counts[at]] for at, row in enumerate(self.rows.tolist())}


@dataclass(frozen=True, slots=True)
class VerifiedRows:
    """The tokens of a verified step, being copied to the host."""

    rows: IntArray
    outcome: HostCopy  # [5, queries, rows] int64: token, whether it was reached, finite, stop, length
    drafted: Drafted
    scores: LineScores | None = None

    def wait(self, step: int) -> StepResult:
        passes = [each for each in self.outcome.wait().transpose(1, 0, 2) if each[1].any()]
        scores = [None] * len(passes) if self.scores is None else [*self.scores.wait(), *({},) * len(passes)]
        pairs = zip(passes, scores, strict=False)
        return join_passes(step, [step_result(step, self.rows, each, found) for each, found in pairs])


def drafts_computed(drafts: Drafts, forced: Many[ForcedTokens]) -> Drafted:
    """The drafts of a plan that a step computes. Which tokens they are, the device knows."""
    by_grammar = np.isin(drafts.rows, [span.row for span in forced])
    sources = np.where(by_grammar, DRAFTERS.index("grammar"), DRAFTERS.index("text")).astype(np.int32)
    return Drafted(drafts.rows, np.minimum(drafts.counts, _MOST).astype(np.int64), _UNKNOWN, sources)


def drafts_with_masks(drafted: Drafted, masks: Masks, masked: tuple[Row, ...]) -> Drafted:
    """Of masked rows only the drafts that their grammar allows: they have a mask behind them."""
    num_masks = np.bincount(masks.rows, minlength=int(drafted.rows.max()) + 1)[drafted.rows]
    allowed = np.minimum(drafted.counts, (num_masks - 1).clip(min=0))
    return drafted._replace(counts=np.where(np.isin(drafted.rows, masked), allowed, drafted.counts))


def counts_of(rows: IntArray, drafted: Drafted) -> NDArray[np.int64]:
    """Drafts of each of these rows, among which are those that have any."""
    counts: NDArray[np.int64] = np.zeros(int(rows.max()) + 1, dtype=np.int64)
    counts[drafted.rows] = drafted.counts
    return counts[rows]

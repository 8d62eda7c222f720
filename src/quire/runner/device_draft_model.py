"""A draft model for runners with steps in flight: its passes are captured, and read and write rows on the device.

A pass proposes the next token of each row that has drafts, and the next pass begins with that token; the step that
verifies them follows on the same stream. Nothing is read back. Only the device knows where a row is, so it keeps how
many positions of each row and of each block the draft model has computed. The host keeps an upper bound of what a row
lacks. It launches a piece of the row's text, in a pass of its own, until the bound says that the first pass has the
rest: two positions, since the last draft of a step is never computed, and was accepted where all were.

A head that drafts reads the model's hidden states, which each step of the model leaves in `DraftFeatures`. Those of
accepted drafts come with the step that verifies them. So the first pass of a head computes all that the last step gave
the row, and later passes read what the one before left. See `draft_model` for the slots of its keys and values.

Wrong keys and values would cost time, and change no output. See `draft_model` for what one table of blocks serves.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import NULL_BLOCK, IntArray
from quire.core.moves import Move, Tier, runs
from quire.core.step import ChunkOutput, StepPlan
from quire.kernels.draft_interface import DraftKernels
from quire.kernels.interface import StepLayout
from quire.kernels.row_interface import EndColumns, RowColumns, RowKernels, RowState, Sampled, SamplingStage, slots_of
from quire.kernels.transfers import HostCopy, upload, upload_integers
from quire.models.draft_head import DraftHead
from quire.models.interface import Model
from quire.runner.cuda_graphs import GraphCapturer, PlacedInput, Replay, StepTimes, seconds_of
from quire.runner.draft_model import MAX_CATCH_UP, DraftModelConfig
from quire.runner.graph_shapes import MAX_QUERIES
from quire.runner.kv_store import KvStores
from quire.runner.row_table import RowTable
from quire.sampling.sampler import Sampler

MOST_DRAFTS = MAX_QUERIES - 1  # of a row in a step
_UNKNOWN = -1  # in the place of a draft
_WINDOW = 2  # positions of a row that the first pass of a draft model computes
_HEAD_WINDOW = 1 + MOST_DRAFTS  # those of a head, at most: a token, and all drafts of the last step
# Rows, and tokens of each, of pieces that together launch the kernels of most others.
_DRY_PIECES = ((1, 1), (1, 8), (1, 64), (4, 16), (16, 32), (1, MAX_CATCH_UP))

# What the text of some rows says, by rows and lengths, each [n] int64. [n, MOST_DRAFTS] int64: -1 where it is unknown.
FindDrafts = Callable[[Tensor, Tensor], Tensor]


class DeviceDraftedBlocks:
    """How many positions the draft model has computed, from the first on: of each row, and of each block for the tokens
    that it holds. On the device, in the order of the launches."""

    __slots__ = ("_counts", "_least", "_table", "of_rows")

    def __init__(self, stores: KvStores, table: RowTable, least: int) -> None:
        """`least`: positions of a row that need no computation."""
        self._table = table
        self._least = least
        self.of_rows = torch.zeros_like(table.lengths)  # with drafts that are not verified yet
        self._counts = {Tier.DEVICE: torch.zeros(len(stores.device), dtype=torch.int64, device=table.device)}
        if stores.host is not None:
            self._counts[Tier.HOST] = torch.zeros(len(stores.host), dtype=torch.int64, device=table.device)

    def carry(self, moves: Iterable[Move]) -> None:
        for run in runs(moves):
            sources, targets = upload_integers(self._table.device, np.array(run.sources), np.array(run.targets))
            self._counts[run.dst][targets] = self._counts[run.src][sources]

    def grant(self, plan: StepPlan) -> None:
        """Blocks are granted. Those of a row that starts may be of the prefix tree, up to its first chunk; all others
        are new."""
        if not len(plan.grants):
            return
        rows, size = plan.grants.rows, self._table.block_size
        known: NDArray[np.int64] = np.zeros(len(rows), dtype=np.int64)
        begun = {chunk.row: chunk.start for chunk in plan.chunks}
        for start in plan.starts:
            at = np.flatnonzero(rows == start.row)
            known[at] = (begun.get(start.row, 0) - np.arange(len(at)) * size).clip(0, size)
        blocks, most = upload_integers(self._table.device, plan.grants.blocks, known)
        counts = self._counts[Tier.DEVICE]
        counts[blocks] = torch.minimum(counts[blocks], most)

    def begin_anew(self, rows: IntArray) -> None:
        """Nothing is computed of these rows."""
        self.of_rows.index_fill_(0, upload(rows.astype(np.int64), self._table.device), self._least)

    def forget(self, blocks: IntArray) -> None:
        """Another engine has written the model's keys and values of these blocks."""
        (at,) = upload_integers(self._table.device, blocks)
        self._counts[Tier.DEVICE][at] = 0

    def begin(self, rows: IntArray) -> Tensor:
        """These rows start: they begin where their blocks end. [rows] int64."""
        table, size = self._table, self._table.block_size
        device_rows, num_blocks = upload_integers(table.device, rows, table.num_blocks[rows])
        blocks = table.tables[device_rows].long()
        width = blocks.shape[1]
        granted = torch.arange(width, device=table.device) < num_blocks[:, None]
        counts = torch.where(granted, self._counts[Tier.DEVICE][torch.where(granted, blocks, NULL_BLOCK)], 0)
        num_full = (counts == size).long().cumprod(1).sum(1)
        behind = counts.gather(1, num_full.clamp(max=width - 1)[:, None])[:, 0]
        found = num_full * size + torch.where(num_full < width, behind, 0)
        found = torch.minimum(found, table.lengths[device_rows] - 1).clamp(min=self._least)
        self.of_rows[device_rows] = found
        return found

    def cut(self) -> None:
        """The drafts of the last step are verified: rejected ones are not computed."""
        torch.minimum(self.of_rows, self._table.lengths - 1, out=self.of_rows)

    def extend(self, rows: Tensor, stops: Tensor, most: int, ahead: Tensor | int = 0) -> None:
        """The positions before `stops` are computed of these rows, the last of them now: `most` of any row at most.
        `ahead`: drafts behind them that will be. Captured."""
        table, size = self._table, self._table.block_size
        self.of_rows[rows] = stops + ahead
        # Accepted drafts before them were not noted by block.
        back = torch.arange((most + MOST_DRAFTS) // size + 2, device=table.device)
        places = ((stops - 1) // size)[:, None] - back
        noted = table.alive[rows][:, None] & (places >= 0)
        blocks = table.tables[rows[:, None], places.clamp(min=0)].long()
        filled = (stops[:, None] - places * size).clamp(max=size)
        self._counts[Tier.DEVICE][torch.where(noted, blocks, NULL_BLOCK)] = filled


class _Asked(NamedTuple):
    """A number that is being copied to the host."""

    copied: HostCopy
    place: int


class DeviceDraftModel:
    """Proposes tokens of many rows at once by captured passes."""

    features = None  # the host notes none: steps write them

    def __init__(
        self,
        config: DraftModelConfig,
        table: RowTable,
        sampler: Sampler,
        kernels: DraftKernels,
        row_kernels: RowKernels,
        capturer: GraphCapturer,
        made: Tensor,  # [max_rows + 1, MOST_DRAFTS] int64: where the drafts of each row go
        find: FindDrafts | None = None,  # what is drafted before the model is asked
    ) -> None:
        assert table.history is not None
        self._model: Model | DraftHead = config.model
        self.source = config.model.source if isinstance(config.model, DraftHead) else "draft"
        self._stores, self._max_positions, self._vocab_size = config.stores, config.max_positions, config.vocab_size
        self._features, self._hidden = config.features, table.lengths[:0]
        self._shift, self._window = 0, _WINDOW  # slots by which keys and values are before their token
        self._table, self._sampler, self._kernels, self._row_kernels = table, sampler, kernels, row_kernels
        self._capturer, self._made, self._find, self._history = capturer, made, find, table.history
        if config.features is not None:
            config.features.write_at_once()
            self._shift, self._window = 1, _HEAD_WINDOW
            # What a head gave for the last token of each row of a pass.
            self._hidden = config.features.new_states(len(table.lengths))
        self._computed = DeviceDraftedBlocks(config.stores, table, self._shift)
        self._has_unverified = False  # drafts of the last step
        # Rows as they are behind the drafts made so far: with `wanted` drafts, a row is not alive any more.
        self._columns = RowColumns(
            table.tables,
            table.lengths.clone(),
            table.max_lengths,
            table.last_tokens.clone(),
            torch.zeros_like(table.alive),
        )
        self._ends = EndColumns(table.lengths.clone(), torch.full_like(table.lengths, _UNKNOWN)[:, None])
        self._number = torch.zeros(1, dtype=torch.int64, device=table.device)  # of the draft that comes next, from 0
        num_lines = len(table.lengths)
        self._wanted = PlacedInput(num_lines, 0, table.device)  # drafts, by row
        self._rows = PlacedInput(num_lines, table.padding_row, table.device)
        self._places = torch.arange(num_lines + 1, device=table.device)
        self._graphs: dict[tuple[bool, int, SamplingStage], Replay] = {}  # by first pass or next, and number of rows
        self._sizes: list[int] = []  # numbers of rows that are captured
        # Of each row on the host: the most tokens that the draft model lacks, and the fewest that there are.
        self._lag: NDArray[np.int64] = np.zeros(num_lines, dtype=np.int64)
        self._least: NDArray[np.int64] = np.zeros(num_lines, dtype=np.int64)
        self._is_new: NDArray[np.bool_] = np.zeros(num_lines, dtype=np.bool_)  # none of its tokens is computed
        self._asked: dict[int, _Asked] = {}  # rows that began with cached blocks: how much of these is computed
        self._by_text = torch.zeros_like(table.alive)  # whether the text of a row said its first draft

    def carry(self, moves: Many[Move]) -> None:
        """Copy blocks. Call before the row table applies the plan: the drafts of the last step are verified now."""
        if self._has_unverified:
            self._computed.cut()
            self._has_unverified = False
        self._stores.carry(moves)
        if self._features is not None:
            self._features.carry(moves)
        self._computed.carry(moves)

    def apply(self, plan: StepPlan) -> None:
        """Call when the row table has applied the plan. Counts the token that the step gives each row."""
        self._computed.grant(plan)
        for start in plan.starts:
            self._lag[start.row], self._least[start.row] = len(start.tokens) - self._shift, len(start.tokens)
            self._is_new[start.row] = True
            self._asked.pop(start.row, None)
        if plan.starts:
            self._ask(plan)
        caught_up = [chunk.row for chunk in plan.chunks if ChunkOutput.SAMPLE in chunk.output]
        for rows in (self._table.latest, caught_up):
            self._lag[rows] += 1
            self._least[rows] += 1

    def _ask(self, plan: StepPlan) -> None:
        """Rows start. What is computed of cached blocks only the device knows: ask, and read it when it has come."""
        started = {start.row for start in plan.starts}
        cached = [chunk.row for chunk in plan.chunks if chunk.start and chunk.row in started]
        if cached:
            copied = HostCopy(self._computed.begin(np.array(cached, dtype=np.int32)))
            self._asked |= {row: _Asked(copied, place) for place, row in enumerate(cached)}
            self._is_new[cached] = False

    def _told(self, rows: IntArray) -> NDArray[np.bool_]:
        """Whether it is known what each of these rows lacks at most."""
        known = np.ones(len(rows), dtype=np.bool_)
        for place, row in enumerate(rows.tolist() if self._asked else ()):
            asked = self._asked.get(row)
            if asked is not None and asked.copied.ready:
                self._lag[row] -= asked.copied.wait()[asked.place] - self._shift
                del self._asked[row]
            known[place] = row not in self._asked
        return known

    def forget(self, blocks: IntArray) -> None:
        """These blocks have other tokens now, which the draft model has not computed."""
        assert self._features is None, "the hidden states of another engine's tokens are not known"
        self._computed.forget(blocks)

    def draft(self, rows: IntArray, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draft tokens for each row, at most `counts`. Returns how many are drafted: none for a row that is further
        behind than a step catches up."""
        new = rows[self._is_new[rows]]
        if len(new):
            self._computed.begin_anew(new)
            self._is_new[new] = False
        known = self._told(rows)
        lacking = (self._lag[rows] - 1 - self._window).clip(min=0)  # before the token of this step
        order = np.argsort(lacking, kind="stable")
        left = MAX_CATCH_UP - np.cumsum(lacking[order]) + lacking[order]
        computed = np.empty_like(lacking)
        computed[order] = np.where(known[order], np.minimum(lacking[order], left), 0).clip(min=0)
        behind = computed > 0
        if behind.any():
            self._catch_up(rows[behind], computed[behind])
            self._lag[rows] -= computed
        room = (self._max_positions - (self._least[rows] - 1)).clip(min=0)
        wanted: NDArray[np.int64] = np.where(known & (computed == lacking), np.minimum(counts, room), 0)
        at = np.argsort(-wanted, kind="stable")[: np.count_nonzero(wanted)]
        if not len(at) or len(at) > (self._sizes[-1] if self._sizes else 0):
            return np.zeros_like(wanted)
        self._pass(rows[at], wanted[at])
        return wanted

    def by_text(self, rows: IntArray) -> HostCopy:
        """Whether the text of each of these rows said its first draft, in the last step that it drafted in. [n] bool"""
        return HostCopy(self._by_text[upload(rows.astype(np.int64), self._table.device)])

    def _pass(self, rows: IntArray, counts: NDArray[np.int64]) -> None:
        """All passes of these rows, those with the most drafts first."""
        self._place(rows, counts)
        stage = self._sampler.stages(rows)
        for number in range(int(counts[0])):
            num_rows = int(np.count_nonzero(counts > number))
            size = self._sizes[bisect_left(self._sizes, num_rows)]
            self._graphs[number == 0, size, stage]()
        self._lag[rows] = _WINDOW if self._features is None else 1 + counts  # it computes accepted drafts again
        self._has_unverified = True

    def _place(self, rows: IntArray, counts: NDArray[np.int64]) -> None:
        placed = np.full(len(self._rows.tensor), self._table.padding_row, dtype=np.int64)
        placed[: len(rows)] = rows
        self._rows.place(placed)
        wanted = np.zeros(len(self._wanted.tensor), dtype=np.int64)
        wanted[rows] = counts
        self._wanted.place(wanted)

    def capture(self, num_rows: int) -> None:
        """Capture the passes of this number of rows, unless they are. Call between steps."""
        if num_rows in self._sizes:
            return
        self._place(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64))
        for is_first, stage in product((True, False), SamplingStage):
            self._graphs[is_first, num_rows, stage] = self._capturer.capture(self._work(is_first, num_rows, stage))
        insort(self._sizes, num_rows)

    def dry_run(self, sizes: Iterable[int]) -> None:
        """Launch the kernels of all passes once, on padding. Call between steps."""
        whole, self._model = self._model, self._model.truncated()
        try:
            self._place(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64))
            for is_first, num_rows, stage in product((True, False), sizes, SamplingStage):
                self._work(is_first, num_rows, stage)()
            for num_rows, length in _DRY_PIECES:
                self._catch_up(np.full(num_rows, self._table.padding_row), np.full(num_rows, length))
        finally:
            self._model = whole

    def pass_times(self, device: torch.device) -> StepTimes | None:
        """Times of captured passes of padding; None: none is captured. Call between steps."""
        if not self._sizes:
            return None
        self._place(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64))
        one_s, most_s = (
            seconds_of(self._graphs[False, size, SamplingStage.GREEDY], device)
            for size in (self._sizes[0], self._sizes[-1])
        )
        return StepTimes(one_s, most_s / self._sizes[-1])

    def _work(self, is_first: bool, num_rows: int, stage: SamplingStage) -> Replay:
        return partial(self._first_pass if is_first else self._next_pass, num_rows, stage)

    def _catch_up(self, rows: IntArray, counts: NDArray[np.int64]) -> None:
        """Compute `counts` positions of each row behind those it has; where fewer are left, the last before the end."""
        table, stops = self._table, counts.cumsum()
        device_rows, device_counts, places, starts, last = upload_integers(
            table.device, rows, counts, np.repeat(np.arange(len(rows)), counts), np.append(0, stops), stops - 1
        )
        reached = torch.minimum(self._computed.of_rows[device_rows] + device_counts, table.lengths[device_rows] - 1)
        token_rows, shift = device_rows[places], self._shift
        positions = torch.arange(int(stops[-1]), device=table.device) - starts[1:][places] + reached[places] - shift
        positions = positions.clamp(min=0)  # of rows that have ended, of which the host does not know yet
        layout = StepLayout(
            positions=positions,
            slots=slots_of(token_rows, positions, table.columns, table.block_size),
            tables=table.tables[device_rows],
            query_starts=starts.int(),
            context_lengths=((reached - shift).clamp(min=0) * table.alive[device_rows]).int(),
            max_lengths=table.max_lengths[token_rows],
        )
        self._forward(self._history[token_rows, (positions + shift) % self._history.shape[1]].long(), layout, last)
        self._computed.extend(device_rows, reached, int(counts.max()))

    def _first_pass(self, num_rows: int, stage: SamplingStage) -> Tensor:
        """The last positions of each row that it lacks, and its first draft. Captured."""
        table, columns, wanted, shift = self._table, self._columns, self._wanted.tensor, self._shift
        columns.lengths.copy_((table.lengths - shift).clamp(min=1))
        torch.logical_and(table.alive, wanted > 0, out=columns.alive)
        self._ends.max_length.copy_(torch.minimum(table.lengths + wanted, table.max_lengths) - shift)
        self._number.zero_()
        rows = self._rows.tensor[:num_rows]
        lengths = table.lengths[rows]
        if self._find is None:
            self._made.index_fill_(0, rows, _UNKNOWN)
        else:
            self._made[rows] = found = self._find(rows, lengths)
            self._by_text[rows] = found[:, 0] >= 0
        first, queries = self._first_positions(rows)
        history, width = self._history, self._history.shape[1]
        before = columns._replace(
            lengths=first + 1 - shift, last_tokens=history.gather(1, (first % width)[:, None])[:, 0].long()
        )
        following = first[rows][:, None] + torch.arange(1, self._window, device=table.device)
        following = history[rows[:, None], following % width].long()
        num_lines = self._window * num_rows
        inputs = self._kernels.verify_inputs(rows, queries, following, before, table.block_size, num_lines)
        layout = StepLayout(
            positions=inputs.positions,
            slots=inputs.slots,
            tables=inputs.tables,
            query_starts=inputs.query_starts,
            context_lengths=inputs.context_lengths,
            max_lengths=inputs.max_lengths,
            max_queries=self._window,
        )
        last = queries[1:] - 1
        hidden = self._forward(inputs.tokens, layout, last)
        ahead = (wanted[rows] - 1).clamp(min=0) if self._features is None else 0
        self._computed.extend(rows, lengths, self._window, ahead)
        return self._sample(rows, hidden, inputs.sampled_rows[last], inputs.positions[last] + 1, stage)

    def _first_positions(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What the first pass begins with: of every row [max_rows + 1] int64, and where the tokens of these rows start
        among all that it computes, [rows + 1] int64."""
        lengths = self._table.lengths
        if self._features is None:
            return (lengths - _WINDOW).clamp(min=0), self._places[: len(rows) + 1] * _WINDOW
        first = (lengths - (lengths - self._computed.of_rows).clamp(1, self._window)).clamp(min=1)
        counts = (lengths - first)[rows].clamp(min=1)  # a row that has ended may have one token
        return first, F.pad(counts.cumsum(0), (1, 0))

    def _next_pass(self, num_rows: int, stage: SamplingStage) -> Tensor:
        """One more draft of each row that wants more. Captured."""
        rows, places = self._rows.tensor[:num_rows], self._places[: num_rows + 1]
        found = self._row_kernels.decode_inputs(rows, self._columns, self._table.block_size)
        layout = StepLayout(
            positions=found.positions,
            slots=found.slots,
            tables=found.tables,
            query_starts=places.int(),
            context_lengths=found.context_lengths,
            max_lengths=found.max_lengths,
            num_decodes=num_rows,
        )
        before = None if self._features is None else self._hidden[:num_rows]
        hidden = self._forward(found.tokens, layout, before=before)
        return self._sample(rows, hidden, found.sampled_rows, found.positions + 1, stage)

    def _forward(
        self, tokens: Tensor, layout: StepLayout, selected: Tensor | None = None, before: Tensor | None = None
    ) -> Tensor:
        """A model may have more tokens at the end than the other. `before`: what a head gave for the position before;
        None: the model has computed it."""
        known, kv = tokens.clamp(0, self._model.vocab_size - 1), self._stores.device
        if self._features is None:
            return self._model.forward(known, layout, kv, selected)
        assert isinstance(self._model, DraftHead), "features are for heads"
        states = self._features.read(layout.slots) if before is None else before
        return self._model.forward(known, layout, kv, selected, states)

    def _sample(
        self, rows: Tensor, hidden: Tensor, emitting: Tensor, positions: Tensor, stage: SamplingStage
    ) -> Tensor:
        """Sampled as the row samples, with the random numbers of the same positions, where its text says nothing."""
        if self._features is not None:
            self._hidden[: len(hidden)] = hidden
        logits = self._model.logits(hidden)
        missing = self._vocab_size - logits.shape[1]
        if missing:  # or too many
            logits = F.pad(logits, (0, missing), value=-torch.inf).contiguous()
        sampled = self._sampler.sample_with_kernels(logits, emitting, positions + self._shift, stage)
        made, at = self._made.view(-1), rows * MOST_DRAFTS + self._number
        said = made[at]
        drafts = torch.where(said >= 0, said, sampled.tokens)
        made[at] = drafts
        self._number.add_(1).clamp_(max=MOST_DRAFTS - 1)  # passes may be timed one after the other
        state = RowState(self._columns.last_tokens, self._columns.lengths, self._columns.alive)
        return self._row_kernels.finish_rows(Sampled(drafts, sampled.finite), emitting, positions, self._ends, state)

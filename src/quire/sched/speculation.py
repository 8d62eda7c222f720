"""Speculative decoding on the scheduler's side: how many drafts each row may verify in a step.

A draft pays if it is accepted often enough for what it costs. `DraftGovernor` measures how often the drafts of each row
are accepted, asks the cost table what a step with more tokens takes, and plans as many drafts as give the most expected
tokens per second; none if none gain. So drafts stop by themselves in large batches and where text does not repeat. A
row without drafts tries a single one now and then, ever less often while it fails; where drafts come from the row's own
text, each of its tokens tells what a draft would have been worth (`lookup_hits`). Does not depend on what drafts are,
but for three kinds: text that a grammar forces is accepted more often than what a text seems to repeat, and a draft
model first computes all tokens of a row that it lacks. So one row alone tries what nothing is known of, and what a try
makes the draft model compute counts as time of tries.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import IndexArray, IntArray, Row
from quire.core.sampling import RowSampling
from quire.core.step import StepResult
from quire.sched.cost_model import CostTable, StepShape
from quire.sched.lookup_hits import LookupHits

MAX_DRAFTS = 11  # of one row in one step: with its own token as many as CPU kernels compute at once
# None of these numbers was tuned.
_DECAY = 0.9  # of what is remembered of a row, per step with drafts
_SHARED_DECAY = 0.995  # of all rows together
_UNKNOWN_ACCEPTED, _UNKNOWN_TRIED = 1.0, 2.0  # of all rows, before the first draft
_UNKNOWN_FORCED = 1.6  # the same of text that grammars force
_PRIOR_WEIGHT = 2.0  # drafts that the acceptance of all rows counts for in that of a new row; decays with its own
_MIN_GAIN = 1.03  # in tokens per second: less is within the error of the cost table
_FIRST_PROBE = 16  # steps without drafts before a row tries one
_LAST_PROBE = 1024
_LIKELY = 0.5
_ROWS_PER_PROBE = 32  # this many rows have one probe in a step
_PROBE_SHARE = 0.01  # of the time that probes may take
_PROBE_COST = 0.05  # of a step, at least, that its first drafts take
_MAX_PROBE_CREDIT = 0.1  # of a step
_FEW_TRIED = 8.0  # drafts of a draft model, until which one row tries them for all
_CONTEXT_STEP = 32  # tokens by which the context of a row alone grows between two predictions of its steps
_MAX_HELD = 16  # steps for which a choice holds at most: the costs of steps change with time


@dataclass(frozen=True, slots=True)
class SpeculationPolicy:
    """How drafts are planned."""

    max_drafts: int = 0  # of one row in one step; 0: no speculation
    governed: bool = True  # False: always as many as possible, for measurements and checks
    tree: bool = False  # rows start with what the prefix tree has after their tokens
    text: bool = True  # rows draft from their own text and the tree's; False: only what their grammars force
    # On a GPU, where captured graphs verify drafts: only in steps without prompts, only up to this many tokens in a
    # step, and of rows under a grammar only what it forces. 0: anywhere.
    max_verified: int = 0
    hindsight: bool = False  # every token of a row tells whether prompt lookup would have drafted it
    # With hindsight, rows draft from text only behind a token that prompt lookup would have drafted. On a CPU, where
    # the step before is known when one is planned: elsewhere nothing is found, and asking costs a tenth of a step.
    after_hits: bool = False

    @property
    def jumps(self) -> bool:
        """Whether rows under a grammar draft what it forces."""
        return self.max_drafts > 0

    def allows(self, sampling: RowSampling) -> bool:
        """Whether a row with these parameters may ever have drafts."""
        return not sampling.pooled and (self.text or sampling.masked)

    def reads_text(self, sampling: RowSampling) -> bool:
        """Whether such a row drafts from its own text and the tree's."""
        return self.text and not sampling.pooled and not (sampling.masked and self.max_verified)


class _Choice(NamedTuple):
    """The drafts of some rows, which hold as long as nothing more is known of any row's acceptance."""

    rows: IndexArray
    limits: NDArray[np.int64]
    shape: StepShape
    budget: int
    counts: NDArray[np.int64]
    last_step: int  # it holds up to this one: then a row may try a draft

    @property
    def is_empty(self) -> bool:
        return not np.count_nonzero(self.counts)

    def holds(self, step: int, rows: IndexArray, limits: NDArray[np.int64], shape: StepShape, budget: int) -> bool:
        """No drafts are none with smaller limits, too. Rows have more context in each step, which counts little."""
        if step > self.last_step or not np.array_equal(rows, self.rows):
            return False
        same = (shape.num_rows, shape.num_chunk_tokens) == (self.shape.num_rows, self.shape.num_chunk_tokens)
        enough = budget == self.budget or min(budget, self.budget) >= int(self.limits.sum())
        smaller = self.is_empty and bool((limits <= self.limits).all())
        return same and enough and (smaller or np.array_equal(limits, self.limits))


class SingleRowCosts:
    """What a step of one row takes with each number of drafts, until the cost table or the context changes: then the
    drafts of a row alone are chosen without an array."""

    __slots__ = ("_cost", "_key", "_seconds", "_shape")

    def __init__(self, cost: CostTable, most: int) -> None:
        self._cost = cost
        self._key: tuple[int, StepShape] | None = None
        self._shape = StepShape()
        self._seconds: list[float | None] = [None] * (most + 1)

    @property
    def known(self) -> bool:
        return self._key is not None

    def update(self, shape: StepShape) -> None:
        """`shape`: of the next step, without drafts."""
        shape = shape._replace(num_context=shape.num_context // _CONTEXT_STEP * _CONTEXT_STEP)
        key = (self._cost.version, shape)
        if key != self._key:
            self._key, self._shape = key, shape
            self._seconds = [None] * len(self._seconds)

    def predict_s(self, number: int) -> float:
        seconds = self._seconds[number]
        if seconds is None:
            shape = self._shape.with_drafts(number) if number else self._shape
            seconds = self._seconds[number] = self._cost.predict_s(shape)
        return seconds

    def may_gain(self, most: int) -> bool:
        """Whether drafts that are always accepted would pay."""
        least_rate = _MIN_GAIN / self.predict_s(0)
        return any(1 + number > least_rate * self.predict_s(number) for number in (1, most))

    def best_count(self, chance: float, most: int) -> int:
        """As many drafts, each accepted with this chance, as give the most tokens per second."""
        best_rate, best, expected, power = _MIN_GAIN / self.predict_s(0), 0, 1.0, 1.0
        sizes = _TRIAL_SIZES[most]
        for number in range(1, most + 1):
            power *= chance
            expected += power
            if number in sizes and expected > best_rate * self.predict_s(number):
                best_rate, best = expected / self.predict_s(number), number
        return best


class DraftGovernor:
    """The acceptance of every row's drafts, and what to plan for it. By row, in arrays."""

    __slots__ = (
        "_accepted",
        "_behind",
        "_choice",
        "_cost",
        "_credited",
        "_first_step",
        "_forced_accepted",
        "_forced_tried",
        "_hit",
        "_hits",
        "_policy",
        "_prior_weight",
        "_probe_at",
        "_probe_credit",
        "_probe_interval",
        "_reads_text",
        "_shared_accepted",
        "_shared_tried",
        "_since",
        "_single_row",
        "_tried",
        "_watched",
    )

    def __init__(self, policy: SpeculationPolicy, cost: CostTable, max_rows: int) -> None:
        self._policy = policy
        self._cost = cost
        self._first_step: NDArray[np.int64] = np.full(max_rows, -1, dtype=np.int64)  # it decodes in; -1: no drafts
        self._accepted: NDArray[np.float64] = np.zeros(max_rows)  # drafts, decayed
        self._tried: NDArray[np.float64] = np.zeros(max_rows)  # of those, and the first of each step that was not
        self._reads_text: NDArray[np.bool_] = np.zeros(max_rows, dtype=np.bool_)
        self._prior_weight: NDArray[np.float64] = np.zeros(max_rows)
        self._behind: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # tokens a draft model lacked in that step
        self._since: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self._hits = LookupHits(max_rows) if policy.hindsight else None
        self._single_row = SingleRowCosts(cost, MAX_DRAFTS)
        self._hit: NDArray[np.bool_] = np.ones(max_rows, dtype=np.bool_)  # whether the last token was one
        # Rows of a result, those that draft from text, and which these are.
        self._watched: tuple[IntArray, IndexArray, NDArray[np.bool_] | None] | None = None
        self._probe_at: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # a step
        self._probe_interval: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self._probe_credit = _MAX_PROBE_CREDIT  # of a step, that probes may take now
        self._credited = 0  # the step in which some was added last
        self._forget()

    def _forget(self) -> None:
        self._choice: _Choice | None = None
        self._shared_accepted, self._shared_tried = _UNKNOWN_ACCEPTED, _UNKNOWN_TRIED
        self._forced_accepted, self._forced_tried = _UNKNOWN_FORCED, _UNKNOWN_TRIED

    def replace_hits(self, hits: LookupHits) -> None:
        """For journals: learn what prompt lookup would have drafted from another object, if from any."""
        if self._hits is not None:
            self._hits = hits

    def replace_policy(self, policy: SpeculationPolicy, *, forget: bool) -> None:
        """For measurements: another policy from the next step on; forget what was accepted of rows that are gone."""
        self._policy, self._choice = policy, None
        if forget:
            self._forget()

    @property
    def active(self) -> bool:
        """Whether any row may ever have drafts."""
        return self._policy.max_drafts > 0

    def quiet_until(self, step: int) -> int:
        """No row has drafts after this step, which is planned, up to the one returned, if the same rows decode."""
        if self._policy.hindsight and not self._policy.after_hits:  # every token counts
            return step
        if self._choice is not None:
            return self._choice.last_step if self._choice.is_empty else step
        return step if np.count_nonzero(self._first_step >= 0) else step + _MAX_HELD

    def start(self, row: Row, step: int, *, num_tokens: int = 0, reads_text: bool = True) -> None:
        """A row that may have drafts decodes from this step on; it has `num_tokens`. Without `reads_text` only what its
        grammar forces."""
        self._choice = self._watched = None
        self._hit[row] = True  # nothing is known of its first token
        self._first_step[row] = self._since[row] = step
        self._behind[row] = num_tokens
        self._reads_text[row] = reads_text
        self._accepted[row] = self._tried[row] = 0.0
        self._prior_weight[row] = _PRIOR_WEIGHT
        self._probe_at[row], self._probe_interval[row] = step + _FIRST_PROBE, _FIRST_PROBE

    def read_text(self, row: Row, tokens: IntArray, continuation: IntArray) -> None:
        """What a row's drafts are taken from: its tokens, and what the prefix tree has behind them."""
        if self._hits is not None:
            self._hits.start(row, tokens, continuation)

    def stop(self, row: Row) -> None:
        self._choice = self._watched = None
        self._first_step[row] = -1

    def candidates(self, step: int) -> IndexArray:
        """The rows that may have drafts in a step."""
        rows: IndexArray = np.flatnonzero((self._first_step >= 0) & (self._first_step <= step))
        return rows

    def choose(
        self,
        step: int,
        rows: IndexArray,
        limits: NDArray[np.int64],
        shape: StepShape,
        budget: int,
        forced: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """Drafts of each row, up to its limit and together up to the budget. `shape`: of the step without drafts;
        `forced`: tokens that the row's grammar forces, which come before all other drafts."""
        alone = len(rows) == shape.num_rows == 1 and not self._cost.constants.seconds_per_draft_pass
        if alone and self._policy.governed and (forced is None or not forced.item()):
            return self._choose_alone(step, rows, limits, shape, budget)
        forced = np.zeros(len(rows), dtype=np.int64) if forced is None else forced
        return self._choose_of_many(step, rows, limits, shape, budget, forced)

    def _choose_of_many(
        self,
        step: int,
        rows: IndexArray,
        limits: NDArray[np.int64],
        shape: StepShape,
        budget: int,
        forced: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        reads_text = self._reads_text[rows] & self._policy.text
        if self._policy.after_hits and self._policy.governed:
            reads_text &= self._hit[rows]
        from_text = np.where(reads_text, limits, 0)
        limits = np.where(forced > 0, np.minimum(limits, forced), from_text)
        limits = np.minimum(limits, self._policy.max_drafts).clip(min=0)
        if not self._policy.governed:
            return _within(limits, budget)
        self._add_credit(step)
        held = None if np.count_nonzero(forced) else self._choice
        if held is not None and held.holds(step, rows, limits, shape, budget):
            counts = held.counts.copy()
        else:
            counts, last_step = self._choose_anew(step, rows, limits, shape, budget, forced)
            self._choice = _Choice(rows, limits, shape, budget, counts.copy(), last_step)
        drafting = rows[counts > 0]
        self._probe_at[drafting] = step + self._probe_interval[drafting]
        self._behind[drafting], self._since[drafting] = 0, step
        return counts

    def _choose_alone(
        self, step: int, rows: IndexArray, limits: NDArray[np.int64], shape: StepShape, budget: int
    ) -> NDArray[np.int64]:
        """`choose` for a row that nothing is forced of, alone in the step."""
        row, policy = Row(rows.item()), self._policy
        reads_text = policy.text and self._reads_text.item(row) and (self._hit.item(row) or not policy.after_hits)
        most = max(min(limits.item(), policy.max_drafts, budget), 0) if reads_text else 0
        self._add_credit(step)
        self._single_row.update(shape)
        number, last_step = self._number_alone(step, row, most, shape) if most else (0, step + _MAX_HELD)
        counts = np.array([number], dtype=np.int64)
        self._choice = _Choice(rows, np.array([most]), shape, budget, counts, last_step)
        if number:
            self._probe_at[row] = step + self._probe_interval.item(row)
            self._behind[row], self._since[row] = 0, step
        return counts.copy()

    def _number_alone(self, step: int, row: Row, most: int, shape: StepShape) -> tuple[int, int]:
        """The drafts of a row alone, and the step up to which this holds."""
        last_step = step + _MAX_HELD
        if not self._single_row.may_gain(most):
            return 0, last_step
        chance = self._chance(row)
        number = self._single_row.best_count(chance, most)
        if number or chance <= self._least_tried:
            return number, last_step
        if self._probe_at.item(row) > step:
            return 0, min(last_step, self._probe_at.item(row) - 1)
        if not self._num_probes(np.zeros(1), 0, shape, most):
            return 0, step
        likely = sum(chance**drafts > _LIKELY for drafts in range(1, most + 1))
        return max(likely, 1), step

    def _chance(self, row: Row) -> float:
        """That a draft from the text of this row is accepted."""
        prior, shared = self._prior_weight.item(row), self._shared_accepted / self._shared_tried
        chance: float = (self._accepted.item(row) + prior * shared) / (self._tried.item(row) + prior)
        return chance

    @property
    def _least_tried(self) -> float:
        """Rows with a chance above this try a draft now and then. With hindsight what a draft is worth is known: only
        its cost is tried."""
        return _LIKELY if self._policy.hindsight else 0.0

    def _add_credit(self, step: int) -> None:
        self._probe_credit = min(self._probe_credit + _PROBE_SHARE * (step - self._credited), _MAX_PROBE_CREDIT)
        self._credited = step

    def _choose_anew(
        self,
        step: int,
        rows: IndexArray,
        limits: NDArray[np.int64],
        shape: StepShape,
        budget: int,
        forced: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], int]:
        """And the step up to which this holds."""
        last_step = step + _MAX_HELD
        counts = np.zeros(len(rows), dtype=np.int64)
        num_most = min(int(limits.sum()), budget)
        if num_most <= 0 or not self._may_gain(shape, num_most):
            return counts, last_step
        gains = self._gains(rows, limits, forced > 0)
        counts = self._best_counts(gains, shape, num_most)
        catch_up_s = self._catch_up_s(rows, step)
        if catch_up_s is not None and self._shared_tried - _UNKNOWN_TRIED < _FEW_TRIED:
            counts = _of_one_row(counts, forced > 0, catch_up_s)
        without = np.flatnonzero((counts == 0) & (gains[:, 0] > self._least_tried))
        next_probe = int(self._probe_at[rows[without]].min(initial=last_step + 1))
        if next_probe > step:
            varies = catch_up_s is not None or np.count_nonzero(forced)
            return counts, step if varies else min(last_step, next_probe - 1)
        waiting = without[self._probe_at[rows[without]] <= step]
        due_s = np.zeros(len(waiting)) if catch_up_s is None else catch_up_s[waiting]
        probing = waiting[: self._num_probes(due_s, int(counts.sum()), shape, budget)]
        counts[probing] = np.maximum(np.count_nonzero(gains[probing] > _LIKELY, axis=1), 1)  # measures their cost, too
        return _within(counts, budget), step

    def _catch_up_s(self, rows: IndexArray, step: int) -> NDArray[np.float64] | None:
        """What a draft model takes at most to compute what it lacks of each row; None: no model drafts."""
        token_s = self._cost.constants.seconds_per_draft_token
        lacking = (self._behind[rows] + step - self._since[rows]).astype(np.float64)
        return np.multiply(lacking, token_s, out=lacking) if token_s else None

    def _num_probes(self, due_s: NDArray[np.float64], num_drafts: int, shape: StepShape, budget: int) -> int:
        """How many of the waiting rows try a draft, in a step with this many drafts. All tries together take a small
        share of the time: a step has drafts for them once enough steps have had none. `due_s`: what a draft model takes
        before, of each waiting row."""
        number = min(len(due_s), budget - num_drafts, max(shape.num_rows // _ROWS_PER_PROBE, 1))
        if number <= 0:
            return 0
        without_s = self._cost.predict_s(shape.with_drafts(num_drafts))
        cost = self._cost.predict_s(shape.with_drafts(num_drafts + number)) / without_s - 1
        if not num_drafts:
            cost = min(max(cost, _PROBE_COST), _MAX_PROBE_CREDIT)
        if cost > self._probe_credit:
            return 0
        self._probe_credit -= max(cost, 0.0) + float(due_s[:number].sum()) / without_s
        return number

    def _may_gain(self, shape: StepShape, num_most: int) -> bool:
        """Whether drafts that are always accepted would pay: one, one of each row, or as many as allowed. The first of
        a step may cost more than all others."""
        least_rate = _MIN_GAIN * shape.num_rows / self._cost.predict_s(shape)
        numbers = (1, min(shape.num_rows, num_most), num_most)
        return any((shape.num_rows + n) > least_rate * self._cost.predict_s(shape.with_drafts(n)) for n in numbers)

    def _gains(self, rows: IndexArray, limits: NDArray[np.int64], forced: NDArray[np.bool_]) -> NDArray[np.float64]:
        """[rows, drafts]: the probability that a row's j-th draft is accepted, with all before it; 0: not allowed."""
        shared = np.where(
            forced, self._forced_accepted / self._forced_tried, self._shared_accepted / self._shared_tried
        )
        prior = self._prior_weight[rows]
        chance = (self._accepted[rows] + prior * shared) / (self._tried[rows] + prior)
        numbers = np.arange(1, self._policy.max_drafts + 1)
        gains: NDArray[np.float64] = np.where(numbers <= limits[:, None], chance[:, None] ** numbers, 0.0)
        return gains

    def _best_counts(self, gains: NDArray[np.float64], shape: StepShape, num_most: int) -> NDArray[np.int64]:
        """Drafts by row: the likeliest of all rows, as many as give the most tokens per second. Each pass of a draft
        model costs as much for one row as for many: so with one, all numbers of passes are compared."""
        num_rows, predict_s = shape.num_rows, self._cost.predict_s
        best_rate, best = _MIN_GAIN * num_rows / predict_s(shape), np.zeros(len(gains), dtype=np.int64)
        if num_rows + float(gains.sum()) <= best_rate * predict_s(shape.with_drafts(1)):
            return best  # not even if all drafts cost no more than one
        most_passes = gains.shape[1]
        for depth in range(1, most_passes + 1) if self._cost.constants.seconds_per_draft_pass else (most_passes,):
            likeliest = gains[:, :depth]
            ordered = np.sort(likeliest, axis=None)[::-1][:num_most]
            expected, in_pass = ordered.cumsum(), likeliest.max(axis=0)
            for number in _trial_sizes(int(np.count_nonzero(ordered))):
                num_passes = int(np.count_nonzero(in_pass >= ordered[number - 1]))
                rate = (num_rows + float(expected[number - 1])) / predict_s(shape.with_drafts(number, num_passes))
                if rate > best_rate:
                    best_rate = rate
                    best = np.count_nonzero(likeliest >= ordered[number - 1], axis=1).astype(np.int64)
        return _within(best, num_most)  # equal gains may be more than the budget has

    def note(
        self, rows: IntArray, drafted: IntArray, accepted: IntArray, forced: NDArray[np.bool_] | None = None
    ) -> None:
        """A step is absorbed: of these rows, the drafts computed and accepted, and whether a grammar forced them."""
        tested = drafted > 0
        if not np.count_nonzero(tested):
            return
        self._choice = None
        at, right = rows[tested].astype(np.intp), accepted[tested]
        tried = right + (right < drafted[tested])
        self._weigh(at, right, tried)
        longer = np.minimum(2 * self._probe_interval[at], _LAST_PROBE)
        self._probe_interval[at] = np.where(right > 0, _FIRST_PROBE, longer)
        by_grammar = np.zeros(len(at), dtype=np.bool_) if forced is None else forced[tested]
        if np.count_nonzero(~by_grammar):
            self._weigh_all(int(right[~by_grammar].sum()), int(tried[~by_grammar].sum()))
        if np.count_nonzero(by_grammar):
            self._forced_accepted = _SHARED_DECAY * self._forced_accepted + int(right[by_grammar].sum())
            self._forced_tried = _SHARED_DECAY * self._forced_tried + int(tried[by_grammar].sum())

    def note_tokens(self, result: StepResult, drafting: IntArray) -> bool:
        """A step is absorbed: what prompt lookup would have drafted of rows that had no drafts in it. Whether a row may
        draft now that rows had to wait for."""
        if self._hits is None or not self._policy.hindsight:
            return False
        if (result.passes[0] if result.passes else len(result.rows)) == 1:
            return self._note_alone(result, drafting)
        return self._note_many(result, drafting)

    def _note_many(self, result: StepResult, drafting: IntArray) -> bool:
        assert self._hits is not None
        after_hits, rows = self._policy.after_hits, result.rows
        if result.passes:
            rows = rows[: result.passes[0]]
        at, known = self._known(rows)
        right = self._hits.note(at, result.tokens[: len(rows)] if known is None else result.tokens[: len(rows)][known])
        judged, may_draft = self._hit[at], right
        self._hit[at] = right
        if result.passes:
            self._note_passes(result)
            may_draft = self._hit[at]
        if not after_hits:
            judged = np.ones_like(judged)
        if len(drafting):
            judged = judged & ~np.isin(at, drafting)
        if np.count_nonzero(judged):
            self._judge(at[judged], right[judged])
        return after_hits and bool(np.count_nonzero(may_draft))

    def _note_alone(self, result: StepResult, drafting: IntArray) -> bool:
        """`note_tokens` of one row. Not after a hit behind which drafts would not pay: the next steps stay as they
        are."""
        row, policy, hits = Row(result.rows.item(0)), self._policy, self._hits
        assert hits is not None
        if self._first_step.item(row) < 0 or not self._reads_text.item(row):
            return False
        judged = (self._hit.item(row) or not policy.after_hits) and row not in drafting.tolist()
        first, *others = result.tokens.tolist()
        hit = right = hits.note_one(row, first)
        for token in others:
            hit = hits.note_one(row, token)
        self._hit[row] = hit
        if judged:
            self._choice = None
            self._accepted[row] = _DECAY * self._accepted.item(row) + right
            self._tried[row] = _DECAY * self._tried.item(row) + 1
            self._prior_weight[row] = _DECAY * self._prior_weight.item(row)
            self._weigh_all(int(right), 1)
        return policy.after_hits and hit and self._may_draft_alone(row, result.step + 1)

    def _may_draft_alone(self, row: Row, step: int) -> bool:
        chance = self._chance(row)
        tries = self._probe_at.item(row) <= step and chance > self._least_tried
        return tries or not self._single_row.known or self._single_row.best_count(chance, self._policy.max_drafts) > 0

    def _note_passes(self, result: StepResult) -> None:
        """What came behind accepted drafts."""
        assert self._hits is not None
        for rows, tokens in list(result.each_pass())[1:]:
            known = (self._first_step[rows] >= 0) & self._reads_text[rows]
            at = rows[known].astype(np.intp)
            self._hit[at] = self._hits.note(at, tokens[known])

    def _known(self, rows: IntArray) -> tuple[IndexArray, NDArray[np.bool_] | None]:
        """The rows of a result that draft from text, and where they are; None: all of them do. Steps that repeat the
        one before have the same array of rows."""
        if self._watched is None or self._watched[0] is not rows:
            known = (self._first_step[rows] >= 0) & self._reads_text[rows]
            whole = np.count_nonzero(known) == len(rows)
            self._watched = rows, rows[known].astype(np.intp), None if whole else known
        return self._watched[1:]

    def _judge(self, tested: IndexArray, hits: NDArray[np.bool_]) -> None:
        self._choice = None
        self._weigh(tested, hits, 1)
        self._weigh_all(int(np.count_nonzero(hits)), len(tested))

    def _weigh(self, rows: IndexArray, right: NDArray[Any], tried: NDArray[Any] | int) -> None:
        self._accepted[rows] = _DECAY * self._accepted[rows] + right
        self._tried[rows] = _DECAY * self._tried[rows] + tried
        self._prior_weight[rows] *= _DECAY

    def _weigh_all(self, num_right: int, num_tried: int) -> None:
        self._shared_accepted = _SHARED_DECAY * self._shared_accepted + num_right
        self._shared_tried = _SHARED_DECAY * self._shared_tried + num_tried


def _of_one_row(
    counts: NDArray[np.int64], forced: NDArray[np.bool_], catch_up_s: NDArray[np.float64]
) -> NDArray[np.int64]:
    """The drafts that grammars force, and those of the one row that costs a draft model least to begin with."""
    from_model = np.flatnonzero((counts > 0) & ~forced)
    if len(from_model) < 2:
        return counts
    kept = counts.copy()
    kept[from_model] = 0
    chosen = from_model[np.argmin(catch_up_s[from_model])]
    kept[chosen] = counts[chosen]
    return kept


def _within(counts: NDArray[np.int64], budget: int) -> NDArray[np.int64]:
    """The counts of the first rows, up to this sum."""
    kept: NDArray[np.int64] = np.diff(np.minimum(counts.cumsum(), budget), prepend=0)
    return kept


def _trial_sizes(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, … up to all."""
    sizes = {size for power in range(most.bit_length()) for size in (1 << power, 3 << power >> 1) if 0 < size <= most}
    return sorted(sizes | ({most} if most else set()))


_TRIAL_SIZES = [frozenset(_trial_sizes(most)) for most in range(MAX_DRAFTS + 1)]

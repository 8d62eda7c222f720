"""A runner with scripted outputs: real requests and real scheduling, no arithmetic. Works on token ids.

Every row emits the reply that `choose` returns for its prompt, token by token, and then ends. A broken reply ends its
row with an error instead, as non-finite logits would. A prompt's embedding counts its tokens by id modulo 16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from quire.core.ids import FloatArray, IntArray, Row
from quire.core.step import (
    Candidates,
    ChunkOutput,
    FinishedRow,
    FinishReason,
    PromptLogprobs,
    StepPlan,
    StepResult,
    TopLogprobs,
)
from quire.sim.runners import EmittedTokens, SimRow, SimRows, SimStep, SimWork, next_token, sim_step

EMBEDDING_SIZE = 16


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """The tokens of an output, with the end token if there is one. A broken one fails after its last token."""

    tokens: tuple[int, ...]
    broken: bool = False


class ScriptedRunner:
    """Emits a scripted reply for each row. `pause` is called once per step, to take the time of a model."""

    def __init__(self, choose: Callable[[IntArray], ScriptedReply], vocab_size: int, pause: Callable[[], None]) -> None:
        self._choose = choose
        self._vocab_size = vocab_size
        self._pause = pause
        self._rows = SimRows(vocab_size, self._propose)
        self._replies: dict[Row, ScriptedReply] = {}

    def launch(self, plan: StepPlan) -> SimStep:
        self._pause()
        work = self._rows.apply(plan)
        if plan.reset:
            self._replies.clear()
        for row_start in plan.starts:
            self._replies[row_start.row] = self._choose(row_start.tokens[: row_start.num_prompt])
        return sim_step(plan, work, partial(self._result, plan, work))

    def _propose(self, row: SimRow, count: int) -> list[int]:
        """What the script says next: drafts that are always right."""
        reply = self._replies[row.row_start.row]
        start = len(row.tokens) - row.row_start.num_prompt
        return list(reply.tokens[start : start + count])

    def _result(self, plan: StepPlan, work: list[SimWork], masks: dict[Row, list[IntArray]]) -> StepResult:
        emitted = EmittedTokens()
        ended: list[FinishedRow] = []
        logprobs: dict[Row, tuple[TopLogprobs, ...]] = {}
        prompt_logprobs: list[PromptLogprobs] = []
        candidates: dict[Row, Candidates] = {}
        pooled: dict[Row, FloatArray] = {}
        for each in work:
            row = self._rows.rows[each.row]
            if ChunkOutput.PROMPT_LOGPROBS in each.output:
                prompt_logprobs.append(self._prompt_scores(each, row))
            if ChunkOutput.POOLED in each.output and each.stop == row.row_start.num_prompt:
                row.ended = True
                ended.append(
                    FinishedRow(each.row, FinishReason.ERROR if self._replies[each.row].broken else FinishReason.STOP)
                )
                if not self._replies[each.row].broken:
                    pooled[each.row] = counted(row.row_start.tokens)
            if ChunkOutput.CANDIDATES in each.output:
                token = self._next(each.row, row)
                if token is None:
                    self._break_off(each.row, ended)
                else:
                    scores = self._scores(token, row.row_start.sampling.num_candidates)
                    candidates[each.row] = Candidates(scores.ids, scores.logprobs)
            elif ChunkOutput.SAMPLE in each.output:
                self._speak(each, masks.get(each.row), emitted, ended, logprobs)
        result = StepResult(plan.step, ended=tuple(ended), logprobs=logprobs)
        result = result._replace(prompt_logprobs=tuple(prompt_logprobs), candidates=candidates, pooled=pooled)
        return emitted.result(plan, work, result)

    def _speak(
        self,
        work: SimWork,
        masks: list[IntArray] | None,
        emitted: EmittedTokens,
        ended: list[FinishedRow],
        logprobs: dict[Row, tuple[TopLogprobs, ...]],
    ) -> None:
        """Emit the tokens of one row."""
        row = self._rows.rows[work.row]
        num_logprobs = row.row_start.sampling.num_logprobs
        for number in range(1 + len(work.drafts)):
            token = self._next(work.row, row)
            if token is None:
                self._break_off(work.row, ended)
                return
            token = next_token(token, masks, number, self._vocab_size)
            emitted.add(work.row, token, number)
            if num_logprobs is not None:
                logprobs[work.row] = (*logprobs.get(work.row, ()), self._scores(token, num_logprobs))
            if not self._rows.goes_on(work, number, token, ended, masks):
                return

    def _break_off(self, row: Row, ended: list[FinishedRow]) -> None:
        self._rows.rows[row].ended = True
        ended.append(FinishedRow(row, FinishReason.ERROR))

    def _next(self, row: Row, assigned: SimRow) -> int | None:
        """The reply's next token; after its last the same again, for requests that ignore the end token."""
        line = self._replies[row]
        place = len(assigned.tokens) - assigned.row_start.num_prompt
        if place >= len(line.tokens) and line.broken:
            return None
        return line.tokens[min(place, len(line.tokens) - 1)]

    def _prompt_scores(self, work: SimWork, row: SimRow) -> PromptLogprobs:
        count = row.row_start.sampling.num_prompt_logprobs or 0
        first, last = max(work.start, 1), min(work.stop + 1, row.row_start.num_prompt)
        scores = tuple(self._scores(row.tokens[place], count) for place in range(first, last))
        return PromptLogprobs(work.row, first, scores)

    def _scores(self, token: int, count: int) -> TopLogprobs:
        """The token has probability 1; the alternatives are its neighbours, each less probable."""
        ids = (np.arange(count, dtype=np.int32) + token) % self._vocab_size
        return TopLogprobs(token, 0.0, 1, ids.astype(np.int32), -np.arange(count, dtype=np.float32))


def counted(tokens: IntArray) -> FloatArray:
    """How many tokens have each remainder: the sum of a prompt's hidden states."""
    return np.bincount(tokens % EMBEDDING_SIZE, minlength=EMBEDDING_SIZE).astype(np.float32)

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
from quire.sim.runners import SimRow, SimRows, SimStep, SimWork, first_allowed, sim_step

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
        self._rows = SimRows(vocab_size)
        self._replies: dict[Row, ScriptedReply] = {}

    def launch(self, plan: StepPlan) -> SimStep:
        self._pause()
        work = self._rows.apply(plan)
        if plan.reset:
            self._replies.clear()
        for row_start in plan.starts:
            self._replies[row_start.row] = self._choose(row_start.tokens[: row_start.num_prompt])
        return sim_step(plan, partial(self._result, plan.step, work))

    def _result(self, step: int, work: list[SimWork], bits: dict[Row, IntArray]) -> StepResult:
        emitted: list[tuple[int, int]] = []
        ended: list[FinishedRow] = []
        logprobs: dict[Row, TopLogprobs] = {}
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
            if not each.output & (ChunkOutput.SAMPLE | ChunkOutput.CANDIDATES):
                continue
            token = self._next(each.row, row)
            if token is None:
                row.ended = True
                ended.append(FinishedRow(each.row, FinishReason.ERROR))
                continue
            if each.row in bits:
                token = first_allowed(token, bits[each.row], self._vocab_size)
            if ChunkOutput.CANDIDATES in each.output:
                scores = self._scores(token, row.row_start.sampling.num_candidates)
                candidates[each.row] = Candidates(scores.ids, scores.logprobs)
                continue
            emitted.append((each.row, token))
            if row.row_start.sampling.num_logprobs is not None:
                logprobs[each.row] = self._scores(token, row.row_start.sampling.num_logprobs)
            end = self._rows.emit(each.row, token)
            if end is not None:
                ended.append(end)
        pairs = np.array(emitted, dtype=np.int32).reshape(-1, 2)
        return StepResult(
            step, pairs[:, 0], pairs[:, 1], tuple(ended), logprobs, tuple(prompt_logprobs), candidates, pooled
        )

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

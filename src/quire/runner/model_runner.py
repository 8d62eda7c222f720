"""Carries plans out with a model: build the batch, run it, sample, advance the rows. One verb, `launch`.

Nothing between `launch` and `wait` waits for the device, so that steps can be in flight on one that runs behind.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.core.ids import IntArray, Row
from quire.core.step import Ended, FinishReason, PromptLogprobs, StepPlan, StepResult
from quire.models.model import Model
from quire.runner.batch import PromptScoring, StepBatch, build_batch
from quire.runner.rows import RowTable
from quire.sampling.logprobs import RowScores, Scores, score_tokens
from quire.sampling.sampler import Sampler

# Prompt positions whose logits exist at the same time: 64 x a vocabulary of 150,000 are 40 MB.
_SCORED_AT_ONCE = 64


class ModelRunner:
    """A model, its KV store and its rows on one device."""

    def __init__(
        self,
        model: Model,
        kv: Tensor,  # [blocks + 1, layers, 2, block_size, kv_heads, dim]
        *,
        max_rows: int,
        max_length: int,
    ) -> None:
        self._model = model
        self._kv = kv
        self._rows = RowTable(max_rows, max_length, block_size=kv.shape[3], device=kv.device)
        self._sampler = Sampler(max_rows, model.vocab_size, kv.device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> "RunningStep":
        for row in plan.leaves:
            self._sampler.leave(row)
        for seat in plan.seats:
            self._sampler.seat(seat)
        cruising = self._rows.apply(plan)
        batch = build_batch(self._rows, plan, cruising)
        hidden = self._model.forward(batch.tokens, batch.ragged, self._kv)
        prompt_scores = tuple((part, self._score(part, hidden)) for part in batch.scoring)
        return self._sample(plan.step, batch, hidden, prompt_scores)

    def _sample(
        self,
        step: int,
        batch: StepBatch,
        hidden: Tensor,  # [tokens, hidden]
        prompt_scores: tuple[tuple[PromptScoring, list[Scores]], ...],
    ) -> "RunningStep":
        rows = batch.sampling.rows
        if len(rows) == 0:
            return RunningStep(step, batch.sampling.host_rows, None, None, prompt_scores)
        logits = self._model.logits(hidden[batch.sampled_at])
        sampled = self._sampler.sample(logits, batch.sampling)
        tokens = sampled.tokens
        scores = self._sampler.score(logits, batch.sampling, tokens)
        ends = self._sampler.ends(batch.sampling, tokens)
        self._sampler.commit(batch.sampling, tokens)
        alive = self._rows.alive[rows]
        emitted = alive & sampled.finite
        self._rows.advance(rows, tokens, emitted, ends.stop | ends.length | ~sampled.finite)
        outcome = torch.stack([tokens, alive.long(), sampled.finite.long(), ends.stop.long(), ends.length.long()])
        return RunningStep(step, batch.sampling.host_rows, outcome, scores, prompt_scores)

    def _score(self, part: PromptScoring, hidden: Tensor) -> list[Scores]:
        """Scores of prompt tokens, a few positions at a time: logits of a whole prompt would be vast."""
        num_top = self._rows.seats[part.chunk.row].sampling.num_prompt_logprobs or 0
        targets = torch.from_numpy(part.targets).to(hidden.device, torch.int64)
        states = hidden[part.first : part.first + len(targets)]
        return [
            score_tokens(
                self._model.logits(states[start : start + _SCORED_AT_ONCE]),
                targets[start : start + _SCORED_AT_ONCE],
                num_top,
            )
            for start in range(0, len(targets), _SCORED_AT_ONCE)
        ]


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A launched step; its outcome is on the device until somebody waits for it."""

    step: int
    rows: IntArray
    outcome: Tensor | None  # [5, n] int64: token, alive, finite, stop, length
    scores: RowScores | None
    prompt_scores: tuple[tuple[PromptScoring, list[Scores]], ...]

    def wait(self) -> StepResult:
        prompt_logprobs = tuple(_collect(part, pieces) for part, pieces in self.prompt_scores)
        if self.outcome is None:
            return StepResult(self.step, prompt_logprobs=prompt_logprobs)
        tokens, alive, finite, stop, length = self.outcome.cpu().numpy()
        emitted = (alive & finite).astype(np.bool_)
        over = np.flatnonzero(alive & (stop | length | (1 - finite)))
        ended = tuple(Ended(Row(int(self.rows[i])), _reason(finite[i], stop[i])) for i in over)
        logprobs = {} if self.scores is None else self.scores.wait()
        if not emitted.all():
            spoke = set(self.rows[emitted].tolist())
            logprobs = {row: top for row, top in logprobs.items() if row in spoke}
        return StepResult(
            step=self.step,
            rows=self.rows[emitted],
            tokens=tokens[emitted].astype(np.int32),
            ended=ended,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


def _reason(finite: int, stop: int) -> FinishReason:
    if not finite:
        return FinishReason.ERROR
    return FinishReason.STOP if stop else FinishReason.LENGTH


def _collect(part: PromptScoring, pieces: list[Scores]) -> PromptLogprobs:
    scores = [score for piece in pieces for score in piece.wait([piece.num_top] * len(piece.packed))]
    return PromptLogprobs(part.chunk.row, part.chunk.start + 1, tuple(scores))

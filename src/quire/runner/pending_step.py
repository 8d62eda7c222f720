"""A launched step: what the device still computes of it, and the `StepResult` that it becomes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from quire.core.ids import IntArray, Row
from quire.core.step import (
    NO_DRAFTS,
    Drafts,
    FinishedRow,
    FinishReason,
    Masks,
    PromptLogprobs,
    StepLost,
    StepPlan,
    StepResult,
)
from quire.runner.batch import PooledRows, PromptScoring
from quire.runner.device_drafting import MaskedDrafts, VerifiedRows
from quire.runner.drafters import Drafted
from quire.runner.verification import SampledPasses, SampledTokens, finish_reason, verified
from quire.sampling.logprobs import RowCandidates, Scores

# Samples the tokens of a step, under masks if it has any.
Choose = Callable[[Masks | None], SampledTokens | SampledPasses | VerifiedRows]


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """The tokens of a step that waits for masks."""

    choose: Choose
    num_tokens: int  # that the step computes
    drafted: Callable[[], dict[Row, IntArray]]  # of masked rows; may wait for the step before


Sampling = SampledTokens | SampledPasses | VerifiedRows | PendingTokens


def sampling_of(plan: StepPlan, choose: Choose, drafted: Drafted | MaskedDrafts | None = None) -> Sampling:
    """Sample now, or when the masks come, which is before the next forward pass."""
    if not plan.masked:
        return choose(None)
    if isinstance(drafted, MaskedDrafts):
        return PendingTokens(choose, plan.num_tokens, drafted.wait)
    known = {} if drafted is None else drafted.of_rows(plan.masked)
    return PendingTokens(choose, plan.num_tokens, lambda: known)


@dataclass(slots=True)
class PendingStep:
    """A launched step. Its outcome stays on the device until `wait`."""

    step: int
    sampled: Sampling | None = None
    candidates: RowCandidates | None = None
    prompt_scores: tuple[tuple[PromptScoring, list[Scores]], ...] = ()
    pooled: PooledRows | None = None
    drafts: Drafts = NO_DRAFTS
    computed: torch.cuda.Event | None = None  # of a step that samples nothing, on a GPU

    @property
    def drafted(self) -> dict[Row, IntArray]:
        return self.sampled.drafted() if isinstance(self.sampled, PendingTokens) else {}

    @torch.inference_mode()
    def sample(self, masks: Masks) -> None:
        assert isinstance(self.sampled, PendingTokens), "a step without masked rows is sampled when it is launched"
        with lost_without_memory(self.sampled.num_tokens):
            self.sampled = self.sampled.choose(masks)

    def wait(self) -> StepResult:
        assert not isinstance(self.sampled, PendingTokens), f"step {self.step} waits for its masks"
        if self.computed is not None:
            self.computed.synchronize()  # a block is cached, and leased, once its keys and values are there
        result = StepResult(self.step) if self.sampled is None else self.sampled.wait(self.step)
        if len(self.drafts):
            drafted = self.sampled.drafted if isinstance(self.sampled, SampledPasses | VerifiedRows) else None
            result = result._replace(verified=verified(self.drafts, drafted, result))
        if self.candidates is not None:
            found = self.candidates.wait()
            failed = tuple(FinishedRow(row, FinishReason.ERROR) for row, best in found.items() if best is None)
            likeliest = {row: best for row, best in found.items() if best is not None}
            result = result._replace(ended=result.ended + failed, candidates=likeliest)
        if self.prompt_scores:
            prompt_logprobs = []
            for part, pieces in self.prompt_scores:
                scores = [score for piece in pieces for score in piece.wait([piece.num_top] * len(piece.packed))]
                prompt_logprobs.append(PromptLogprobs(part.chunk.row, part.chunk.start + 1, tuple(scores)))
            result = result._replace(prompt_logprobs=tuple(prompt_logprobs))
        if self.pooled is not None:
            sums = self.pooled.wait()
            over = tuple(FinishedRow(row, finish_reason(total is not None, stop=True)) for row, total in sums.items())
            whole = {row: total for row, total in sums.items() if total is not None}
            result = result._replace(ended=result.ended + over, pooled=whole)
        return result


class ComputedStep:
    """A step that was computed and sampled when it was launched. No row of it is masked."""

    __slots__ = ("_result",)

    def __init__(self, result: StepResult) -> None:
        self._result = result

    @property
    def drafted(self) -> dict[Row, IntArray]:
        return {}

    def sample(self, masks: Masks) -> None:
        raise AssertionError(f"step {self._result.step} is sampled already")

    def wait(self) -> StepResult:
        return self._result


@contextmanager
def lost_without_memory(num_tokens: int) -> Iterator[None]:
    """A step for which the device has no memory is lost."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()  # defragments the allocator
        raise StepLost(f"no memory for a step of {num_tokens} tokens: {error}", too_large=True) from error

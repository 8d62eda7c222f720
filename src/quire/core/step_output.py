"""The output of one engine step: tokens by sequence, first tokens, finished sequences, scores.

The scheduler builds it, the engine process sends it, the front turns it into text. Plain data: sequences and requests
are integers. Does not depend on rows, text or encoding.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import FloatArray, IntArray
from quire.core.step import NO_ENTRIES, FinishReason, PromptLogprobs, TopLogprobs

_NO_SEQUENCES: NDArray[np.int64] = np.empty(0, dtype=np.int64)
_NO_TOKENS: IntArray = np.empty(0, dtype=np.int32)


class FirstToken(NamedTuple):
    """A request has its first token, or its embedding; a beam search has finished."""

    number: int
    seated_s: float | None
    num_cached: int  # prompt tokens found in the prefix cache


class FinishedSequence(NamedTuple):
    """A sequence has finished; `tokens` are all that it generated."""

    number: int
    sequence: int
    reason: FinishReason
    tokens: IntArray
    score: float | None  # of a beam
    num_preemptions: int
    by_token: bool = False  # its last token is an end token, and no part of the text


class DraftCounts(NamedTuple):
    """Drafts that a sequence verified in a step, and tokens that it gained by them."""

    drafted: int
    accepted: int


class StepOutput(NamedTuple):
    """Sequence `sequences[i]` gained `tokens[i]`. One that gained several occurs several times, in their order."""

    step: int
    sequences: NDArray[np.int64] = _NO_SEQUENCES
    tokens: IntArray = _NO_TOKENS
    first_tokens: tuple[FirstToken, ...] = ()
    finished: tuple[FinishedSequence, ...] = ()
    logprobs: Mapping[int, tuple[TopLogprobs, ...]] = NO_ENTRIES  # of each of its tokens
    prompt_logprobs: Mapping[int, PromptLogprobs] = NO_ENTRIES
    pooled: Mapping[int, FloatArray] = NO_ENTRIES  # the sum of a prompt's hidden states
    drafts: Mapping[int, DraftCounts] = NO_ENTRIES

    def numbers(self, number_of: Callable[[int], int | None]) -> set[int]:
        """The requests with output in this step. `number_of` gives the request of a sequence."""
        names = [*self.sequences.tolist(), *self.logprobs, *self.prompt_logprobs, *self.pooled]
        owners = {number for name in names if (number := number_of(name)) is not None}
        return owners | {first.number for first in self.first_tokens} | {over.number for over in self.finished}

    def only(self, number: int, number_of: Callable[[int], int | None]) -> "StepOutput":
        """The output of one request."""
        is_own = np.array([number_of(name) == number for name in self.sequences.tolist()], dtype=np.bool_)
        return StepOutput(
            self.step,
            self.sequences[is_own],
            self.tokens[is_own],
            tuple(first for first in self.first_tokens if first.number == number),
            tuple(over for over in self.finished if over.number == number),
            {name: scores for name, scores in self.logprobs.items() if number_of(name) == number},
            {name: scores for name, scores in self.prompt_logprobs.items() if number_of(name) == number},
            {name: vector for name, vector in self.pooled.items() if number_of(name) == number},
            {name: counts for name, counts in self.drafts.items() if number_of(name) == number},
        )

    @property
    def only_tokens(self) -> bool:
        """Whether it has nothing beside tokens and their logprobs."""
        return not (self.first_tokens or self.finished or self.prompt_logprobs or self.pooled or self.drafts)

    @property
    def empty(self) -> bool:
        return not (len(self.sequences) or self.first_tokens or self.finished or self.prompt_logprobs)

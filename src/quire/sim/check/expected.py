"""The expected output of each request of `quire check`, from the oracle's closed form, beam search included.

The reference beam search follows Hugging Face's definition and is slow on purpose. It shares no line with
`sched/beam_search.py`: whole hypotheses in lists, every token that could be among the best considered in every step,
every sum computed again from the closed form. Scores are whole numbers of 1 / 1024 until they are normalised.
"""

from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np

from quire.core.ids import IntArray
from quire.core.oracle import DEFICITS_PER_UNIT, deficit, mix, pooled, total
from quire.core.request import BeamParams, EarlyStopping, Request
from quire.core.step import FinishReason


class ReferenceHypothesis(NamedTuple):
    """Generated tokens, and the sum of their log-probabilities in units of 1 / 1024."""

    tokens: list[int]
    score: int


def search(request: Request, vocab_size: int) -> list[list[int]]:
    """The best finished hypotheses, best first; of equals the one that finished earlier."""
    params, ends = request.beam, set(request.sampling.end_ids)
    assert params is not None, request
    num_best = params.width * max(2, 1 + len(ends))
    num_ranks = min(vocab_size, num_best + len(ends))  # of one beam: lower ranks are never among the best of a step
    running = [ReferenceHypothesis([], 0)]
    finished: list[ReferenceHypothesis] = []
    while running and not _is_over(running, finished, params, request.max_tokens):
        everything = [longer for one in running for longer in _continue(one, request.prompt, vocab_size, num_ranks)]
        if len(running[0].tokens) < request.sampling.min_tokens:
            everything = [one for one in everything if one.tokens[-1] not in ends]
        everything.sort(key=lambda one: -one.score)  # among equals the better beam's
        best = everything[:num_best]
        stopped = [one.tokens[-1] in ends or len(one.tokens) == request.max_tokens for one in best]
        finished += [one for one, stops in list(zip(best, stopped, strict=True))[: params.width] if stops]
        finished.sort(key=lambda one: -normalised(one.score, len(one.tokens), params))
        finished = finished[: params.width]
        running = [one for one, stops in zip(best, stopped, strict=True) if not stops][: params.width]
    return [one.tokens for one in finished[: params.num_returned]]


def finish_reason(tokens: list[int], request: Request) -> FinishReason:
    return FinishReason.STOP if tokens[-1] in request.sampling.end_ids else FinishReason.LENGTH


def normalised(score: int, length: int, params: BeamParams) -> np.float32:
    """In float32, as transformers computes it: the same scores are equal."""
    return np.float32(np.float32(score / DEFICITS_PER_UNIT) / np.float32(length**params.length_penalty))


def _continue(one: ReferenceHypothesis, prompt: IntArray, vocab_size: int, num_ranks: int) -> list[ReferenceHypothesis]:
    """Continue with each of the most probable tokens, most probable first."""
    summed = total(np.concatenate([prompt, np.array(one.tokens, dtype=np.int32)]))
    return [
        ReferenceHypothesis([*one.tokens, (summed + rank) % vocab_size], one.score - deficit(summed, rank))
        for rank in range(num_ranks)
    ]


def _is_over(
    running: list[ReferenceHypothesis], finished: list[ReferenceHypothesis], params: BeamParams, max_tokens: int
) -> bool:
    """Whether `width` hypotheses are finished and, by `early_stopping`, no running one may replace them."""
    if len(finished) < params.width:
        return False
    if params.width == 1:  # greedy decoding
        return True
    length = len(running[0].tokens)
    match params.early_stopping:
        case EarlyStopping.WHEN_FULL:
            return True
        case EarlyStopping.NEVER if params.length_penalty > 0:  # a longer one would be divided by more
            length = max_tokens
    best_to_come = normalised(running[0].score, length, params)
    worst = finished[-1]
    return bool(best_to_come <= normalised(worst.score, len(worst.tokens), params))


@dataclass(slots=True)
class ExpectedOutput:
    """What a sequence must emit, and what was received of it."""

    tokens: list[int]
    reason: FinishReason
    streamed: bool = True  # token by token; beams are received at the end
    received: list[int] = field(default_factory=list)
    num_terminal: int = 0
    pooled: float | None = None  # the sum of the prompt's hidden states
    received_pooled: float | None = None

    def cut(self, reason: FinishReason) -> None:
        """It ended early for this reason: no more than what was received so far is expected."""
        self.reason = reason
        self.tokens = list(self.received)
        self.pooled = self.received_pooled


def expect(request: Request, vocab_size: int) -> list[ExpectedOutput]:
    """One for each sequence that is returned to the client."""
    if request.beam is not None:
        found = search(request, vocab_size)
        return [ExpectedOutput(tokens, finish_reason(tokens, request), streamed=False) for tokens in found]
    if request.sampling.pooled:
        return [ExpectedOutput([], FinishReason.STOP, pooled=pooled(request.prompt))]
    return [_expect_one(request, vocab_size, index) for index in range(request.num_sequences)]


def _expect_one(request: Request, vocab_size: int, index: int) -> ExpectedOutput:
    tokens: list[int] = []
    summed, sampling = total(request.prompt), request.sampling
    while len(tokens) < request.max_tokens:
        token = (summed + index) % vocab_size
        if sampling.masked:
            shift = _mask_shift(tokens)
            token = next(each % vocab_size for each in count(token) if (each % vocab_size + shift) % _MASK_STRIDE == 0)
        summed += mix(token, len(request.prompt) + len(tokens))
        tokens.append(token)
        if token in sampling.end_ids and len(tokens) >= sampling.min_tokens:
            return ExpectedOutput(tokens, FinishReason.STOP)
    return ExpectedOutput(tokens, FinishReason.LENGTH)


_MASK_STRIDE = 5  # a grammar of the check allows every fifth token, others after every token
_ENDING_STRIDE = 7  # behind some drafts it gives no mask, as if they completed it


def _mask_shift(generated: list[int]) -> int:
    """A mask from fewer tokens than were generated is another one, mostly. Siblings share masks, so their tokens are
    often the same: then the tree has other copies of what a sibling writes."""
    return (7 * len(generated) + 3 * sum(generated)) % _MASK_STRIDE


def grammar_goes_on(generated: list[int], draft: int) -> bool:
    """Whether the grammar may be asked for a mask after this draft: it is allowed, and ends nothing."""
    return (draft + _mask_shift(generated)) % _MASK_STRIDE == 0 and (draft + len(generated)) % _ENDING_STRIDE != 0


def mask_after(generated: list[int], vocab_size: int) -> IntArray:
    """The grammar mask of the next token, as a row of `Masks.bits`."""
    shift, width = _mask_shift(generated), -(-vocab_size // 32) * 32
    allowed = [token < vocab_size and (token + shift) % _MASK_STRIDE == 0 for token in range(width)]
    return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)

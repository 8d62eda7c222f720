"""What each request must come to, from the closed form: the judge of `quire check`."""

from dataclasses import dataclass, field

import numpy as np

from quire.core.oracle import candidates, continuation, total
from quire.core.request import Request
from quire.core.step import FinishReason
from quire.sched.beam import BeamSearch


@dataclass(slots=True)
class Expected:
    """What a sequence must emit, and what it has emitted."""

    tokens: list[int]
    reason: FinishReason
    spoken: bool = True  # token by token, as it runs; beams are told at the end
    heard: list[int] = field(default_factory=list)
    num_terminal: int = 0


def expect(request: Request, vocab_size: int) -> list[Expected]:
    """One for each of the request's sequences that a client hears of."""
    if request.beam is not None:
        return _expect_beams(request, vocab_size)
    return [_expect_one(request, vocab_size) for _ in range(request.num_sequences)]


def _expect_one(request: Request, vocab_size: int) -> Expected:
    tokens: list[int] = []
    for token in continuation(request.prompt, vocab_size):
        tokens.append(token)
        if token in request.sampling.end_ids and len(tokens) >= request.sampling.min_tokens:
            return Expected(tokens, FinishReason.STOP)
        if len(tokens) == request.max_tokens:
            break
    return Expected(tokens, FinishReason.LENGTH)


def _expect_beams(request: Request, vocab_size: int) -> list[Expected]:
    """The same search over the same candidates, without an engine."""
    assert request.beam is not None, request
    sampling = request.sampling
    search = BeamSearch(
        request.beam, len(request.prompt), request.max_length, sampling.end_ids, min_tokens=sampling.min_tokens
    )
    live = [request.prompt]
    while True:
        offers = [candidates(total(tokens), vocab_size, sampling.num_candidates) for tokens in live]
        step = search.advance(offers)
        if step is None:
            break
        pairs = zip(step.parents, step.tokens, strict=True)
        live = [np.append(live[parent], np.int32(token)) for parent, token in pairs]
    return [Expected(list(result.tokens), result.finish_reason, spoken=False) for result in search.results()]

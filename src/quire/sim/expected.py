"""What each request must come to, from the closed form: the judge of `quire check`."""

from dataclasses import dataclass, field

from quire.core.oracle import continuation, pooled
from quire.core.request import Request
from quire.core.step import FinishReason
from quire.sim.plain_beams import finish_reason, search


@dataclass(slots=True)
class Expected:
    """What a sequence must emit, and what it has emitted."""

    tokens: list[int]
    reason: FinishReason
    spoken: bool = True  # token by token, as it runs; beams are told at the end
    heard: list[int] = field(default_factory=list)
    num_terminal: int = 0
    pooled: float | None = None  # what the prompt's hidden states must sum up to
    heard_pooled: float | None = None

    def cut(self, reason: FinishReason) -> None:
        """It ended early, for this reason: what was heard so far is all that there will be."""
        self.reason = reason
        self.tokens = list(self.heard)
        self.pooled = self.heard_pooled


def expect(request: Request, vocab_size: int) -> list[Expected]:
    """One for each of the request's sequences that a client hears of."""
    if request.beam is not None:
        found = search(request, vocab_size)
        return [Expected(tokens, finish_reason(tokens, request), spoken=False) for tokens in found]
    if request.sampling.pooled:
        return [Expected([], FinishReason.STOP, pooled=pooled(request.prompt))]
    return [_expect_one(request, vocab_size, index) for index in range(request.num_sequences)]


def _expect_one(request: Request, vocab_size: int, index: int) -> Expected:
    tokens: list[int] = []
    for token in continuation(request.prompt, vocab_size, index):
        tokens.append(token)
        if token in request.sampling.end_ids and len(tokens) >= request.sampling.min_tokens:
            return Expected(tokens, FinishReason.STOP)
        if len(tokens) == request.max_tokens:
            break
    return Expected(tokens, FinishReason.LENGTH)

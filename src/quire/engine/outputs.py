"""Outputs of requests, as callers get them: completions, deltas, embeddings, metrics, and the errors of failed ones.

The embedding of a prompt is the mean of its hidden states, normalized to length 1.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.core.errors import (
    DeadlineExpired,
    GrammarFailed,
    NothingLeft,
    NumericalError,
    OutOfMemory,
    QuireError,
    RequestFailed,
)
from quire.core.ids import FloatArray
from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate token: its log-probability before any penalty or temperature, and its rank (1: most probable)."""

    logprob: float
    rank: int
    decoded_token: str | None


class FunctionCall(NamedTuple):
    """A call of a tool that the model asks for."""

    id: str
    name: str
    arguments: str  # JSON, as the model wrote it

    def message(self) -> dict[str, object]:
        """The call as it stands in the `tool_calls` of an assistant's message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(slots=True)
class CompletionOutput:
    """One continuation."""

    index: int  # where continuations are compared, the best is 0
    text: str
    token_ids: list[int]
    finish_reason: str | None  # a value of `FinishReason`; None while it runs
    stop_reason: int | str | None = None  # the stop token id or stop string; None for the model's own end
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None  # of a beam: what beams are ordered by; with best_of: log-probability per token
    error: str | None = None  # why it failed, if it did
    reasoning: str | None = None  # of a chat with tools: what the model thought before the text
    tool_calls: list[FunctionCall] = field(default_factory=list)  # of a chat with tools


@dataclass(slots=True)
class RequestMetrics:
    """Times on the engine's clock, in seconds, and the first and last step of the request."""

    arrival_s: float
    arrival_step: int
    first_token_s: float | None = None
    finished_s: float | None = None
    finished_step: int | None = None
    seated_s: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the cache
    num_drafted_tokens: int = 0  # verified by speculative decoding
    num_accepted_tokens: int = 0  # of those, accepted

    @property
    def queue_s(self) -> float | None:
        """Queue time."""
        return None if self.seated_s is None else self.seated_s - self.arrival_s

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def total_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.arrival_s


@dataclass(slots=True)
class RequestOutput:
    """A request and its continuations."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    embedding: FloatArray | None = None  # of an embedding request, instead of a completion

    @property
    def num_scores(self) -> int:
        """Log-probabilities of all tokens and their alternatives."""
        generated = sum(len(entry) for each in self.outputs for entry in each.logprobs or ())
        return generated + sum(len(entry) for entry in self.prompt_logprobs or () if entry is not None)


@dataclass(slots=True)
class EmbeddingOutput:
    """A prompt and its embedding, a vector of length one."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: FloatArray
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How near two texts are: the cosine of the angle between their embeddings, from -1 to 1."""

    score: float
    num_tokens: int  # of both texts


@dataclass(frozen=True, slots=True)
class Delta:
    """What one continuation gained since the last delta."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)

    def then(self, later: "Delta") -> "Delta":
        """Both as one."""
        return Delta(
            request_id=self.request_id,
            index=self.index,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            finish_reason=later.finish_reason,
            stop_reason=later.stop_reason,
            logprobs=self.logprobs + later.logprobs,
        )


EMBEDDING = SamplingParams(temperature=0.0, max_tokens=1)  # the parameters of an embedding request: nothing is sampled


def unit(total: FloatArray) -> FloatArray:
    """Normalise to length 1 (mean and sum have the same direction). A zero vector is returned unchanged."""
    length = np.linalg.norm(total.astype(np.float64))
    scaled: FloatArray = total if length == 0.0 else (total / length).astype(np.float32)
    return scaled


FAILURES = frozenset(FinishReason) - {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
_FORBIDDING = ("allowed_token_ids", "bad_words", "min_tokens")


def failure_of(reason: FinishReason | None, num_prompt: int, params: SamplingParams) -> QuireError | None:
    """A new exception per call (tracebacks accumulate in a raised one); None without a failure."""
    if reason is FinishReason.ERROR:
        return NumericalError()
    if reason is FinishReason.NOTHING_LEFT:
        return NothingLeft([name for name in _FORBIDDING if getattr(params, name)], formed=params.grammar is not None)
    if reason is FinishReason.GRAMMAR_FAILED:
        return GrammarFailed()
    if reason is FinishReason.FAILED:
        return RequestFailed()
    if reason is FinishReason.EXPIRED:
        return DeadlineExpired()
    if reason is FinishReason.OUT_OF_MEMORY:
        return OutOfMemory(num_prompt, params.max_tokens, params.num_sequences)
    return None

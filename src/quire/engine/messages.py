"""The messages between front and engine, in one process or two. Plain data; knows nothing of their encoding."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.config import EngineConfig
from quire.core.errors import QuireError
from quire.core.ids import FloatArray, IntArray
from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason, PromptLogprobs, TopLogprobs
from quire.engine.request_options import USUAL, RequestOptions

# Front to engine.


class StartEngine(NamedTuple):
    """The first message of a front."""

    config: EngineConfig
    script: str | None  # the path of a scripted model's lines, instead of a model
    serving: bool = True  # False: offline, no client waits for its next token


@dataclass(frozen=True, slots=True)
class AddRequest:
    """A request as the front sends it. The front numbers its requests; no number comes twice."""

    number: int
    prompt: list[int]
    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...] = ()  # as this model spells them
    terms: RequestOptions = USUAL
    pooled: bool = False  # an embedding is wanted, and no token
    without_tokens: bool = False  # the prompt's scores are wanted: one token is computed, and nobody reads it

    @property
    def prompt_alone(self) -> bool:
        """Whether nothing follows the prompt that would need a place in the context."""
        return self.pooled or self.without_tokens


class AbortRequest(NamedTuple):
    number: int


class StopSequence(NamedTuple):
    """End one sequence of a request: its stop string came."""

    number: int
    continuation: int


class Query(NamedTuple):
    """A question to the engine; its `QueryReply` has the same token."""

    token: int
    what: str
    number: int = 0


# Engine to front. `StartupPhase`, `EngineInfo` (the engine is ready) and `EngineStats` (its heartbeat) are sent, too.


class LoadProgress(NamedTuple):
    """Weights are being loaded: a long start is not a start that hangs."""

    done_bytes: int
    total_bytes: int


class QueryReply(NamedTuple):
    token: int
    body: bytes  # JSON


class Accepted(NamedTuple):
    """The request is queued; its continuations are numbered from `first_sequence` on."""

    number: int
    first_sequence: int
    step: int  # the first that could compute it


class Refused(NamedTuple):
    """The request was not queued, or failed outside of a step. Without a number: the engine could not start."""

    number: int | None
    error: QuireError


class FirstToken(NamedTuple):
    """A request's first token has come, or its embedding."""

    number: int
    seated_s: float | None
    num_cached: int  # prompt tokens found in the cache


class FinishedSequence(NamedTuple):
    """One continuation is over; `tokens` is all that it generated."""

    number: int
    sequence: int
    reason: FinishReason
    tokens: IntArray
    score: float | None  # of a beam
    num_preemptions: int
    by_token: bool = False  # its last token is the end of the text, and not a part of it


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one turn of the engine brought: sequence `sequences[i]` gained `tokens[i]`."""

    step: int
    sequences: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    tokens: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    begun: tuple[FirstToken, ...] = ()
    ended: tuple[FinishedSequence, ...] = ()
    logprobs: dict[int, TopLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    pooled: dict[int, FloatArray] = field(default_factory=dict)  # the sum of a prompt's hidden states

    def numbers(self, number_of: Callable[[int], int | None]) -> set[int]:
        """The requests that it speaks of. `number_of` knows whose a sequence is."""
        named = [*self.sequences.tolist(), *self.logprobs, *self.prompt_logprobs, *self.pooled]
        owners = {number for name in named if (number := number_of(name)) is not None}
        return owners | {begun.number for begun in self.begun} | {over.number for over in self.ended}

    def only(self, number: int, number_of: Callable[[int], int | None]) -> "StepOutput":
        """What it says of one request."""
        whose = [number_of(name) == number for name in self.sequences.tolist()]
        mine = np.array(whose, dtype=np.bool_)
        return StepOutput(
            self.step,
            self.sequences[mine],
            self.tokens[mine],
            tuple(begun for begun in self.begun if begun.number == number),
            tuple(over for over in self.ended if over.number == number),
            {name: scores for name, scores in self.logprobs.items() if number_of(name) == number},
            {name: scores for name, scores in self.prompt_logprobs.items() if number_of(name) == number},
            {name: vector for name, vector in self.pooled.items() if number_of(name) == number},
        )

    @property
    def empty(self) -> bool:
        return not (len(self.sequences) or self.begun or self.ended or self.prompt_logprobs)

"""What front and engine say to each other, whether they share a process or not. Plain data; knows no wire."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import QuireError
from quire.core.ids import FloatArray, IntArray
from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason, PromptLogprobs, TopLogprobs
from quire.engine.terms import USUAL, Terms


@dataclass(frozen=True, slots=True)
class Order:
    """A request as the front sends it. The front numbers its requests; no number comes twice."""

    number: int
    prompt: Sequence[int]
    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...] = ()  # as this model spells them
    terms: Terms = USUAL
    pooled: bool = False  # an embedding is wanted, and no token


class Accepted(NamedTuple):
    """The request is queued; its continuations are numbered from `first_sequence` on."""

    number: int
    first_sequence: int
    step: int  # the first that could compute it


class Refused(NamedTuple):
    """The request was not queued, or had to end before anything was computed."""

    number: int
    error: QuireError


class Begun(NamedTuple):
    """A request's first token has come, or its embedding."""

    number: int
    seated_s: float | None
    num_cached: int  # prompt tokens found in the cache


class Ended(NamedTuple):
    """One continuation is over; `tokens` is all that it generated."""

    number: int
    sequence: int
    reason: FinishReason
    tokens: IntArray
    score: float | None  # of a beam
    num_preemptions: int
    by_token: bool = False  # its last token is the end of the text, and not a part of it


@dataclass(frozen=True, slots=True)
class Progress:
    """What one turn of the engine brought: sequence `sequences[i]` gained `tokens[i]`."""

    step: int
    sequences: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    tokens: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    begun: tuple[Begun, ...] = ()
    ended: tuple[Ended, ...] = ()
    logprobs: dict[int, TopLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    pooled: dict[int, FloatArray] = field(default_factory=dict)  # the sum of a prompt's hidden states

    @property
    def empty(self) -> bool:
        return not (len(self.sequences) or self.begun or self.ended or self.prompt_logprobs)

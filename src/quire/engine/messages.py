"""The messages between front and engine, in one process or two. Plain data; does not depend on the encoding."""

from dataclasses import dataclass
from typing import NamedTuple

from quire.config import EngineConfig
from quire.core.errors import QuireError
from quire.core.sampling import SamplingParams
from quire.engine.request_options import DEFAULT_OPTIONS, RequestOptions

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
    options: RequestOptions = DEFAULT_OPTIONS
    pooled: bool = False  # the output is an embedding, without tokens
    without_tokens: bool = False  # the output is the prompt's scores: one token is computed and not read

    @property
    def prompt_alone(self) -> bool:
        """Whether nothing follows the prompt that would need a place in the context."""
        return self.pooled or self.without_tokens


class AbortRequest(NamedTuple):
    number: int


class StopSequence(NamedTuple):
    """Finish one sequence: a stop string matched."""

    number: int
    continuation: int


class Query(NamedTuple):
    """A question to the engine; its `QueryReply` has the same token."""

    token: int
    what: str
    number: int = 0


# Engine to front. So are `StepOutput`, `StartupPhase`, `EngineInfo` (when ready) and `EngineStats`.


class Heartbeat(NamedTuple):
    """What the engine's loop does now. Sent by another thread of its process, however long a step takes."""

    running_s: float = 0.0  # since the loop last completed an iteration
    expected_s: float = 0.0  # predicted time of the steps in flight; 0 between two steps


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

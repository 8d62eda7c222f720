"""The messages between front and engine, in one process or two, and the options of a request that they carry.

Plain data; does not depend on the encoding.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypedDict

from quire.config import EngineConfig
from quire.core.errors import InvalidParameter, QuireError, shown
from quire.core.request import partition_name
from quire.core.sampling import SamplingParams
from quire.core.validation import check_float, check_int, convert_numpy
from quire.engine.kv_events import KvEventsConfig
from quire.engine.prefix_transfer import EngineRole, KvTransport, PrefixLease, TransferFailure

MIN_PRIORITY, MAX_PRIORITY = -100, 100  # lower comes first
MAX_NAME_CHARACTERS = 256
MAX_TIMEOUT_S = 1e6  # eleven days


class RequestOptionsDict(TypedDict, total=False):
    """`RequestOptions` as keywords."""

    priority: int
    tenant: str
    cache_salt: str
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of one request beyond sampling."""

    priority: int = 0  # its class: lower comes first
    tenant: str = ""  # for the partition of the prefix cache and, without a client, for weighted fair queuing
    cache_salt: str = ""  # only requests of the same tenant and salt find each other's cached prefixes
    timeout_s: float | None = None  # it must be started before, or it ends as "expired"
    client: str = ""  # for weighted fair queuing: one of several clients of a tenant that share a cache, not a queue

    def __post_init__(self) -> None:
        convert_numpy(self, self.__slots__)
        check_int("priority", self.priority, MIN_PRIORITY, MAX_PRIORITY)
        for name in ("tenant", "cache_salt", "client"):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > MAX_NAME_CHARACTERS:
                raise InvalidParameter(
                    f"{name} must be a text of at most {MAX_NAME_CHARACTERS} characters, not {shown(value)}.",
                    param=name,
                )
        if self.timeout_s is not None:
            check_float("timeout_s", self.timeout_s, 0.0, MAX_TIMEOUT_S)

    @property
    def partition(self) -> str:
        return partition_name(self.tenant, self.cache_salt)

    def deadline_s(self, now_s: float) -> float | None:
        return None if self.timeout_s is None else now_s + self.timeout_s


DEFAULT_OPTIONS = RequestOptions()


def options_of(given: RequestOptionsDict, *, with_progress: bool = True) -> RequestOptions:
    """Keywords as options. A keyword of another engine is refused with its name here."""
    for name in given:
        if name not in RequestOptionsDict.__annotations__:
            instead = f"there are {', '.join(RequestOptionsDict.__annotations__)}"
            if name == "use_tqdm":
                instead = "use progress=True or False" if with_progress else "no bar is drawn here; omit it"
            elif name in ("tools", "tool_choice"):
                instead = "chat takes it, and returns the calls when the answer is whole"
            elif name == "system":
                instead = 'write a message: {"role": "system", "content": …}'
            elif name in SamplingParams.__dataclass_fields__:
                instead = f"it goes into the sampling parameters: SamplingParams({name}=…)"
            raise TypeError(f"There is no parameter {name}; {instead}.")
    return RequestOptions(**given)


class SubmitOptions(TypedDict, total=False):
    """What a client of an engine may say of a request beside its prompt and its sampling parameters."""

    options: RequestOptions
    streaming: bool  # its output is read as it is generated
    pooled: bool  # its output is the prompt's embedding
    without_tokens: bool  # its output is the prompt's scores
    routing: str  # why its prompt goes to a prefill engine, or does not; for `explain`


# Front to engine.


class StartEngine(NamedTuple):
    """The first message of a front."""

    config: EngineConfig
    script: str | None  # the path of a scripted model's lines, instead of a model
    serving: bool = True  # False: offline, no client waits for its next token
    kv_events: KvEventsConfig | None = None  # publish what the prefix cache stores and removes
    journal: str | None = None  # the path of a journal to be recorded
    role: EngineRole = EngineRole.WHOLE
    transport: KvTransport = KvTransport.MEMORY  # of the blocks of engines with a role


class PromptTransfer(NamedTuple):
    """What came of computing a prompt in another engine; for `explain`."""

    num_tokens: int = 0  # copied
    seconds: float = 0.0  # from the request to the end of the copy
    failure: TransferFailure | None = None  # why the prompt is computed here

    @property
    def text(self) -> str:
        return "" if self.failure is None else self.failure.text


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
    transfer: PromptTransfer | None = None  # its prompt was sent to a prefill engine before
    routing: str = ""  # why it was, or was not; empty: there are no prefill engines

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


class LeasePrefix(NamedTuple):
    """Lease what is cached of a prompt; a `LeaseReply` in JSON has the same token."""

    token: int
    partition: str
    prompt: list[int]


class ReleaseLease(NamedTuple):
    """The leased blocks are no longer needed. A lease that has ended is ignored."""

    slot: int
    generation: int


class ImportPrefix(NamedTuple):
    """Copy leased blocks into the prefix cache; an `ImportReply` in JSON has the same token."""

    token: int
    number: int  # the request that needs them
    partition: str
    priority: int
    prompt: list[int]
    lease: PrefixLease


class LeaseReply(NamedTuple):
    lease: PrefixLease | None = None
    failure: TransferFailure | None = None


class ImportReply(NamedTuple):
    num_tokens: int = 0  # copied; those that were cached before are not counted
    num_bytes: int = 0
    failure: TransferFailure | None = None
    copy_s: float = 0.0  # of the time until the reply, what the copy itself took


# Engine to front. So are `StepOutput`, `StartupPhase`, `EngineInfo` (when ready), `EngineStats` and
# `PrefillCosts`.


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

"""The state that every handler gets: the served model, the engine, admission control and metrics.

`ServedModel` describes the model: names, tokenizer, limits, defaults. Does not depend on the engine or HTTP.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool

from quire.core.errors import ContextLengthExceeded, InvalidPrompt, ModelNotFound, NoTokenizer, QuireError, shown
from quire.core.model import ModelSpec
from quire.core.process_memory import trim_heap
from quire.core.sampling import LONGEST_TOKEN, SamplingParams
from quire.engine.model_format import ModelFormat, find_model_format
from quire.engine.open_model import OpenedModel
from quire.engine.stats import EngineInfo
from quire.formats.checkpoint import Checkpoint, CheckpointSource, GenerationDefaults
from quire.output_parsing.reasoning import ReasoningTags
from quire.output_parsing.tool_formats import ToolFormat
from quire.server.admission import AdmissionControl
from quire.server.async_engine import EngineRestarting
from quire.server.batch_store import BatchStore
from quire.server.engine_client import EngineClient, EngineSupervision
from quire.server.engine_state import EngineState
from quire.server.engine_supervisor import Health
from quire.server.fair_shares import FairShares
from quire.server.grammar_precompiler import FairSlots, GrammarPrecompiler
from quire.server.http.request_context import CURRENT_CONTEXT
from quire.server.http.sse import KEEP_ALIVE_S
from quire.server.metrics import Metrics
from quire.server.replicas import ReplicaSupervisor
from quire.server.response_store import ResponseStore
from quire.text.tokenizer import Tokenizer

_LONG_BYTES = 1 << 16  # of a body: its text takes some 50 ms
_LONG_AT_ONCE = 2
_MAX_WAITING = 128  # requests of one client that take no place; each may hold a megabyte
_SHORT_AT_ONCE, _MAX_SHORT_AT_ONCE = 4, 16  # one for each core, within these; half of them for one client
_FEW_SCORES = 4096  # log-probabilities of a response: written in some 5 ms
_TYPICAL_TOKEN = 4  # characters

P = ParamSpec("P")
T = TypeVar("T")


class TokenizerBusy(QuireError):
    """A client has too many requests that tokenize and do not generate: no place in the queue bounds them."""

    status = 429
    code = "tokenizer_busy"
    retry_after_s = 1.0


class TextThreads:
    """Threads for templates, tokenization and log-probabilities. Clients take turns: none takes all threads, however
    many requests it sends. What takes long has threads of its own, so short work does not wait for it."""

    def __init__(self, num_cores: int = 2) -> None:
        num_short = min(max(_SHORT_AT_ONCE, num_cores), _MAX_SHORT_AT_ONCE)
        self._short = FairSlots(num_short, num_short // 2)
        self._long = FairSlots(_LONG_AT_ONCE)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of work on the text of the current request."""
        context = CURRENT_CONTEXT.get()
        client = "" if context is None else context.client
        if context is not None and context.place is None and max(self._num_waiting(client)) >= _MAX_WAITING:
            raise TokenizerBusy(
                f"{_MAX_WAITING} requests of this client wait for their texts to be tokenized; try again soon."
            )
        if context is None or context.num_body_bytes <= _LONG_BYTES:
            return await _run_in_slot(self._short, client, lambda: work(*args, **kwargs))
        return await self._run_long(client, lambda: work(*args, **kwargs))

    def _num_waiting(self, client: str) -> tuple[int, int]:
        return self._short.num_waiting(client), self._long.num_waiting(client)

    async def run_scored(self, num_scores: int, work: Callable[[], T]) -> T:
        """The result of writing a response with this number of log-probabilities: few are written at once."""
        context = CURRENT_CONTEXT.get()
        if num_scores <= _FEW_SCORES:
            return work()
        return await self._run_long("" if context is None else context.client, work)

    async def _run_long(self, client: str, work: Callable[[], T]) -> T:
        def trimmed() -> T:
            try:
                return work()
            finally:
                trim_heap()

        return await _run_in_slot(self._long, client, trimmed)


async def _run_in_slot(slots: FairSlots, client: str, work: Callable[[], T]) -> T:
    await slots.acquire(client)
    running = asyncio.ensure_future(run_in_threadpool(work))
    running.add_done_callback(lambda _: slots.release(client))  # not before: the client may leave
    return await asyncio.shield(running)


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """What a model's files say of it."""

    spec: ModelSpec
    file_format: str  # "gguf" or "safetensors"
    num_bytes: int
    num_parameters: int
    encoding: str  # of most bytes: Q4_1, BF16, …
    sampling: GenerationDefaults


def summarize(checkpoint: Checkpoint) -> ModelSummary:
    return ModelSummary(
        spec=checkpoint.spec,
        file_format="gguf" if checkpoint.source is CheckpointSource.GGUF else "safetensors",
        num_bytes=checkpoint.num_bytes,
        num_parameters=checkpoint.num_parameters,
        encoding=next(iter(checkpoint.encoding_bytes), "unknown"),
        sampling=checkpoint.defaults,
    )


def unknown_model(name: str, names: Iterable[str]) -> ModelNotFound:
    """A refusal that lists the names that are served."""
    here = ", ".join(map(repr, names))
    return ModelNotFound(f"There is no model {shown(name)} here; this server has {here}.", param="model")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model as the APIs show it."""

    name: str
    tokenizer: Tokenizer | None
    chat_template: str | None
    defaults: SamplingParams  # from the model's generation config
    max_model_len: int
    vocab_size: int  # width of the logits; every token id is below it
    created: int  # seconds since 1970
    aliases: tuple[str, ...] = ()
    model_format: ModelFormat = ModelFormat()  # noqa: RUF009  frozen; of tool calls and reasoning
    constrainer: GrammarPrecompiler | None = None  # refuses grammars that do not compile
    text_threads: TextThreads = field(default_factory=TextThreads, compare=False)
    summary: ModelSummary | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    def check_model(self, name: str | None) -> None:
        """Refuse a name that is not served. None means the served model."""
        if name is not None and name not in self.names:
            raise unknown_model(name, self.names)

    def text(self) -> Tokenizer:
        """The tokenizer, where text is needed."""
        if self.tokenizer is None:
            raise NoTokenizer("it takes a prompt of token ids, and cannot chat")
        return self.tokenizer

    def checked_text(self, text: str, param: str = "messages") -> str:
        """The text, if it can fit the context. One that cannot, even with the longest tokens, is not tokenized."""
        self.check_length(-(-len(text) // LONGEST_TOKEN), param)
        return text

    def prompt_ids(
        self, text: str, param: str = "messages", *, add_special_tokens: bool = True, truncated: bool = False
    ) -> list[int]:
        """The ids of a prompt. A text that clearly has more tokens than the context, and will not be truncated, is
        refused before it is tokenized as a whole. Slow: call it on a thread."""
        tokenizer, text = self.text(), self.checked_text(text, param)
        is_long = len(text) > _TYPICAL_TOKEN * self.max_model_len
        if is_long and not truncated and tokenizer.exceeds(text, self.max_model_len):
            self.check_length(2 * self.max_model_len, param)
        return tokenizer.encode(text, add_special_tokens)

    def check_length(self, num_tokens: int, param: str = "messages", *, at_least: bool = True) -> None:
        """Reject a prompt of (at least) `num_tokens` that exceeds the context. A message has at least one token."""
        if num_tokens > self.max_model_len:
            raise ContextLengthExceeded(self.max_model_len, num_tokens, 0, param=param, at_least=at_least)

    def checked_ids(self, ids: list[int], param: str = "prompt") -> list[int]:
        """The ids, if all are in the vocabulary."""
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise InvalidPrompt(
                f"There is no token {shown(wrong)}: this model's ids run from 0 to {self.vocab_size - 1}.", param=param
            )
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of token ids with special tokens; empty without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(ids, skip_special_tokens=False)


def make_served_model(
    opened: OpenedModel,
    max_model_len: int,
    constrainer: GrammarPrecompiler | None,
    *,
    aliases: tuple[str, ...] = (),
    chat_template: str | None = None,
    tool_format: ToolFormat | None = None,
    reasoning_tags: ReasoningTags | None = None,
) -> ServedModel:
    """The model as an engine serves it, or would. The first alias, if there is one, replaces its name.

    Chat template, tool format and reasoning tags given by the operator override those in the model's files.
    """
    own = None if opened.tokenizer is None else opened.tokenizer.chat_template
    template = chat_template or own
    return ServedModel(
        name=aliases[0] if aliases else opened.name,
        tokenizer=opened.tokenizer,
        chat_template=template,
        defaults=opened.default_params,
        max_model_len=max_model_len,
        vocab_size=opened.checkpoint.spec.vocab_size,
        created=int(time.time()),
        aliases=aliases[1:],
        model_format=find_model_format(template, opened.tokenizer, tool_format, reasoning_tags),
        constrainer=constrainer,
        summary=summarize(opened.checkpoint),
        text_threads=TextThreads(os.cpu_count() or 1),
    )


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model in the lists of the APIs. Of several models, some are not loaded."""

    model: ServedModel
    info: EngineInfo | None  # of its engine; None if it has none
    status: str | None = None  # None: it is the only model, and stays loaded
    reason: str | None = None  # why it could not be loaded
    unload_in_s: float | None = None  # if no request comes; None: it stays


@dataclass(slots=True)
class ServerState:
    """The first argument of every handler; the second is the request."""

    engine: EngineClient
    supervisor: EngineSupervision
    admission: AdmissionControl
    metrics: Metrics
    keep_alive_s: float = KEEP_ALIVE_S
    loaded: ServedModel | None = None  # None until the engine is ready for the first time
    responses: ResponseStore = field(default_factory=ResponseStore)  # of the Responses API
    followed: FairShares = field(default_factory=FairShares)  # bytes of stored responses that are being streamed
    list_models: Callable[[], Sequence[ListedModel]] | None = None  # with several models
    replicas: ReplicaSupervisor | None = None  # of several engines of one model
    batches: BatchStore | None = None  # and files; None: there is no folder for them
    watchers: FairShares = field(default_factory=FairShares)  # streams of the engine's state
    engine_state: EngineState = field(init=False)

    def __post_init__(self) -> None:
        self.engine_state = EngineState(lambda what, number: self.engine.query(what, number), time.monotonic)

    @property
    def model(self) -> ServedModel:
        if self.loaded is None:
            raise EngineRestarting("The model is being loaded; try again in a moment.")
        return self.loaded

    @property
    def models(self) -> Sequence[ListedModel]:
        """All models of this server."""
        return [ListedModel(self.model, self.engine.info)] if self.list_models is None else self.list_models()

    def find_model(self, name: str) -> ListedModel:
        models = self.models
        found = next((listed for listed in models if name in listed.model.names), None)
        if found is None:
            raise unknown_model(name, [each for listed in models for each in listed.model.names])
        return found

    @property
    def health(self) -> Health:
        """The supervisor's view, but STARTING until the model of a ready engine is known here."""
        health = self.supervisor.health
        return Health.STARTING if health is Health.READY and self.loaded is None else health

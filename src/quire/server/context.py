"""What every endpoint needs: the facts of what is served, the engine behind it, and those who watch over both.

The facts of what is served: names, text, limits, defaults. Knows no engine, and no HTTP.
"""

import time
from dataclasses import dataclass

from quire.core.errors import ContextLengthExceeded, InvalidPrompt, ModelNotFound, NoTokenizer, shown
from quire.core.ids import LONGEST_TOKEN
from quire.core.sampling import SamplingParams
from quire.engine.open_model import OpenedModel
from quire.engine.stats import EngineInfo
from quire.output_parsing.reasoning import ReasoningTags
from quire.output_parsing.tool_formats import ToolFormat
from quire.server.admission import AdmissionControl
from quire.server.async_engine import AsyncEngine, EngineRestarting
from quire.server.engine_supervisor import Health, Supervisor
from quire.server.grammar_precompiler import GrammarPrecompiler
from quire.server.http.sse import KEEP_ALIVE_S
from quire.server.metrics import Metrics
from quire.server.model_format import ModelFormat, find_voice
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model, as clients may ask about it."""

    name: str
    tokenizer: Tokenizer | None
    chat_template: str | None
    defaults: SamplingParams  # what the model's makers recommend
    max_model_len: int
    vocab_size: int  # the width of the logits: token ids run below it
    created: int  # seconds since 1970
    aliases: tuple[str, ...] = ()
    voice: ModelFormat = ModelFormat()  # noqa: RUF009  frozen; how the model speaks of thoughts and tools
    constrainer: GrammarPrecompiler | None = None  # who sees to it that a grammar can be followed

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    def check_model(self, name: str | None) -> None:
        """None asks for whatever is served."""
        if name is not None and name not in self.names:
            here = ", ".join(map(repr, self.names))
            raise ModelNotFound(f"There is no model {shown(name)} here; this server has {here}.", param="model")

    def text(self) -> Tokenizer:
        """The tokenizer, where text is needed."""
        if self.tokenizer is None:
            raise NoTokenizer("it takes a prompt of token ids, and cannot chat")
        return self.tokenizer

    def readable(self, text: str, param: str = "messages") -> str:
        """A text that may fit. One that cannot, however long its tokens, is not read for nothing: that takes memory."""
        self.check_least(-(-len(text) // LONGEST_TOKEN), param)
        return text

    def check_least(self, num_tokens: int, param: str = "messages", *, at_least: bool = True) -> None:
        """A prompt of so many tokens, or of more, may fit. A message takes one at least."""
        if num_tokens > self.max_model_len:
            raise ContextLengthExceeded(self.max_model_len, num_tokens, 0, param=param, at_least=at_least)

    def checked_ids(self, ids: list[int], param: str = "prompt") -> list[int]:
        """Token ids that this model has."""
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise InvalidPrompt(
                f"There is no token {shown(wrong)}: this model's ids run from 0 to {self.vocab_size - 1}.", param=param
            )
        return ids

    def spelled(self, ids: list[int]) -> str:
        """The text of token ids, special ones too; nothing where there is no tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(ids, skip_special_tokens=False)


def served_from(
    opened: OpenedModel,
    facts: EngineInfo,
    constrainer: GrammarPrecompiler,
    *,
    aliases: tuple[str, ...] = (),
    chat_template: str | None = None,
    tool_format: ToolFormat | None = None,
    reasoning_tags: ReasoningTags | None = None,
) -> ServedModel:
    """What an engine over this model can do for clients. With aliases, the first is the name it goes by.

    Template, format and tags are what an operator says; else they are what the model's files show.
    """
    own = None if opened.tokenizer is None else opened.tokenizer.chat_template
    template = chat_template or own
    return ServedModel(
        name=aliases[0] if aliases else opened.name,
        tokenizer=opened.tokenizer,
        chat_template=template,
        defaults=opened.default_params,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        created=int(time.time()),
        aliases=aliases[1:],
        voice=find_voice(template, opened.tokenizer, tool_format, reasoning_tags),
        constrainer=constrainer,
    )


@dataclass(slots=True)
class ServerState:
    """Endpoints are functions of a desk and a request."""

    service: AsyncEngine
    supervisor: Supervisor
    admission: AdmissionControl
    metrics: Metrics
    keep_alive_s: float = KEEP_ALIVE_S
    known: ServedModel | None = None  # once the engine has said what it can do

    @property
    def served(self) -> ServedModel:
        if self.known is None:
            raise EngineRestarting("The model is being loaded; ask again in a moment.")
        return self.known

    @property
    def health(self) -> Health:
        """As the supervisor has it; but an engine that has just come serves nobody before its facts are known here."""
        health = self.supervisor.health
        return Health.STARTING if health is Health.READY and self.known is None else health

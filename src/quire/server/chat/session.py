"""A dialogue under way: what its continuations say, as events. The pipeline that all chat-like surfaces share.

dialogue ──render──▶ prompt ──submit──▶ deltas ──parse──▶ Text, Thought, ToolStart, ToolArguments per choice
"""

import uuid
from dataclasses import replace
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool

from quire.engine.outputs import CompletionOutput, Delta, RequestOutput
from quire.output_parsing.events import OutputEvent, OutputParser, PlainText, ReasoningText, ToolArguments, ToolStart
from quire.server.async_engine import AsyncEngine
from quire.server.chat.prompt import ChatPrompt, RenderedPrompt, final_text
from quire.server.context import ServedModel
from quire.server.prompt_group import PromptGroup
from quire.server.request.params import GenerationRequest, clamped, constrained, shortened


class ChatDelta(NamedTuple):
    """What one choice said with one delta."""

    choice: int
    events: list[OutputEvent]
    delta: Delta


class ToolCall:
    """A call of a tool, as far as it has been said."""

    __slots__ = ("_pieces", "id", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.id = f"call_{uuid.uuid4().hex[:24]}"
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        self._pieces.append(text)

    @property
    def arguments(self) -> str:
        return "".join(self._pieces)


class ChoiceOutput:
    """All that one choice said, so far."""

    __slots__ = ("calls", "events")

    def __init__(self) -> None:
        self.events: list[OutputEvent] = []  # in the order they were said
        self.calls: dict[int, ToolCall] = {}

    def add(self, event: OutputEvent) -> None:
        self.events.append(event)
        match event:
            case ToolStart(index, name):
                self.calls[index] = ToolCall(name)
            case ToolArguments(index, text):
                self.calls[index].add(text)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, PlainText))

    @property
    def thought(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, ReasoningText))


class ChatResult(NamedTuple):
    """A whole answer: the engine's output, and what each choice said."""

    output: RequestOutput
    said: list[ChoiceOutput]


class ChatStream:
    """Whoever makes one must `leave` it, however it ends."""

    __slots__ = ("_chorus", "_dialogue", "_parsers", "_prefix", "_served", "num_choices", "prompt_ids", "said")

    def __init__(
        self,
        service: AsyncEngine,
        served: ServedModel,
        dialogue: ChatPrompt,
        wanted: GenerationRequest,
        prompt: RenderedPrompt,
        prefix: str,
    ) -> None:
        self._served = served
        self._dialogue = dialogue
        self._prefix = prefix
        self.num_choices = wanted.params.n
        self.prompt_ids = prompt.ids
        self.said = [ChoiceOutput() for _ in range(self.num_choices)]
        self._parsers: list[OutputParser] = [dialogue.parser(served, prompt.text) for _ in range(self.num_choices)]
        self._chorus = PromptGroup(service, [prompt.ids], wanted, streaming=wanted.stream)

    @classmethod
    async def begin(
        cls,
        service: AsyncEngine,
        served: ServedModel,
        dialogue: ChatPrompt,
        wanted: GenerationRequest,
        *,
        truncate: int | None = None,
        echo: bool = False,
        clamp: bool = False,
    ) -> "ChatStream":
        """Render, constrain and submit. With `echo`, a message that the assistant had begun is said again.

        With `clamp`, an answer that may be longer than the context allows is as long as it allows.
        """
        prompt = await run_in_threadpool(dialogue.rendered, served)
        wanted = await constrained(wanted, dialogue.grammar(served, wanted.grammar, prompt.text), served)
        if served.voice.keeps_special_tokens(tools=bool(dialogue.callable_tools)):
            wanted = replace(wanted, params=replace(wanted.params, skip_special_tokens=False))
        prompt = RenderedPrompt(prompt.text, shortened(prompt.ids, truncate, wanted, served))
        wanted = clamped(wanted, len(prompt.ids), served) if clamp else wanted
        return cls(service, served, dialogue, wanted, prompt, final_text(dialogue) if echo else "")

    def opening(self) -> list[OutputEvent]:
        """What each choice begins with, before the model says anything."""
        return [PlainText(self._prefix)] if self._prefix else []

    async def hear(self) -> ChatDelta | RequestOutput:
        """What somebody said; the last is the whole output."""
        _, news = await self._chorus.hear()
        if isinstance(news, RequestOutput):
            return news
        return ChatDelta(news.index, self._heard(news.index, news.text, ended=news.finish_reason is not None), news)

    async def whole(self) -> ChatResult:
        """All of it, when all have ended."""
        [output] = await self._chorus.outputs()
        for choice in output.outputs:
            self._heard(choice.index, choice.text, ended=True)
        return ChatResult(output, self.said)

    def finish_reason(self, choice: CompletionOutput | Delta) -> str | None:
        """As OpenAI has it: a turn that ended in calls ended for them, unless the client had named the tool itself."""
        called = self.said[choice.index].calls and self._dialogue.tool_choice.mode != "named"
        return "tool_calls" if called and choice.finish_reason == "stop" else choice.finish_reason

    async def num_thought_tokens(self) -> int:
        """What the thoughts of all choices take."""
        thoughts = [thought for said in self.said if (thought := said.thought)]
        if not thoughts:
            return 0
        encoded = await run_in_threadpool(self._served.text().encode_batch, thoughts, add_special_tokens=False)
        return sum(map(len, encoded))

    def leave(self) -> None:
        self._chorus.leave()

    def _heard(self, index: int, text: str, *, ended: bool) -> list[OutputEvent]:
        said, parser = self.said[index], self._parsers[index]
        events = parser.push(text) if text else []
        if ended:
            events = events + parser.finish()
        for event in events:
            said.add(event)
        return events

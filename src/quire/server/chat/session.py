"""Chat stream: renders and submits a chat prompt, and parses the output of each choice. Shared by all chat APIs.

ChatPrompt --render--> text, token ids --submit--> deltas --parse--> output events per choice
"""

import uuid
from dataclasses import replace
from typing import NamedTuple

import msgspec
from starlette.concurrency import run_in_threadpool

from quire.engine.model_format import OutputGrammar
from quire.engine.outputs import CompletionOutput, Delta, RequestOutput
from quire.output_parsing.events import OutputEvent, OutputParser, PlainText, ReasoningText, ToolArguments, ToolStart
from quire.server.chat.prompt import ChatPrompt
from quire.server.context import ServedModel
from quire.server.engine_client import EngineClient
from quire.server.prompt_group import submit
from quire.server.request.params import (
    GenerationRequest,
    apply_grammar,
    clamp_max_tokens,
    relax_grammar,
    truncate_prompt,
)
from quire.server.request_stream import RequestStream


class ChatDelta(NamedTuple):
    """A delta of one choice and its output events."""

    delta: Delta
    events: list[OutputEvent]


class ToolCall:
    """A tool call and its arguments so far."""

    __slots__ = ("_parts", "id", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.id = f"call_{uuid.uuid4().hex[:24]}"
        self._parts: list[str] = []

    def append(self, arguments: str) -> None:
        self._parts.append(arguments)

    @property
    def arguments(self) -> str:
        return "".join(self._parts)


def parsed_arguments(text: str) -> dict[str, object]:
    """The arguments of a call as an object. Truncated or invalid JSON is returned as text under `invalid_json`."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, object])
    except (ValueError, RecursionError):
        return {"invalid_json": text}


class ChoiceOutput:
    """The events of one choice so far, in order, and its tool calls."""

    __slots__ = ("calls", "events")

    def __init__(self) -> None:
        self.events: list[OutputEvent] = []
        self.calls: dict[int, ToolCall] = {}

    def add(self, event: OutputEvent) -> None:
        self.events.append(event)
        match event:
            case ToolStart(index, name):
                self.calls[index] = ToolCall(name)
            case ToolArguments(index, text):
                self.calls[index].append(text)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, PlainText))

    @property
    def reasoning(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, ReasoningText))


class ChatResult(NamedTuple):
    """The engine's output of a finished chat, and the parsed output of each choice."""

    output: RequestOutput
    choices: list[ChoiceOutput]


async def start_chat(
    engine: EngineClient,
    model: ServedModel,
    prompt: ChatPrompt,
    generation: GenerationRequest,
    *,
    truncate: int | None = None,
    clamp: bool = False,
) -> "ChatStream":
    """Renders, constrains and submits a chat.

    `truncate`: the number of prompt tokens to keep. `clamp`: a max_tokens beyond the context is reduced to fit.
    """

    def render() -> tuple[str, list[int], GenerationRequest, OutputGrammar]:
        text = prompt.render(model)
        answer = replace(generation, grammar=None) if prompt.forces_call else relax_grammar(generation)
        grammar = prompt.grammar(model, answer.grammar, text)  # first: its errors name the tool that is too large
        ids = model.prompt_ids(text, add_special_tokens=False, truncated=truncate is not None)
        return text, ids, answer, grammar

    text, ids, answer, output = await model.text_threads.run(render)
    generation = await apply_grammar(answer, output.grammar, model, output.not_enforced)
    if model.model_format.keeps_special_tokens(tools=bool(prompt.callable_tools)):
        generation = replace(generation, params=replace(generation.params, skip_special_tokens=False))
    ids = truncate_prompt(ids, truncate, generation, model)
    if clamp:
        generation = clamp_max_tokens(generation, len(ids), model)
    tools, parallel = prompt.callable_tools, prompt.parallel_tool_calls
    parsers = [
        model.model_format.parser(tools=tools, parallel=parallel, prompt=text) for _ in range(generation.params.n)
    ]
    stream = submit(engine, ids, generation, streaming=generation.stream)
    return ChatStream(model, prompt, ids, parsers, stream)


class ChatStream:
    """A submitted chat. The caller must `close` it, however it ends."""

    __slots__ = ("_model", "_parsers", "_prompt", "_stream", "choices", "prompt_ids")

    def __init__(
        self,
        model: ServedModel,
        prompt: ChatPrompt,
        prompt_ids: list[int],
        parsers: list[OutputParser],
        stream: RequestStream,
    ) -> None:
        self._model = model
        self._prompt = prompt
        self._parsers = parsers
        self._stream = stream
        self.prompt_ids = prompt_ids
        self.choices = [ChoiceOutput() for _ in parsers]

    @property
    def started(self) -> bool:
        """Whether the first token has been generated."""
        return self._stream.state.metrics.first_token_s is not None

    async def receive(self) -> ChatDelta | RequestOutput:
        """The next delta of any choice; at the end, the whole output."""
        update = await self._stream.receive()
        if isinstance(update, RequestOutput):
            return update
        return ChatDelta(update, self._parse(update.index, update.text, ended=update.finish_reason is not None))

    async def result(self) -> ChatResult:
        """The whole output, once all choices have finished."""
        output = await self._stream.output()
        for choice in output.outputs:
            self._parse(choice.index, choice.text, ended=True)
        return ChatResult(output, self.choices)

    def finish_reason(self, choice: CompletionOutput | Delta) -> str | None:
        """OpenAI's reason: `tool_calls` after a call, unless the client had named the tool itself."""
        calls = self.choices[choice.index].calls and self._prompt.tool_choice.mode != "named"
        return "tool_calls" if calls and choice.finish_reason == "stop" else choice.finish_reason

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the cache; known with the first delta."""
        return self._stream.state.metrics.num_cached_tokens

    async def num_reasoning_tokens(self) -> int:
        """Reasoning tokens of all choices, counted by encoding the text again."""
        texts = [text for choice in self.choices if (text := choice.reasoning)]
        if not texts:
            return 0
        encoded = await run_in_threadpool(self._model.text().encode_batch, texts, add_special_tokens=False)
        return sum(map(len, encoded))

    def close(self) -> None:
        self._stream.close()

    def _parse(self, index: int, text: str, *, ended: bool) -> list[OutputEvent]:
        parser = self._parsers[index]
        events = parser.push(text) if text else []
        if ended:
            events = events + parser.finish()
        for event in events:
            self.choices[index].add(event)
        return events

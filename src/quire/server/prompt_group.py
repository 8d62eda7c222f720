"""Prompt group: several prompts of one HTTP request as one stream. A single prompt is a plain `RequestStream`.

Also the embeddings of several prompts, in their order; and the prompt for the middle of a text, in the order that
Qwen2.5-Coder, StarCoder, DeepSeek-Coder, CodeGemma and Code Llama were trained on: prefix, suffix, middle.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from quire.core.errors import InvalidParameter, InvalidPrompt
from quire.core.ids import FloatArray
from quire.engine.messages import RequestOptions
from quire.engine.outputs import EMBEDDING, RequestOutput, unit
from quire.server.context import ServedModel
from quire.server.engine_client import EngineClient
from quire.server.request.params import GenerationRequest, keeps_start, prompt_list, truncate_prompt
from quire.server.request.schema import EmbeddingBody
from quire.server.request_stream import RequestStream, StreamItem
from quire.text.tokenizer import Tokenizer


def submit(engine: EngineClient, ids: list[int], generation: GenerationRequest, *, streaming: bool) -> RequestStream:
    """Submit one prompt. The caller must `close` the stream, however it ends."""
    assert generation.grammar == generation.params.grammar, "a grammar must be precompiled first"
    return engine.submit(
        ids,
        generation.params,
        options=generation.options,
        streaming=streaming,
        without_tokens=generation.without_tokens,
    )


class PromptGroup:
    """The caller must `close` it, however it ends."""

    __slots__ = ("_streams", "_waiting")

    def __init__(
        self, engine: EngineClient, prompts: Sequence[list[int]], generation: GenerationRequest, *, streaming: bool
    ) -> None:
        self._streams: list[RequestStream] = []
        self._waiting: dict[asyncio.Future[StreamItem], int] = {}
        try:
            for ids in prompts:
                self._streams.append(submit(engine, ids, generation, streaming=streaming))
        except BaseException:
            self.close()
            raise
        if len(self._streams) > 1:
            self._waiting = {asyncio.ensure_future(each.receive()): place for place, each in enumerate(self._streams)}

    async def receive(self) -> tuple[int, StreamItem]:
        """The next item of any prompt, and its place. The last item of each prompt is its output; errors are raised."""
        if len(self._streams) == 1:  # without a task per item
            return 0, await self._streams[0].receive()
        done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
        first = min(done, key=self._waiting.__getitem__)
        place = self._waiting.pop(first)
        item = first.result()
        if not isinstance(item, RequestOutput):
            self._waiting[asyncio.ensure_future(self._streams[place].receive())] = place
        return place, item

    async def outputs(self) -> list[RequestOutput]:
        """The outputs of all prompts, in their order, when all have finished."""
        outputs: dict[int, RequestOutput] = {}
        while len(outputs) < len(self._streams):
            place, item = await self.receive()
            if isinstance(item, RequestOutput):
                outputs[place] = item
        return [outputs[place] for place in sorted(outputs)]

    def close(self) -> None:
        """Abort what is unfinished. Idempotent."""
        for waiting in self._waiting:
            if not waiting.cancel() and not waiting.cancelled():
                waiting.exception()  # retrieved: one error is the response to the whole request
        for stream in self._streams:
            stream.close()


MAX_INPUTS = 2048  # OpenAI's limit
_AT_ONCE = 32  # inputs of one request in the engine at once: enough to fill a step, and others still get a share


def _options(body: EmbeddingBody) -> RequestOptions:
    names = ("priority", "cache_salt", "timeout_s")  # not the tenant, which follows from the API key
    return RequestOptions(**{name: value for name in names if (value := getattr(body, name)) is not None})


def input_ids(body: EmbeddingBody, model: ServedModel) -> list[list[int]]:
    """The inputs of a body as token ids. Encoding long texts is slow: call it on a thread."""
    if body.dimensions is not None and body.dimensions < 1:
        raise InvalidParameter(f"dimensions is {body.dimensions}; the least is 1.", param="dimensions")
    generation = GenerationRequest(
        params=EMBEDDING,
        options=_options(body),
        grammar=None,
        stream=False,
        without_tokens=True,
        keeps_start=keeps_start(body.truncation_side),
    )
    inputs = []
    for place, text in enumerate(prompt_list(body.input, param="input", most=MAX_INPUTS)):
        special = body.add_special_tokens is not False
        if isinstance(text, str):
            truncated = body.truncate_prompt_tokens is not None
            whole = model.prompt_ids(text, "input", add_special_tokens=special, truncated=truncated)
        else:
            whole = model.checked_ids(text, "input")
        if not whole:
            raise InvalidPrompt(f"input {place} is empty: there is nothing to embed.", param="input")
        ids = truncate_prompt(whole, body.truncate_prompt_tokens, generation, model)
        model.check_length(len(ids), "input", at_least=False)
        inputs.append(ids)
    return inputs


async def embed(engine: EngineClient, inputs: Sequence[list[int]], body: EmbeddingBody) -> list[FloatArray]:
    """The vectors of all inputs, `_AT_ONCE` at a time, in order. One failure fails the request."""
    options, dimensions = _options(body), body.dimensions
    vectors: list[FloatArray] = []
    waiting = deque(inputs)
    calls: deque[RequestStream] = deque()
    try:
        while waiting or calls:
            while waiting and len(calls) < _AT_ONCE:
                calls.append(engine.submit(waiting.popleft(), EMBEDDING, options=options, pooled=True))
            output = await calls[0].output()
            assert output.embedding is not None, output.request_id
            vectors.append(_truncate(output.embedding, dimensions))
            calls.popleft()
    finally:
        for call in calls:
            call.close()
    return vectors


def _truncate(vector: FloatArray, dimensions: int | None) -> FloatArray:
    """The first dimensions, normalized to length 1."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise InvalidParameter(
            f"dimensions is {dimensions}, but this model's embeddings have {len(vector)}.", param="dimensions"
        )
    return unit(vector[:dimensions])


_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
_FILE_SEPARATORS = ("<|file_sep|>", "<file_sep>", "<file-sep>")


class OtherFile(NamedTuple):
    """Text of another file, as context."""

    name: str
    text: str


def fills_in_middle(tokenizer: Tokenizer | None) -> bool:
    """Whether a model has the tokens."""
    return tokenizer is not None and _marks(tokenizer) is not None


def middle_ids(
    model: ServedModel, before: str, after: str, *, param: str, others: Sequence[OtherFile] = ()
) -> list[int]:
    """The prompt for the text between `before` and `after`. Slow for long texts: call it on a thread."""
    tokenizer = model.text()
    marks = _marks(tokenizer)
    if marks is None:
        raise InvalidParameter(
            f"{param} needs a model with fill-in-the-middle tokens, which {model.name} does not have; omit it, or send "
            f"the text that comes after as part of the prompt.",
            param=param,
        )
    separator = next(
        (each for each in _FILE_SEPARATORS if tokenizer.token_to_id(each) is not None), "\n\n--- file ---\n"
    )
    context = "".join(f"{separator}{other.name}\n{other.text}\n" for other in others)
    model.checked_text(context + before + after, param)
    parts = tokenizer.encode_batch([context, before, after], add_special_tokens=False)
    begin = tokenizer.encode("", add_special_tokens=True)
    return [*begin, *parts[0], marks[0], *parts[1], marks[1], *parts[2], marks[2]]


def _marks(tokenizer: Tokenizer) -> tuple[int, int, int] | None:
    for names in _TOKENS:
        first, second, third = (tokenizer.token_to_id(name) for name in names)
        if first is not None and second is not None and third is not None:
            return first, second, third
    return None

"""POST /v1/completions: the endpoint, the JSON body, and the stream chunks. Choices are numbered across the prompts."""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidPrompt
from quire.engine.outputs import CompletionOutput, Delta, RequestOutput
from quire.server.chat.logprobs import CompletionLogprobs, TokenText, prompt_logprobs_json
from quire.server.context import ServedModel, ServerState
from quire.server.http.errors import rename_error_params
from quire.server.http.sse import DONE, Events, json_response, stream, until_disconnect
from quire.server.openai.chunks import ChunkHeader, ChunkWriter, running_usage, usage
from quire.server.prompt_group import PromptGroup, middle_ids
from quire.server.request.decode import read
from quire.server.request.params import (
    GenerationRequest,
    allow_minus_one,
    completion_generation,
    constrain,
    prompt_list,
    truncate_prompt,
)
from quire.server.request.schema import CompletionBody
from quire.text.detokenizer import decode_whole

Body = dict[str, object]

MAX_PROMPTS = 128
_PARAM_NAMES = {"messages": "prompt"}


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """One prompt, and its text if `echo` is set."""

    ids: list[int]
    echo: str | None


async def completions(state: ServerState, request: Request) -> Response:
    body = await read(request, CompletionBody)
    model = state.model
    model.check_model(body.model)
    with rename_error_params(_PARAM_NAMES):
        allow_minus_one(body)
        generation = completion_generation(body, model)
        generation = await constrain(generation, model)
        prompts = await model.text_threads.run(_prompts, body, generation, model)
        token_text = TokenText(model.tokenizer, as_ids=generation.tokens_as_ids)
        response = CompletionResponse(ChunkHeader(model.name, "cmpl"), prompts, generation, token_text)
        at_once = generation.stream and generation.params.prompt_logprobs is not None
        all_ids = [prompt.ids for prompt in prompts]
        group = PromptGroup(state.engine, all_ids, generation, streaming=generation.stream and not at_once)
        if generation.stream:
            events = _events(group, response, generation, len(prompts), at_once)
            return await stream(request, events, group.close, state.keep_alive_s)
        try:
            outputs = await until_disconnect(request, group.outputs())
            num_scores = sum(output.num_scores for output in outputs)
            return await model.text_threads.run_scored(num_scores, lambda: json_response(response.whole(outputs)))
        finally:
            group.close()


def _prompts(body: CompletionBody, generation: GenerationRequest, model: ServedModel) -> list[CompletionPrompt]:
    """The prompts as token ids. Encoding long texts is slow: call it on a thread."""
    prompts = []
    for prompt in prompt_list(body.prompt, param="prompt", most=MAX_PROMPTS):
        special = body.add_special_tokens is not False
        if body.suffix:
            whole = _with_suffix(prompt, body.suffix, model)
        elif isinstance(prompt, str):
            truncated = body.truncate_prompt_tokens is not None
            whole = model.prompt_ids(prompt, "prompt", add_special_tokens=special, truncated=truncated)
        else:
            whole = model.checked_ids(prompt)
        ids = truncate_prompt(whole, body.truncate_prompt_tokens, generation, model)
        echo = None
        if body.echo:
            if isinstance(prompt, str) and len(ids) == len(whole):
                echo = prompt
            else:  # a character that the prompt starts and does not finish belongs to the output
                echo = "" if model.tokenizer is None else decode_whole(model.tokenizer, ids)
        prompts.append(CompletionPrompt(ids, echo))
    return prompts


def _with_suffix(prompt: str | list[int], suffix: str, model: ServedModel) -> list[int]:
    if not isinstance(prompt, str):
        raise InvalidPrompt("suffix needs a prompt of text, not of token ids.", param="prompt")
    return middle_ids(model, prompt, suffix, param="suffix")


async def _events(
    group: PromptGroup, response: "CompletionResponse", generation: GenerationRequest, num_prompts: int, at_once: bool
) -> Events:
    outputs: dict[int, RequestOutput] = {}
    if at_once:
        outputs = dict(enumerate(await group.outputs()))
        yield response.whole_as_chunks([*outputs.values()])
    while len(outputs) < num_prompts:
        place, update = await group.receive()
        if isinstance(update, RequestOutput):
            outputs[place] = update
        elif chunk := response.chunk(place, update):
            yield chunk
    if generation.include_usage:
        yield response.usage_chunk(list(outputs.values()))
    yield DONE


class CompletionResponse:
    """The JSON of one completion."""

    def __init__(
        self, header: ChunkHeader, prompts: list[CompletionPrompt], generation: GenerationRequest, token_text: TokenText
    ) -> None:
        self._header = header
        self._prompts = prompts
        self._generation = generation
        self._token_text = token_text
        head = header.head("text_completion")
        self._writer = ChunkWriter(head, b'"text":', b',"logprobs":null,"finish_reason":null}')
        self._has_logprobs = generation.params.logprobs is not None
        self._text_only = not (self._has_logprobs or generation.return_token_ids or generation.continuous_usage)
        # Deltas without text are sent if tokens have no text at all, or if each chunk counts the tokens.
        self._sends_empty_text = generation.continuous_usage or not token_text.has_text
        self._streamed: dict[int, _StreamedChoice] = {}
        self._num_prompt = sum(len(prompt.ids) for prompt in prompts)
        self._num_tokens = 0

    def whole(self, outputs: list[RequestOutput]) -> Body:
        return {
            **self._header.head("text_completion"),
            "choices": self._choices(outputs),
            "usage": self._usage(outputs),
        }

    def whole_as_chunks(self, outputs: list[RequestOutput]) -> bytes:
        """A stream with logprobs of the prompt: they are known at the end only."""
        chunks = []
        num_tokens = 0
        sequences = [each for output in outputs for each in output.outputs]
        for choice, output in zip(self._choices(outputs), sequences, strict=True):
            num_tokens += 0 if self._generation.without_tokens else len(output.token_ids)
            chunks.append(self._writer.choice(choice, self._running_usage(num_tokens)))
        return b"".join(chunks)

    def chunk(self, place: int, delta: Delta) -> bytes:
        """The chunk of a delta, or nothing. The finish reason comes with the last text."""
        index = place * self._generation.params.n + delta.index
        choice = self._streamed.get(index)
        if choice is None:
            choice = self._streamed[index] = _StreamedChoice(self._new_logprobs(self._prompts[place]))
            choice.text = self._prompts[place].echo or ""
        if not self._generation.without_tokens:
            choice.text += delta.text
            if not self._text_only:
                self._num_tokens += len(delta.token_ids)
                choice.token_ids += delta.token_ids
                choice.logprobs.add(delta.logprobs)
        if delta.finish_reason is None and not choice.text and not self._sends_empty_text:
            return b""
        text, choice.text = choice.text, ""
        if self._text_only and delta.finish_reason is None:
            return self._writer.text(index, text)
        return self._full_chunk(index, text, choice, delta, self._prompts[place].ids)

    def usage_chunk(self, outputs: list[RequestOutput]) -> bytes:
        return self._writer.last({"usage": self._usage(outputs)})

    def _full_chunk(
        self, index: int, text: str, choice: "_StreamedChoice", delta: Delta, prompt_ids: list[int]
    ) -> bytes:
        choice.num_sent += len(text)
        ended = delta.finish_reason is not None
        body: Body = {
            "index": index,
            "text": text,
            "logprobs": choice.logprobs.take(choice.num_sent, ended=ended) if self._has_logprobs else None,
            "finish_reason": self._finish_reason(delta.finish_reason) if ended else None,
        }
        if ended:
            body["stop_reason"] = None if self._generation.without_tokens else delta.stop_reason
        if self._generation.return_token_ids:
            body["token_ids"], choice.token_ids = choice.token_ids, []
            if not choice.has_chunk:
                body["prompt_token_ids"] = prompt_ids
        choice.has_chunk = True
        return self._writer.choice(body, self._running_usage(self._num_tokens))

    def _running_usage(self, num_tokens: int) -> Body | None:
        return {"usage": running_usage(self._num_prompt, num_tokens)} if self._generation.continuous_usage else None

    def _choices(self, outputs: list[RequestOutput]) -> list[Body]:
        return [
            self._choice(place * self._generation.params.n + each.index, self._prompts[place], output, each)
            for place, output in enumerate(outputs)
            for each in output.outputs
        ]

    def _choice(self, index: int, prompt: CompletionPrompt, request: RequestOutput, output: CompletionOutput) -> Body:
        dropped = self._generation.without_tokens
        text = (prompt.echo or "") + ("" if dropped else output.text)
        choice: Body = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(prompt, request, output, len(text)) if self._has_logprobs else None,
            "finish_reason": self._finish_reason(output.finish_reason),
            "stop_reason": None if dropped else output.stop_reason,
        }
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_json(request.prompt_logprobs)
        if self._generation.return_token_ids:
            choice.update(prompt_token_ids=prompt.ids, token_ids=[] if dropped else output.token_ids)
        return choice

    def _logprobs(
        self, prompt: CompletionPrompt, request: RequestOutput, output: CompletionOutput, num_characters: int
    ) -> Body:
        logprobs = self._new_logprobs(prompt)
        if prompt.echo is not None:
            logprobs.echo(prompt.echo, prompt.ids, request.prompt_logprobs or [])
        if not self._generation.without_tokens:
            logprobs.add(output.logprobs or [])
        return logprobs.take(num_characters, ended=True)

    def _new_logprobs(self, prompt: CompletionPrompt) -> CompletionLogprobs:
        skips = self._generation.params.skip_special_tokens
        detokenizer = None
        if self._has_logprobs:
            detokenizer = self._token_text.detokenizer(prompt.ids, skip_special_tokens=skips)
        return CompletionLogprobs(self._token_text, detokenizer, len(prompt.echo or ""))

    def _finish_reason(self, reason: str | None) -> str | None:
        return "length" if self._generation.without_tokens else reason

    def _usage(self, outputs: list[RequestOutput]) -> Body:
        return usage(outputs, without_tokens=self._generation.without_tokens)


class _StreamedChoice:
    """A choice of a stream: the text, token ids and logprobs that no chunk holds yet."""

    __slots__ = ("has_chunk", "logprobs", "num_sent", "text", "token_ids")

    def __init__(self, logprobs: CompletionLogprobs) -> None:
        self.logprobs = logprobs
        self.text = ""
        self.num_sent = 0  # characters
        self.token_ids: list[int] = []
        self.has_chunk = False

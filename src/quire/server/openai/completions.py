"""POST /v1/completions.

Writes the answers of completions: whole, and chunk by chunk. Choices are numbered prompt by prompt.
"""

from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.outputs import CompletionOutput, Delta, RequestOutput
from quire.server.context import ServedModel, ServerState
from quire.server.http.errors import called
from quire.server.http.sse import DONE, Events, json_response, stream, unless_gone
from quire.server.openai.chunks import (
    ChunkHeader,
    ChunkWriter,
    CompletionScores,
    TokenText,
    prompt_scores,
    running_usage,
    usage,
)
from quire.server.prompt_group import PromptGroup
from quire.server.request.decode import read
from quire.server.request.params import GenerationRequest, completion_wanted, constrained, listed, shortened
from quire.server.request.schema import CompletionBody
from quire.text.detokenizer import decode_whole

Body = dict[str, object]


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """One prompt, and its text if that is to be repeated."""

    ids: list[int]
    echo: str | None


class CompletionResponse:
    """The bodies of one answer."""

    def __init__(
        self, label: ChunkHeader, prompts: list[CompletionPrompt], wanted: GenerationRequest, spelling: TokenText
    ) -> None:
        self._label = label
        self._prompts = prompts
        self._wanted = wanted
        self._spelling = spelling
        self._frames = ChunkWriter(label.head("text_completion"), b'"text":', b',"logprobs":null,"finish_reason":null}')
        self._scored = wanted.params.logprobs is not None
        self._bare = not self._scored and not wanted.return_token_ids and not wanted.continuous_usage
        # Where a token has no text, or everybody's number of tokens is asked for, each is told of as it comes.
        self._tells_silence = wanted.continuous_usage or not spelling.has_text
        self._spoken: dict[int, _Choice] = {}
        self._num_prompt = sum(len(prompt.ids) for prompt in prompts)
        self._num_tokens = 0

    def whole(self, outputs: list[RequestOutput]) -> Body:
        return {
            **self._label.head("text_completion"),
            "choices": self._choices(outputs),
            "usage": self._usage(outputs),
        }

    def whole_as_chunks(self, outputs: list[RequestOutput]) -> bytes:
        """Where the scores of a prompt are to be streamed: they are known when all is."""
        chunks = []
        num_tokens = 0
        for choice, output in zip(self._choices(outputs), _continuations(outputs), strict=True):
            num_tokens += 0 if self._wanted.without_tokens else len(output.token_ids)
            chunks.append(self._frames.choice(choice, self._running(num_tokens)))
        return b"".join(chunks)

    def chunks(self, place: int, delta: Delta) -> bytes:
        """The reason comes with the last text."""
        index = place * self._wanted.params.n + delta.index
        choice = self._spoken.get(index)
        if choice is None:
            choice = self._spoken[index] = _Choice(self._answer_scores(self._prompts[place]))
            choice.text = self._prompts[place].echo or ""
        if not self._wanted.without_tokens:
            choice.text += delta.text
            if not self._bare:
                self._num_tokens += len(delta.token_ids)
                choice.token_ids += delta.token_ids
                choice.scores.add(delta.logprobs)
        if delta.finish_reason is None and not choice.text and not self._tells_silence:
            return b""
        text, choice.text = choice.text, ""
        if self._bare and delta.finish_reason is None:
            return self._frames.text(index, text)
        return self._chunk(index, text, choice, delta, self._prompts[place].ids)

    def usage_chunk(self, outputs: list[RequestOutput]) -> bytes:
        return self._frames.last({"usage": self._usage(outputs)})

    def _chunk(self, index: int, text: str, choice: "_Choice", delta: Delta, prompt_ids: list[int]) -> bytes:
        choice.num_told += len(text)
        ended = delta.finish_reason is not None
        said: Body = {
            "index": index,
            "text": text,
            "logprobs": choice.scores.take(choice.num_told, ended=ended) if self._scored else None,
            "finish_reason": self._reason(delta.finish_reason) if ended else None,
        }
        if ended:
            said["stop_reason"] = None if self._wanted.without_tokens else delta.stop_reason
        if self._wanted.return_token_ids:
            said["token_ids"], choice.token_ids = choice.token_ids, []
            if not choice.opened:
                said["prompt_token_ids"] = prompt_ids
        choice.opened = True
        return self._frames.choice(said, self._running(self._num_tokens))

    def _running(self, num_tokens: int) -> Body | None:
        return {"usage": running_usage(self._num_prompt, num_tokens)} if self._wanted.continuous_usage else None

    def _choices(self, outputs: list[RequestOutput]) -> list[Body]:
        return [
            self._choice(place * self._wanted.params.n + each.index, self._prompts[place], output, each)
            for place, output in enumerate(outputs)
            for each in output.outputs
        ]

    def _choice(self, index: int, prompt: CompletionPrompt, request: RequestOutput, output: CompletionOutput) -> Body:
        dropped = self._wanted.without_tokens
        text = (prompt.echo or "") + ("" if dropped else output.text)
        choice: Body = {
            "index": index,
            "text": text,
            "logprobs": self._scores(prompt, request, output, len(text)) if self._scored else None,
            "finish_reason": self._reason(output.finish_reason),
            "stop_reason": None if dropped else output.stop_reason,
        }
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_scores(request.prompt_logprobs)
        if self._wanted.return_token_ids:
            choice.update(prompt_token_ids=prompt.ids, token_ids=[] if dropped else output.token_ids)
        return choice

    def _scores(
        self, prompt: CompletionPrompt, request: RequestOutput, output: CompletionOutput, num_told: int
    ) -> Body:
        scores = self._answer_scores(prompt)
        if prompt.echo is not None:
            scores.echo(prompt.echo, prompt.ids, request.prompt_logprobs or [])
        if not self._wanted.without_tokens:
            scores.add(output.logprobs or [])
        return scores.take(num_told, ended=True)

    def _answer_scores(self, prompt: CompletionPrompt) -> CompletionScores:
        skips = self._wanted.params.skip_special_tokens
        detokenizer = self._spelling.detokenizer(prompt.ids, skip_special_tokens=skips) if self._scored else None
        return CompletionScores(self._spelling, detokenizer, len(prompt.echo or ""))

    def _reason(self, reason: str | None) -> str | None:
        return "length" if self._wanted.without_tokens else reason

    def _usage(self, outputs: list[RequestOutput]) -> Body:
        return usage(outputs, without_tokens=self._wanted.without_tokens)


def _continuations(outputs: list[RequestOutput]) -> list[CompletionOutput]:
    return [each for output in outputs for each in output.outputs]


class _Choice:
    """What a choice of a stream has gained and not told yet."""

    __slots__ = ("num_told", "opened", "scores", "text", "token_ids")

    def __init__(self, scores: CompletionScores) -> None:
        self.scores = scores
        self.text = ""
        self.num_told = 0  # characters
        self.token_ids: list[int] = []
        self.opened = False


MAX_PROMPTS = 128
_NAMES = {"messages": "prompt"}


async def completions(desk: ServerState, request: Request) -> Response:
    body = await read(request, CompletionBody)
    served = desk.served
    served.check_model(body.model)
    with called(_NAMES):
        wanted = completion_wanted(body, served)
        wanted = await constrained(wanted, wanted.grammar, served)
        prompts = await run_in_threadpool(_prompts, body, wanted, served)
        answer = CompletionResponse(
            ChunkHeader(served.name, "cmpl"), prompts, wanted, TokenText(served.tokenizer, as_ids=wanted.tokens_as_ids)
        )
        at_once = wanted.stream and wanted.params.prompt_logprobs is not None
        all_ids = [prompt.ids for prompt in prompts]
        chorus = PromptGroup(desk.service, all_ids, wanted, streaming=wanted.stream and not at_once)
        if wanted.stream:
            events = (_scored_events if at_once else _events)(chorus, answer, wanted, len(prompts))
            return await stream(request, events, chorus.leave, desk.keep_alive_s)
        outputs = await unless_gone(request, chorus.outputs(), chorus.leave)
    return json_response(answer.whole(outputs))


async def _events(
    chorus: PromptGroup, answer: CompletionResponse, wanted: GenerationRequest, num_prompts: int
) -> Events:
    outputs: dict[int, RequestOutput] = {}
    while len(outputs) < num_prompts:
        place, news = await chorus.hear()
        if isinstance(news, RequestOutput):
            outputs[place] = news
        elif chunks := answer.chunks(place, news):
            yield chunks
    if wanted.include_usage:
        yield answer.usage_chunk(list(outputs.values()))
    yield DONE


async def _scored_events(
    chorus: PromptGroup, answer: CompletionResponse, wanted: GenerationRequest, num_prompts: int
) -> Events:
    outputs = await chorus.outputs()
    yield answer.whole_as_chunks(outputs)
    if wanted.include_usage:
        yield answer.usage_chunk(outputs)
    yield DONE


def _prompts(body: CompletionBody, wanted: GenerationRequest, served: ServedModel) -> list[CompletionPrompt]:
    """Each as ids, with its text where that is to come back. A long text takes long to read."""
    prompts = []
    for prompt in listed(body.prompt, param="prompt", most=MAX_PROMPTS):
        special = body.add_special_tokens is not False
        if isinstance(prompt, str):
            whole = served.text().encode(served.readable(prompt, "prompt"), special)
        else:
            whole = served.checked_ids(prompt)
        ids = shortened(whole, body.truncate_prompt_tokens, wanted, served)
        echo = None
        if body.echo:
            echo = prompt if isinstance(prompt, str) and len(ids) == len(whole) else _echoed(ids, served)
        prompts.append(CompletionPrompt(ids, echo))
    return prompts


def _echoed(ids: list[int], served: ServedModel) -> str:
    """A character that the prompt begins and does not finish is the answer's."""
    return "" if served.tokenizer is None else decode_whole(served.tokenizer, ids)

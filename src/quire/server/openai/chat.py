"""POST /v1/chat/completions.

Writes the answers of chat completions: whole, and chunk by chunk. Knows events and outputs, no HTTP.
"""

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.outputs import CompletionOutput, Logprob, RequestOutput
from quire.output_parsing.events import OutputEvent, PlainText, ReasoningText, ToolArguments, ToolStart
from quire.server.chat.prompt import dialogue_of
from quire.server.chat.session import ChatDelta, ChatResult, ChatStream, ChoiceOutput
from quire.server.context import ServerState
from quire.server.http.errors import called
from quire.server.http.sse import DONE, Events, json_response, stream, unless_gone
from quire.server.openai.chunks import (
    ChunkHeader,
    ChunkWriter,
    TokenText,
    chat_scores,
    prompt_scores,
    running_usage,
    usage,
)
from quire.server.request.decode import read
from quire.server.request.params import GenerationRequest, chat_wanted
from quire.server.request.schema import ChatBody

Body = dict[str, object]


class ChatResponse:
    """The bodies of one answer."""

    def __init__(
        self,
        label: ChunkHeader,
        exchange: ChatStream,
        wanted: GenerationRequest,
        spelling: TokenText,
        *,
        tell_thoughts: bool,
    ) -> None:
        self._label = label
        self._exchange = exchange
        self._wanted = wanted
        self._spelling = spelling
        self._tell_thoughts = tell_thoughts
        head = label.head("chat.completion.chunk")
        self._frames = ChunkWriter(head, b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null}')
        self._num_top = wanted.params.logprobs
        self._bare = self._num_top is None and not wanted.return_token_ids and not wanted.continuous_usage
        self._untold: dict[int, _PendingLogprobs] = {}
        self._num_tokens = 0

    def whole(self, answered: ChatResult, num_thought: int) -> Body:
        output = answered.output
        body = self._label.head("chat.completion")
        body["choices"] = [self._choice(each, answered.said[each.index]) for each in output.outputs]
        body["usage"] = usage([output], num_thought=num_thought)
        if output.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_scores(output.prompt_logprobs)
        if self._wanted.return_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        return body

    def chunks(self, spoken: ChatDelta) -> bytes:
        """Who speaks, at the first word; what was said; and, in a chunk of its own, why it ended."""
        index, events, delta = spoken
        parts = []
        if index not in self._untold:
            self._untold[index] = _PendingLogprobs()
            parts.append(self._opening(index))
            events = self._exchange.opening() + events
        if not self._bare:
            self._num_tokens += len(delta.token_ids)
            self._untold[index].add(delta.logprobs, delta.token_ids)
        for event in events:
            if self._bare and type(event) is PlainText:
                parts.append(self._frames.text(index, event.text))
            elif (said := self._delta(index, event)) is not None:
                parts.append(self._chunk(index, said))
        if delta.finish_reason is not None:
            reason = self._exchange.finish_reason(delta)
            parts.append(self._chunk(index, {}, finish_reason=reason, stop_reason=delta.stop_reason))
        return b"".join(parts)

    def usage_chunk(self, output: RequestOutput, num_thought: int) -> bytes:
        return self._frames.last({"usage": usage([output], num_thought=num_thought)})

    def _choice(self, output: CompletionOutput, said: ChoiceOutput) -> Body:
        choice: Body = {
            "index": output.index,
            "message": self._message(said),
            "logprobs": self._scores(output.logprobs or []),
            "finish_reason": self._exchange.finish_reason(output),
            "stop_reason": output.stop_reason,
        }
        if self._wanted.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def _message(self, said: ChoiceOutput) -> Body:
        text = "".join(event.text for event in self._exchange.opening() if isinstance(event, PlainText)) + said.text
        message: Body = {"role": "assistant", "content": None if said.calls and not text else text, "refusal": None}
        if said.thought and self._tell_thoughts:
            message.update(reasoning=said.thought, reasoning_content=said.thought)
        if said.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for _, call in sorted(said.calls.items())
            ]
        return message

    def _opening(self, index: int) -> bytes:
        extra = {"prompt_token_ids": self._exchange.prompt_ids} if self._wanted.return_token_ids else None
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._frames.choice(choice, {**(extra or {}), **self._running()})

    def _delta(self, index: int, event: OutputEvent) -> Body | None:
        match event:
            case PlainText(text):
                return {"content": text}
            case ReasoningText(text):
                return {"reasoning": text, "reasoning_content": text} if self._tell_thoughts else None
            case ToolStart(place, name):
                call = self._exchange.said[index].calls[place]
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": place, "id": call.id, "type": "function", "function": function}]}
            case ToolArguments(place, text):
                return {"tool_calls": [{"index": place, "function": {"arguments": text}}]}

    def _chunk(self, index: int, delta: Body, **ending: object) -> bytes:
        """With what has been waiting for a chunk: scores and ids of tokens that had no text yet, or share this one."""
        scores, token_ids = self._untold[index].take()
        choice: Body = {
            "index": index,
            "delta": delta,
            "logprobs": self._scores(scores) if scores else None,
            "finish_reason": None,
            **ending,
        }
        if self._wanted.return_token_ids:
            choice["token_ids"] = token_ids
        return self._frames.choice(choice, self._running())

    def _running(self) -> Body:
        if not self._wanted.continuous_usage:
            return {}
        return {"usage": running_usage(len(self._exchange.prompt_ids), self._num_tokens)}

    def _scores(self, entries: list[dict[int, Logprob]]) -> Body | None:
        if self._num_top is None:
            return None
        return {"content": chat_scores(entries, self._num_top, self._spelling), "refusal": None}


class _PendingLogprobs:
    """What a choice has gained and not told yet."""

    __slots__ = ("_scores", "_token_ids")

    def __init__(self) -> None:
        self._scores: list[dict[int, Logprob]] = []
        self._token_ids: list[int] = []

    def add(self, scores: list[dict[int, Logprob]], token_ids: list[int]) -> None:
        self._scores += scores
        self._token_ids += token_ids

    def take(self) -> tuple[list[dict[int, Logprob]], list[int]]:
        taken = self._scores, self._token_ids
        self._scores, self._token_ids = [], []
        return taken


async def chat_completions(desk: ServerState, request: Request) -> Response:
    body = await read(request, ChatBody)
    served = desk.served
    served.check_model(body.model)
    with called({} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}):
        wanted, dialogue = chat_wanted(body, served), dialogue_of(body)
        exchange = await ChatStream.begin(
            desk.service, served, dialogue, wanted, truncate=body.truncate_prompt_tokens, echo=bool(body.echo)
        )
        answer = ChatResponse(
            ChunkHeader(served.name, "chatcmpl"),
            exchange,
            wanted,
            TokenText(served.tokenizer, as_ids=wanted.tokens_as_ids),
            tell_thoughts=body.include_reasoning is not False,
        )
        if wanted.stream:
            return await stream(request, _events(exchange, answer, wanted), exchange.leave, desk.keep_alive_s)
        answered = await unless_gone(request, exchange.whole(), exchange.leave)
    return json_response(answer.whole(answered, await exchange.num_thought_tokens()))


async def _events(exchange: ChatStream, answer: ChatResponse, wanted: GenerationRequest) -> Events:
    while isinstance(news := await exchange.hear(), ChatDelta):
        if chunks := answer.chunks(news):
            yield chunks
    if wanted.include_usage:
        yield answer.usage_chunk(news, await exchange.num_thought_tokens())
    yield DONE

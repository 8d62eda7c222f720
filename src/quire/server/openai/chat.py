"""POST /v1/chat/completions: the endpoint, the JSON body, and the stream chunks."""

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.outputs import CompletionOutput, Logprob, RequestOutput
from quire.output_parsing.events import OutputEvent, PlainText, ReasoningText, ToolArguments, ToolStart
from quire.server.chat.logprobs import TokenText, chat_logprobs, prompt_logprobs_json
from quire.server.chat.prompt import chat_prompt
from quire.server.chat.session import ChatDelta, ChatResult, ChatStream, ChoiceOutput, start_chat
from quire.server.context import ServerState
from quire.server.http.errors import rename_error_params
from quire.server.http.sse import DONE, Events, json_response, stream, until_disconnect
from quire.server.openai.chunks import ChunkHeader, ChunkWriter, running_usage, usage
from quire.server.request.decode import read
from quire.server.request.params import GenerationRequest, allow_minus_one, chat_generation
from quire.server.request.schema import ChatBody

Body = dict[str, object]


async def chat_completions(state: ServerState, request: Request) -> Response:
    body = await read(request, ChatBody)
    model = state.model
    model.check_model(body.model)
    allow_minus_one(body)
    with rename_error_params({} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}):
        generation, prompt = chat_generation(body, model), chat_prompt(body)
        chat = await start_chat(state.engine, model, prompt, generation, truncate=body.truncate_prompt_tokens)
        response = ChatResponse(
            ChunkHeader(model.name, "chatcmpl"),
            chat,
            generation,
            TokenText(model.tokenizer, as_ids=generation.tokens_as_ids),
            prefix=prompt.final_assistant_text if body.echo else "",
            include_reasoning=body.include_reasoning is not False,
        )
        if generation.stream:
            return await stream(request, _events(chat, response, generation), chat.close, state.keep_alive_s)
        try:
            result = await until_disconnect(request, chat.result())
            num_reasoning, num_scores = await chat.num_reasoning_tokens(), result.output.num_scores
            return await model.text_threads.run_scored(
                num_scores, lambda: json_response(response.whole(result, num_reasoning))
            )
        finally:
            chat.close()


async def _events(chat: ChatStream, response: "ChatResponse", generation: GenerationRequest) -> Events:
    while isinstance(update := await chat.receive(), ChatDelta):
        if chunks := response.chunks(update):
            yield chunks
    if generation.include_usage:
        yield response.usage_chunk(update, await chat.num_reasoning_tokens())
    yield DONE


class ChatResponse:
    """The JSON of one chat completion. `prefix` is repeated before the text of each choice."""

    def __init__(
        self,
        header: ChunkHeader,
        chat: ChatStream,
        generation: GenerationRequest,
        token_text: TokenText,
        *,
        prefix: str,
        include_reasoning: bool,
    ) -> None:
        self._header = header
        self._chat = chat
        self._generation = generation
        self._token_text = token_text
        self._prefix = prefix
        self._include_reasoning = include_reasoning
        head = header.head("chat.completion.chunk")
        self._writer = ChunkWriter(head, b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null}')
        self._num_top = generation.params.logprobs
        self._text_only = not (self._num_top is not None or generation.return_token_ids or generation.continuous_usage)
        self._pending: dict[int, _PendingTokens] = {}
        self._num_tokens = 0

    def whole(self, result: ChatResult, num_reasoning_tokens: int) -> Body:
        output = result.output
        body = self._header.head("chat.completion")
        body["choices"] = [self._choice(each, result.choices[each.index]) for each in output.outputs]
        body["usage"] = usage([output], num_reasoning_tokens=num_reasoning_tokens)
        if output.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        if self._generation.return_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        return body

    def chunks(self, chat_delta: ChatDelta) -> bytes:
        """The chunks of one delta: the role first, then one per event, and the finish reason in its own."""
        delta, events = chat_delta
        index = delta.index
        chunks = []
        if index not in self._pending:
            self._pending[index] = _PendingTokens()
            chunks.append(self._role_chunk(index))
            events = [PlainText(self._prefix), *events] if self._prefix else events
        if not self._text_only:
            self._num_tokens += len(delta.token_ids)
            self._pending[index].add(delta.logprobs, delta.token_ids)
        for event in events:
            if self._text_only and type(event) is PlainText:
                chunks.append(self._writer.text(index, event.text))
            elif (fields := self._delta(index, event)) is not None:
                chunks.append(self._chunk(index, fields))
        if delta.finish_reason is not None:
            reason = self._chat.finish_reason(delta)
            chunks.append(self._chunk(index, {}, finish_reason=reason, stop_reason=delta.stop_reason))
        return b"".join(chunks)

    def usage_chunk(self, output: RequestOutput, num_reasoning_tokens: int) -> bytes:
        return self._writer.last({"usage": usage([output], num_reasoning_tokens=num_reasoning_tokens)})

    def _choice(self, output: CompletionOutput, parsed: ChoiceOutput) -> Body:
        choice: Body = {
            "index": output.index,
            "message": self._message(parsed),
            "logprobs": self._logprobs(output.logprobs or []),
            "finish_reason": self._chat.finish_reason(output),
            "stop_reason": output.stop_reason,
        }
        if self._generation.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def _message(self, parsed: ChoiceOutput) -> Body:
        text = self._prefix + parsed.text
        message: Body = {"role": "assistant", "content": None if parsed.calls and not text else text, "refusal": None}
        if (reasoning := parsed.reasoning) and self._include_reasoning:
            message.update(reasoning=reasoning, reasoning_content=reasoning)
        if parsed.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for _, call in sorted(parsed.calls.items())
            ]
        return message

    def _role_chunk(self, index: int) -> bytes:
        extra: Body = {"prompt_token_ids": self._chat.prompt_ids} if self._generation.return_token_ids else {}
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._writer.choice(choice, {**extra, **self._running_usage()})

    def _delta(self, index: int, event: OutputEvent) -> Body | None:
        match event:
            case PlainText(text):
                return {"content": text}
            case ReasoningText(text):
                return {"reasoning": text, "reasoning_content": text} if self._include_reasoning else None
            case ToolStart(place, name):
                call = self._chat.choices[index].calls[place]
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": place, "id": call.id, "type": "function", "function": function}]}
            case ToolArguments(place, text):
                return {"tool_calls": [{"index": place, "function": {"arguments": text}}]}

    def _chunk(self, index: int, delta: Body, **finish: object) -> bytes:
        """A chunk with all pending logprobs and ids: of tokens without text so far, or that share this one's."""
        entries, token_ids = self._pending[index].take()
        choice: Body = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(entries) if entries else None,
            "finish_reason": None,
            **finish,
        }
        if self._generation.return_token_ids:
            choice["token_ids"] = token_ids
        return self._writer.choice(choice, self._running_usage())

    def _running_usage(self) -> Body:
        if not self._generation.continuous_usage:
            return {}
        return {"usage": running_usage(len(self._chat.prompt_ids), self._num_tokens)}

    def _logprobs(self, entries: list[dict[int, Logprob]]) -> Body | None:
        if self._num_top is None:
            return None
        return {"content": chat_logprobs(entries, self._num_top, self._token_text), "refusal": None}


class _PendingTokens:
    """Logprobs and token ids of a choice that no chunk holds yet."""

    __slots__ = ("_entries", "_token_ids")

    def __init__(self) -> None:
        self._entries: list[dict[int, Logprob]] = []
        self._token_ids: list[int] = []

    def add(self, entries: list[dict[int, Logprob]], token_ids: list[int]) -> None:
        self._entries += entries
        self._token_ids += token_ids

    def take(self) -> tuple[list[dict[int, Logprob]], list[int]]:
        taken = self._entries, self._token_ids
        self._entries, self._token_ids = [], []
        return taken

"""text-generation-inference API: POST /, /generate, /generate_stream and GET /info.

A body is converted to a completion body; fields that are not supported are refused by name. A stream has one event per
token, with that token's own text.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidParameter, shown
from quire.core.sampling import MAX_STOP_STRINGS
from quire.engine.outputs import CompletionOutput, Delta, Logprob, RequestOutput
from quire.server.context import ServedModel, ServerState
from quire.server.http.errors import rename_error_params, reply_to
from quire.server.http.sse import Events, client_error, finite, json_response, stream, until_disconnect
from quire.server.prompt_group import submit
from quire.server.request.decode import read
from quire.server.request.params import GenerationRequest, completion_generation, constrain, truncate_prompt
from quire.server.request.schema import CompletionBody, Count, Json, Penalty, Share, StructuredOutputs, Temperature
from quire.server.request_stream import RequestStream
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer
from quire.version import __version__

Body = dict[str, object]
Entry = Mapping[int, Logprob]

PATH = "/generate"
NUM_TOKENS = 100  # TGI's default of max_new_tokens


class TgiGrammar(Struct, kw_only=True):
    """A constraint: a JSON schema, or a regular expression."""

    type: str
    value: Json = None


class TgiParameters(Struct, kw_only=True):
    """Sampling parameters and response options. Null means unset."""

    max_new_tokens: Count | None = None
    do_sample: bool | None = None
    temperature: Temperature | None = None
    top_k: int | None = None
    top_p: Share | None = None
    typical_p: Share | None = None
    repetition_penalty: float | None = None
    frequency_penalty: Penalty | None = None
    stop: list[str] | None = None
    seed: int | None = None
    truncate: int | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    best_of: int | None = None
    top_n_tokens: Count | None = None
    watermark: bool | None = None
    grammar: TgiGrammar | None = None
    adapter_id: str | None = None


class GenerateBody(Struct, kw_only=True):
    """The body of /generate: a text to continue."""

    inputs: str
    parameters: TgiParameters | None = None
    stream: bool | None = None


PARAM_NAMES = {
    "messages": "inputs",
    "prompt": "inputs",
    "max_tokens": "max_new_tokens",
    "logprobs": "top_n_tokens",
    "truncate_prompt_tokens": "truncate",
    "structured_outputs": "grammar",
    "structured_outputs.json": "grammar.value",
    "structured_outputs.regex": "grammar.value",
}


def as_completion(body: GenerateBody, *, stream: bool) -> CompletionBody:
    """The equivalent body of /v1/completions. Tokens in a response always have their log-probability."""
    parameters = body.parameters or TgiParameters()
    _check(parameters, stream=stream)
    samples = parameters.do_sample or any(
        each is not None for each in (parameters.temperature, parameters.top_k, parameters.top_p)
    )
    return CompletionBody(
        prompt=body.inputs,
        stream=stream,
        max_tokens=NUM_TOKENS if parameters.max_new_tokens is None else parameters.max_new_tokens,
        temperature=parameters.temperature if samples else 0.0,
        top_k=parameters.top_k,
        top_p=parameters.top_p,
        repetition_penalty=parameters.repetition_penalty,
        frequency_penalty=parameters.frequency_penalty,
        stop=parameters.stop,
        seed=parameters.seed,
        truncate_prompt_tokens=parameters.truncate,
        logprobs=(parameters.top_n_tokens or 0) if stream or parameters.details else None,
        prompt_logprobs=0 if parameters.details and parameters.decoder_input_details else None,
        structured_outputs=None if parameters.grammar is None else _structured(parameters.grammar),
    )


def _check(parameters: TgiParameters, *, stream: bool) -> None:
    refused = {
        "best_of": parameters.best_of not in (None, 1),
        "typical_p": parameters.typical_p not in (None, 1.0),
        "watermark": bool(parameters.watermark),
        "adapter_id": parameters.adapter_id is not None,
        "decoder_input_details": stream and bool(parameters.decoder_input_details),
    }
    for name, is_refused in refused.items():
        if is_refused:
            where = " in a stream" if name == "decoder_input_details" else ""
            raise InvalidParameter(f"{name} is not served here{where}; omit it.", param=name)
    if parameters.max_new_tokens == 0:
        raise InvalidParameter("max_new_tokens must be at least 1, not 0.", param="max_new_tokens")


def _structured(grammar: TgiGrammar) -> StructuredOutputs:
    value = grammar.value
    match grammar.type:
        case "json" if value is not None:
            return StructuredOutputs(json=value)
        case "json_schema" if isinstance(value, dict) and value.get("schema") is not None:
            return StructuredOutputs(json=value["schema"])
        case "regex" if isinstance(value, str):
            return StructuredOutputs(regex=value)
    raise InvalidParameter(
        f"grammar.type is {shown(grammar.type)} and grammar.value is {shown(value)}; it may be 'json' with a schema, "
        f"'json_schema' with {{\"schema\": …}}, or 'regex' with a text.",
        param="grammar",
    )


class _PlacedToken(NamedTuple):
    """A token of a stream, its log-probabilities, and where its text ends."""

    token: int
    entry: Entry
    end: int


def _written(entries: Iterable[object]) -> list[msgspec.Raw]:
    """As JSON, one by one: to encode thousands at once would hold up all other threads."""
    return [msgspec.Raw(msgspec.json.encode(entry)) for entry in entries]


class TgiResponse:
    """The JSON of one response."""

    def __init__(self, prompt: str, prompt_ids: Sequence[int], parameters: TgiParameters, tokenizer: Tokenizer) -> None:
        self._prefix = prompt if parameters.return_full_text else ""
        self._num_prompt = len(prompt_ids)
        self._parameters = parameters
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt_ids=prompt_ids)  # follows the stream: where each token ends
        self._pending: list[_PlacedToken] = []  # tokens whose text has not come
        self._text = ""
        self._num_sent = 0  # characters
        self._num_tokens = 0

    def whole(self, output: RequestOutput) -> Body:
        """Slow with many log-probabilities: then call it on a thread."""
        [choice] = output.outputs
        body: Body = {"generated_text": self._prefix + choice.text}
        if self._parameters.details:
            entries = choice.logprobs or []
            body["details"] = {
                **self._details(choice, len(choice.token_ids)),
                "prefill": _written(self._prefill(output)),
                "tokens": _written(self._token(*each) for each in zip(choice.token_ids, entries, strict=True)),
                **({"top_tokens": _written(map(self._top, entries))} if self._parameters.top_n_tokens else {}),
            }
        return body

    def events(self, delta: Delta) -> bytes:
        """One event per token, when its own text has come: a delta may hold several tokens, and their text may wait for
        the rest of a stop string. The text of a character that several tokens form comes with the last of them."""
        self._text += delta.text
        for token, entry in zip(delta.token_ids, delta.logprobs, strict=True):
            self._detokenizer.push([token])
            self._pending.append(_PlacedToken(token, entry, self._detokenizer.place))
        ended = delta.finish_reason is not None
        ready = len(self._pending)
        if not ended:
            ready = next((at for at, each in enumerate(self._pending) if each.end > len(self._text)), ready)
        taken, self._pending = self._pending[:ready], self._pending[ready:]
        return b"".join(
            self._event(placed, delta if ended and number == ready else None)
            for number, placed in enumerate(taken, start=1)
        )

    def _event(self, placed: _PlacedToken, last: Delta | None) -> bytes:
        """The event of a token; `last` is the delta that ends the stream with it."""
        self._num_tokens += 1
        end = max(self._num_sent, min(placed.end, len(self._text))) if last is None else len(self._text)
        text, self._num_sent = self._text[self._num_sent : end], end
        event: Body = {
            "index": self._num_tokens,
            "token": self._token(placed.token, placed.entry, text),
            "generated_text": None,
            "details": None,
        }
        if self._parameters.top_n_tokens:
            event["top_tokens"] = self._top(placed.entry)
        if last is not None:
            event["generated_text"] = self._prefix + self._text
            event["details"] = {**self._details(last, self._num_tokens), "input_length": self._num_prompt}
        return b"data:" + msgspec.json.encode(event) + b"\n\n"

    def failed(self, error: Exception) -> bytes:
        return b"data:" + reply_to(client_error(error), path=PATH).body + b"\n\n"

    def _details(self, choice: CompletionOutput | Delta, num_tokens: int) -> Body:
        reason = "length" if choice.finish_reason == "length" else "eos_token"
        if choice.stop_reason is not None:
            reason = "stop_sequence"
        return {"finish_reason": reason, "generated_tokens": num_tokens, "seed": self._parameters.seed}

    def _prefill(self, output: RequestOutput) -> list[Body]:
        """The tokens of the prompt. The first one has no log-probability."""
        tokens = []
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=False):
            text = self._tokenizer.spell(token)
            tokens.append(
                {"id": token, "text": text, "logprob": None if entry is None else finite(entry[token].logprob)}
            )
        return tokens

    def _token(self, token: int, entry: Entry, text: str | None = None) -> Body:
        decoded = entry[token].decoded_token if text is None else text
        special = token in self._tokenizer.special_ids
        return {"id": token, "text": decoded or "", "logprob": finite(entry[token].logprob), "special": special}

    def _top(self, entry: Entry) -> list[Body]:
        num_top = self._parameters.top_n_tokens or 0
        top = sorted(entry.items(), key=lambda item: item[1].rank)[:num_top]
        return [self._token(token, entry) for token, _ in top]


async def root(state: ServerState, request: Request) -> Response:
    """The endpoint of TGI's own clients, which expect a list of one response."""
    body = await read(request, GenerateBody)
    if body.stream:
        return await _streamed(state, request, body)
    response = await _whole(state, request, body)
    return Response(msgspec.json.encode([response]), media_type="application/json")


async def generate(state: ServerState, request: Request) -> Response:
    return json_response(await _whole(state, request, await read(request, GenerateBody)))


async def generate_stream(state: ServerState, request: Request) -> Response:
    return await _streamed(state, request, await read(request, GenerateBody))


async def info(state: ServerState, request: Request) -> Response:
    model = state.model
    return json_response(
        {
            "model_id": model.name,
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "max_best_of": 1,
            "max_stop_sequences": MAX_STOP_STRINGS,
            "max_input_tokens": model.max_model_len - 1,
            "max_total_tokens": model.max_model_len,
            "router": "quire",
            "version": __version__,
        }
    )


async def _whole(state: ServerState, request: Request, body: GenerateBody) -> dict[str, object]:
    with rename_error_params(PARAM_NAMES):
        tokens, response = await _begin(state, body, streaming=False)
        try:
            output = await until_disconnect(request, tokens.output())
            return await state.model.text_threads.run_scored(output.num_scores, lambda: response.whole(output))
        finally:
            tokens.close()


async def _streamed(state: ServerState, request: Request, body: GenerateBody) -> Response:
    with rename_error_params(PARAM_NAMES):
        tokens, response = await _begin(state, body, streaming=True)
        return await stream(request, _events(tokens, response), tokens.close, state.keep_alive_s, response.failed)


async def _begin(state: ServerState, body: GenerateBody, *, streaming: bool) -> tuple[RequestStream, TgiResponse]:
    model = state.model
    completion = as_completion(body, stream=streaming)
    generation = completion_generation(completion, model)
    generation = await constrain(generation, model)
    ids = await model.text_threads.run(_ids, body, completion.truncate_prompt_tokens, generation, model)
    response = TgiResponse(body.inputs, ids, body.parameters or TgiParameters(), model.text())
    return submit(state.engine, ids, generation, streaming=streaming), response


def _ids(body: GenerateBody, truncate: int | None, generation: GenerationRequest, model: ServedModel) -> list[int]:
    whole = model.prompt_ids(body.inputs, "inputs", truncated=truncate is not None)
    return truncate_prompt(whole, truncate, generation, model)


async def _events(tokens: RequestStream, response: TgiResponse) -> Events:
    while isinstance(update := await tokens.receive(), Delta):
        if events := response.events(update):
            yield events

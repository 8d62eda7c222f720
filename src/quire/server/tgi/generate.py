"""POST /, /generate, /generate_stream and GET /info, for clients of text-generation-inference.

The body of /generate and its like: what clients of text-generation-inference send.

What a client of text-generation-inference asks for, as a completion. What is not served is refused by its name.

Writes answers as clients of text-generation-inference read them: whole, and a frame for each token. No HTTP.
"""

from collections.abc import Mapping

import msgspec
from msgspec import Struct
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidParameter, shown
from quire.core.sampling import MAX_STOP_STRINGS
from quire.engine.outputs import CompletionOutput, Delta, Logprob, RequestOutput
from quire.server.context import ServedModel, ServerState
from quire.server.http.errors import rename_error_params, reply_to
from quire.server.http.sse import Events, client_error, finite, json_response, stream, until_disconnect
from quire.server.prompt_group import PromptGroup
from quire.server.request.decode import read
from quire.server.request.params import GenerationRequest, apply_grammar, completion_generation, truncate_prompt
from quire.server.request.schema import CompletionBody, Count, Json, Penalty, Share, StructuredOutputs, Temperature
from quire.text.tokenizer import Tokenizer
from quire.version import __version__


class TgiGrammar(Struct, kw_only=True):
    """What an answer may say: a JSON schema, or a regular expression."""

    type: str
    value: Json = None


class TgiParameters(Struct, kw_only=True):
    """How to sample, and what to tell besides text. Null means that nothing was said."""

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
    """A text that is to go on."""

    inputs: str
    parameters: TgiParameters | None = None
    stream: bool | None = None


NAMES = {
    "messages": "inputs",
    "prompt": "inputs",
    "max_tokens": "max_new_tokens",
    "logprobs": "top_n_tokens",
    "truncate_prompt_tokens": "truncate",
    "structured_outputs": "grammar",
    "structured_outputs.json": "grammar.value",
    "structured_outputs.regex": "grammar.value",
}
NUM_TOKENS = 100  # when nothing is said


def as_completion(body: GenerateBody, *, stream: bool) -> CompletionBody:
    """The same question to /v1/completions. Every token is told with its score where tokens are told."""
    said = body.parameters or TgiParameters()
    _check(said, stream=stream)
    chance = said.do_sample or any(each is not None for each in (said.temperature, said.top_k, said.top_p))
    return CompletionBody(
        prompt=body.inputs,
        stream=stream,
        max_tokens=NUM_TOKENS if said.max_new_tokens is None else said.max_new_tokens,
        temperature=said.temperature if chance else 0.0,
        top_k=said.top_k,
        top_p=said.top_p,
        repetition_penalty=said.repetition_penalty,
        frequency_penalty=said.frequency_penalty,
        stop=said.stop,
        seed=said.seed,
        truncate_prompt_tokens=said.truncate,
        logprobs=(said.top_n_tokens or 0) if stream or said.details else None,
        prompt_logprobs=0 if said.details and said.decoder_input_details else None,
        structured_outputs=None if said.grammar is None else _structured(said.grammar),
    )


def _check(said: TgiParameters, *, stream: bool) -> None:
    refused = {
        "best_of": said.best_of not in (None, 1),
        "typical_p": said.typical_p not in (None, 1.0),
        "watermark": bool(said.watermark),
        "adapter_id": said.adapter_id is not None,
        "decoder_input_details": stream and bool(said.decoder_input_details),
    }
    for name, generation in refused.items():
        if generation:
            where = " in a stream" if name == "decoder_input_details" else ""
            raise InvalidParameter(f"{name} is not served here{where}; leave it away.", param=name)
    if said.max_new_tokens == 0:
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


Body = dict[str, object]
Entry = Mapping[int, Logprob]

PATH = "/generate"


class TgiResponse:
    """The bodies of one answer."""

    def __init__(self, prompt: str, num_prompt: int, said: TgiParameters, tokenizer: Tokenizer) -> None:
        self._prefix = prompt if said.return_full_text else ""
        self._num_prompt = num_prompt
        self._said = said
        self._tokenizer = tokenizer
        self._text: list[str] = []
        self._num_tokens = 0

    def whole(self, output: RequestOutput) -> Body:
        [said] = output.outputs
        body: Body = {"generated_text": self._prefix + said.text}
        if self._said.details:
            scores = said.logprobs or []
            body["details"] = {
                **self._details(said, len(said.token_ids)),
                "prefill": self._prefill(output),
                "tokens": [self._token(token, entry) for token, entry in zip(said.token_ids, scores, strict=True)],
                **({"top_tokens": [self._top(entry) for entry in scores]} if self._said.top_n_tokens else {}),
            }
        return body

    def frames(self, delta: Delta) -> bytes:
        """One for each token. Text that several tokens make together comes with the last of them."""
        told = []
        self._text.append(delta.text)
        tokens = list(zip(delta.token_ids, delta.logprobs, strict=True))
        for place, (token, entry) in enumerate(tokens):
            self._num_tokens += 1
            last = place == len(tokens) - 1
            frame: Body = {
                "index": self._num_tokens,
                "token": self._token(token, entry, delta.text if last else ""),
                "generated_text": None,
                "details": None,
            }
            if self._said.top_n_tokens:
                frame["top_tokens"] = self._top(entry)
            if last and delta.finish_reason is not None:
                details = self._details(delta, self._num_tokens)
                frame["generated_text"] = self._prefix + "".join(self._text)
                frame["details"] = {**details, "input_length": self._num_prompt}
            told.append(b"data:" + msgspec.json.encode(frame) + b"\n\n")
        return b"".join(told)

    def failed(self, error: Exception) -> bytes:
        return b"data:" + reply_to(client_error(error), path=PATH).body + b"\n\n"

    def _details(self, ended: CompletionOutput | Delta, num_tokens: int) -> Body:
        reason = "length" if ended.finish_reason == "length" else "eos_token"
        if ended.stop_reason is not None:
            reason = "stop_sequence"
        return {"finish_reason": reason, "generated_tokens": num_tokens, "seed": self._said.seed}

    def _prefill(self, output: RequestOutput) -> list[Body]:
        """The first token of a prompt has no score."""
        told = []
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=False):
            text = self._tokenizer.spell(token)
            told.append({"id": token, "text": text, "logprob": None if entry is None else finite(entry[token].logprob)})
        return told

    def _token(self, token: int, entry: Entry, text: str | None = None) -> Body:
        spelled = entry[token].decoded_token if text is None else text
        special = token in self._tokenizer.special_ids
        return {"id": token, "text": spelled or "", "logprob": finite(entry[token].logprob), "special": special}

    def _top(self, entry: Entry) -> list[Body]:
        num_top = self._said.top_n_tokens or 0
        likeliest = sorted(entry.items(), key=lambda item: item[1].rank)[:num_top]
        return [self._token(token, entry) for token, _ in likeliest]


async def root(state: ServerState, request: Request) -> Response:
    """Where TGI's own clients ask; they read a list of one."""
    body = await read(request, GenerateBody)
    if body.stream:
        return await _streamed(state, request, body)
    told = await _whole(state, request, body)
    return Response(msgspec.json.encode([told]), media_type="application/json")


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
    with rename_error_params(NAMES):
        group, response = await _begin(state, body, streaming=False)
        [output] = await until_disconnect(request, group.outputs(), group.leave)
    return response.whole(output)


async def _streamed(state: ServerState, request: Request, body: GenerateBody) -> Response:
    with rename_error_params(NAMES):
        group, response = await _begin(state, body, streaming=True)
        return await stream(request, _writer(group, response), group.leave, state.keep_alive_s, response.failed)


async def _begin(state: ServerState, body: GenerateBody, *, streaming: bool) -> tuple[PromptGroup, TgiResponse]:
    model = state.model
    completion = as_completion(body, stream=streaming)
    generation = completion_generation(completion, model)
    generation = await apply_grammar(generation, generation.grammar, model)
    ids = await run_in_threadpool(_ids, body, completion.truncate_prompt_tokens, generation, model)
    response = TgiResponse(body.inputs, len(ids), body.parameters or TgiParameters(), model.text())
    return PromptGroup(state.engine, [ids], generation, streaming=streaming), response


def _ids(body: GenerateBody, truncate: int | None, generation: GenerationRequest, model: ServedModel) -> list[int]:
    return truncate_prompt(model.text().encode(model.readable(body.inputs, "inputs")), truncate, generation, model)


async def _writer(group: PromptGroup, response: TgiResponse) -> Events:
    while isinstance(update := (await group.hear()).update, Delta):
        if frames := response.frames(update):
            yield frames

"""llama.cpp's API: POST /completion and /infill, GET /props and /slots.

A body is converted to a completion body. Samplers that are not served are refused by name, unless their value asks for
nothing; fields of slots and caches have no effect. Errors have OpenAI's shape, as llama.cpp's have.
"""

from collections.abc import Mapping
from dataclasses import replace

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidParameter, InvalidPrompt, shown
from quire.engine.outputs import CompletionOutput, Delta, Logprob, RequestOutput
from quire.server.chat.logprobs import TokenText, chat_logprobs
from quire.server.context import ServedModel, ServerState
from quire.server.http.errors import rename_error_params
from quire.server.http.sse import Events, event, json_response, stream, until_disconnect
from quire.server.prompt_group import OtherFile, fills_in_middle, middle_ids, submit
from quire.server.request.decode import read
from quire.server.request.params import GenerationRequest, clamp_max_tokens, completion_generation, constrain
from quire.server.request.schema import (
    CompletionBody,
    Json,
    NumLogprobs,
    Penalty,
    Share,
    StructuredOutputs,
    Temperature,
)
from quire.server.request_stream import RequestStream
from quire.version import __version__

Body = dict[str, object]

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "typical_p": (None, 1), "mirostat": (None, 0), "dynatemp_range": (None, 0), "dry_multiplier": (None, 0),
    "xtc_probability": (None, 0), "top_n_sigma": (None, -1), "lora": (None, []), "image_data": (None, []),
}  # fmt: skip
PARAM_NAMES = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
    "messages": "prompt",
    "structured_outputs": "json_schema",
    "structured_outputs.json": "json_schema",
}


class LlamacppBody(Struct, kw_only=True):
    """The sampling parameters of llama.cpp. Null means unset."""

    model: str | None = None
    stream: bool | None = None
    n_predict: int | None = None  # below 0: the rest of the context
    temperature: Temperature | None = None
    top_k: int | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: int | None = None
    stop: list[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: list[tuple[int, float]] | dict[int, float] | None = None
    n_probs: NumLogprobs | None = None
    return_tokens: bool | None = None
    json_schema: Json = None
    grammar: str | None = None
    typical_p: float | None = None
    mirostat: int | None = None
    dynatemp_range: float | None = None
    dry_multiplier: float | None = None
    xtc_probability: float | None = None
    top_n_sigma: float | None = None
    lora: list[Json] | None = None
    image_data: list[Json] | None = None


class LlamacppCompletionBody(LlamacppBody, kw_only=True):
    """The body of POST /completion: a text, or a list of texts and token ids that follow each other."""

    prompt: str | list[str | int]


class InfillFile(Struct, kw_only=True):
    """Another file, as context."""

    text: str
    filename: str = "tmp"


class InfillBody(LlamacppBody, kw_only=True):
    """The body of POST /infill: the text before and after a gap. `prompt` follows the text before."""

    input_prefix: str
    input_suffix: str
    input_extra: list[InfillFile] | None = None
    prompt: str | None = None


def as_completion(body: LlamacppBody) -> CompletionBody:
    """The equivalent body of /v1/completions, without a prompt."""
    for name, values in _NEUTRAL.items():
        if getattr(body, name) not in values:
            raise InvalidParameter(f"{name} is not served here; omit it.", param=name)
    if body.grammar:
        raise InvalidParameter(
            "grammar is in GBNF, which is not read here; use json_schema, or structured_outputs of /v1/completions.",
            param="grammar",
        )
    bias = body.logit_bias
    return CompletionBody(
        prompt="",
        stream=body.stream,
        max_tokens=None if body.n_predict is None or body.n_predict < 0 else body.n_predict,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=1.0 if body.repeat_last_n == 0 else body.repeat_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=None if body.seed == -1 else body.seed,
        stop=body.stop,
        ignore_eos=body.ignore_eos,
        logit_bias=dict(bias) if isinstance(bias, list) else bias,
        logprobs=body.n_probs or None,
        structured_outputs=None if body.json_schema is None else StructuredOutputs(json=body.json_schema),
    )


class LlamacppResponse:
    """The JSON of one completion."""

    def __init__(self, model: ServedModel, body: LlamacppBody, generation: GenerationRequest, num_prompt: int) -> None:
        self._model = model
        self._body = body
        self._generation = generation
        self._num_prompt = num_prompt
        self._token_text = TokenText(model.tokenizer, as_ids=False)
        self._num_tokens = 0

    def whole(self, output: RequestOutput) -> Body:
        choice = self._choice(output)
        self._num_tokens = len(choice.token_ids)
        part = self._part(choice.text, choice.token_ids, choice.logprobs or [])
        return part | self._end(choice, output)

    def chunk(self, delta: Delta) -> bytes:
        if self._generation.without_tokens:
            return b""
        self._num_tokens += len(delta.token_ids)
        return event(self._part(delta.text, delta.token_ids, delta.logprobs))

    def last_chunk(self, output: RequestOutput) -> bytes:
        return event(self._part("", [], []) | self._end(self._choice(output), output))

    def _choice(self, output: RequestOutput) -> CompletionOutput:
        """The continuation; an empty one if no token was asked for."""
        [choice] = output.outputs
        if not self._generation.without_tokens:
            return choice
        return replace(choice, text="", token_ids=[], finish_reason="length", stop_reason=None, logprobs=None)

    def _part(self, text: str, token_ids: list[int], logprobs: list[dict[int, Logprob]]) -> Body:
        part: Body = {
            "index": 0,
            "content": text,
            "tokens": token_ids if self._body.return_tokens else [],
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": self._num_tokens,
            "tokens_evaluated": self._num_prompt,
        }
        if self._body.n_probs and logprobs:
            entries = chat_logprobs(logprobs, self._body.n_probs, self._token_text)
            ids = (next(iter(entry)) for entry in logprobs)
            part["completion_probabilities"] = [
                {"id": token} | entry for token, entry in zip(ids, entries, strict=True)
            ]
        return part

    def _end(self, choice: CompletionOutput, output: RequestOutput) -> Body:
        word = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
        kind = "limit" if choice.finish_reason == "length" else "word" if word else "eos"
        return {
            "stop": True,
            "model": self._model.name,
            "stop_type": kind,
            "stopping_word": word,
            "has_new_line": "\n" in choice.text,
            "truncated": False,
            "tokens_predicted": self._num_tokens,
            "tokens_cached": output.metrics.num_cached_tokens,
            "generation_settings": _settings(self._generation),
            "timings": _timings(output, self._num_prompt, self._num_tokens),
        }


def _settings(generation: GenerationRequest) -> Body:
    params = generation.params
    return {
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop_strings),
        "ignore_eos": params.ignore_eos,
        "stream": generation.stream,
    }


def _timings(output: RequestOutput, num_prompt: int, num_tokens: int) -> Body:
    """Milliseconds and rates: of the prompt's tokens that were computed, and of the output."""
    times = output.metrics
    first_s = times.first_token_s or times.arrival_s
    prompt_s = max(first_s - (times.arrival_s if times.seated_s is None else times.seated_s), 0.0)
    predicted_s = max((times.finished_s or first_s) - first_s, 0.0)
    num_computed = num_prompt - times.num_cached_tokens
    return {
        "cache_n": times.num_cached_tokens,
        "prompt_n": num_computed,
        "prompt_ms": 1000 * prompt_s,
        "prompt_per_second": num_computed / prompt_s if prompt_s else 0.0,
        "predicted_n": num_tokens,
        "predicted_ms": 1000 * predicted_s,
        "predicted_per_second": num_tokens / predicted_s if predicted_s else 0.0,
    }


async def completion(state: ServerState, request: Request) -> Response:
    body = await read(request, LlamacppCompletionBody)
    state.model.check_model(body.model)

    def ids() -> list[int]:
        return _prompt_ids(body.prompt, state.model)

    return await _respond(state, request, body, await state.model.text_threads.run(ids))


async def infill(state: ServerState, request: Request) -> Response:
    body = await read(request, InfillBody)
    model = state.model
    model.check_model(body.model)

    def ids() -> list[int]:
        others = [OtherFile(each.filename, each.text) for each in body.input_extra or ()]
        before = body.input_prefix + (body.prompt or "")
        return middle_ids(model, before, body.input_suffix, param="input_suffix", others=others)

    return await _respond(state, request, body, await model.text_threads.run(ids))


def _prompt_ids(prompt: str | list[str | int], model: ServedModel) -> list[int]:
    """Texts and token ids, one after the other; the first text gets the special tokens of a beginning."""
    if isinstance(prompt, str):
        return model.prompt_ids(prompt, "prompt")
    ids: list[int] = []
    for place, part in enumerate(prompt):
        if isinstance(part, str):
            ids += model.prompt_ids(part, "prompt", add_special_tokens=place == 0)
        else:
            ids += model.checked_ids([part])
    if not ids:
        raise InvalidPrompt(f"prompt is {shown(prompt)}: there is nothing to continue.", param="prompt")
    return ids


async def _respond(state: ServerState, request: Request, body: LlamacppBody, ids: list[int]) -> Response:
    model = state.model
    with rename_error_params(PARAM_NAMES):
        generation = await constrain(completion_generation(as_completion(body), model), model)
        generation = clamp_max_tokens(generation, len(ids), model)
        tokens = submit(state.engine, ids, generation, streaming=generation.stream)
        response = LlamacppResponse(model, body, generation, len(ids))
        if generation.stream:
            return await stream(request, _events(tokens, response), tokens.close, state.keep_alive_s)
        output = await until_disconnect(request, tokens.output(), tokens.close)
    return json_response(response.whole(output))


async def _events(tokens: RequestStream, response: LlamacppResponse) -> Events:
    while isinstance(update := await tokens.receive(), Delta):
        if chunk := response.chunk(update):
            yield chunk
    yield response.last_chunk(update)


async def props(state: ServerState, request: Request) -> Response:
    """What llama.cpp's clients ask of a server first."""
    model, info = state.model, state.engine.info
    defaults = model.defaults
    params = {name: getattr(defaults, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return json_response(
        {
            "default_generation_settings": {"n_ctx": model.max_model_len, "params": params},
            "total_slots": 0 if info is None else info.max_num_seqs,
            "model_alias": model.name,
            "model_path": model.name,
            "chat_template": model.chat_template or "",
            "bos_token": "" if model.tokenizer is None else model.tokenizer.named_tokens.get("bos_token") or "",
            "eos_token": "" if model.tokenizer is None else model.tokenizer.named_tokens.get("eos_token") or "",
            "modalities": {"vision": False, "audio": False},
            "infill": fills_in_middle(model.tokenizer),
            "build_info": f"quire {__version__}",
        }
    )


async def slots(state: ServerState, request: Request) -> Response:
    """A slot for each row of the batch. Does not say which request has which row."""
    info, stats = state.engine.info, state.engine.stats
    num_slots = 0 if info is None else info.max_num_seqs
    num_busy = 0 if stats is None else stats.num_running
    listed = [
        {"id": place, "n_ctx": state.model.max_model_len, "is_processing": place < num_busy}
        for place in range(num_slots)
    ]
    return Response(msgspec.json.encode(listed), media_type="application/json")

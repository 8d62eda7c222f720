"""Ollama API: POST /api/chat and /api/generate, their bodies, and the conversion to bodies of chats and completions.

Streams by default, as JSON lines. Options that would change the output and are not served are refused by name; options
of loading a model have no effect, since it is loaded.
"""

import time
from collections import deque
from dataclasses import replace

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import ContextLengthExceeded, InvalidParameter, InvalidPrompt, shown
from quire.engine.model_format import ModelFormat
from quire.server.chat.logprobs import TokenText
from quire.server.chat.messages import MessageBuilder, refused_part
from quire.server.chat.prompt import ChatPrompt, chat_prompt, drop_oldest_turns
from quire.server.chat.session import ChatDelta, ChatStream, start_chat
from quire.server.context import ServedModel, ServerState
from quire.server.http.errors import rename_error_params
from quire.server.http.sse import JSON_LINES, Events, json_response, run_inline_if_short, stream, until_disconnect
from quire.server.ollama.response import OllamaResponse
from quire.server.prompt_group import middle_ids, submit
from quire.server.request.decode import read
from quire.server.request.params import (
    GenerationRequest,
    chat_generation,
    clamp_max_tokens,
    completion_generation,
    constrain,
)
from quire.server.request.schema import (
    ChatBody,
    CompletionBody,
    Json,
    NamedSchema,
    NumLogprobs,
    Penalty,
    ResponseFormat,
    Share,
    Temperature,
)

LATEST = ":latest"  # the tag that Ollama adds to a name without one
_OUTPUT_SHARE = 8  # an eighth of the context is left for the output when old turns are dropped
_ROLES = ("system", "user", "assistant", "tool")


class OllamaOptions(Struct, kw_only=True):
    """Sampling parameters. Those of loading (num_gpu, num_thread, …) are ignored. Null means unset."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: int | None = None
    min_p: Share | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    num_predict: int | None = None  # below 1: the rest of the context
    num_ctx: int | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    penalize_newline: bool | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: float | bool | None = None


class OllamaFunction(Struct, kw_only=True):
    """The function of a call, with its arguments as an object."""

    name: str
    arguments: dict[str, Json] = {}


class OllamaCall(Struct, kw_only=True):
    """A tool call of an earlier turn."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(Struct, kw_only=True):
    """A message of a conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Json] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaBody(Struct, kw_only=True):
    """The fields that /api/chat and /api/generate share."""

    model: str | None = None
    stream: bool | None = None  # unset means true
    options: OllamaOptions | None = None
    format: Json = None
    keep_alive: float | str | None = None  # no effect: the served model stays loaded
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    truncate: bool | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    """The body of POST /api/chat: a conversation to continue."""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Json]] | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """The body of POST /api/generate: one question, or with `raw` a text to continue."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[Json] | None = None


PARAM_NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **{name: f"options.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop",
                                            "presence_penalty", "frequency_penalty")},
    "response_format": "format",
    "response_format.type": "format",
    "response_format.json_schema.schema": "format",
}  # fmt: skip


def check_name(model: ServedModel, name: str | None) -> str:
    """The name under which a request asks for the model. The tag `latest` may be given or not."""
    if name is None:
        return model.name
    if name not in model.names:
        model.check_model(name.removesuffix(LATEST))
    return name


def sampling_fields(options: OllamaOptions) -> dict[str, Json]:
    """The options under the names of `SamplingBody`."""
    penalty = 1.0 if options.repeat_last_n == 0 else options.repeat_penalty
    penalties = (1.0 if penalty is None else penalty) != 1, options.presence_penalty, options.frequency_penalty
    wanted = {
        "typical_p": options.typical_p is not None and options.typical_p < 1,
        "tfs_z": options.tfs_z is not None and options.tfs_z < 1,
        "mirostat": bool(options.mirostat),  # without it, mirostat_tau and mirostat_eta mean nothing
        "penalize_newline": options.penalize_newline is False and any(penalties),
    }
    for name in (name for name, is_wanted in wanted.items() if is_wanted):
        where = f"options.{name}"
        instead = "penalties count newlines, too; omit it" if name == "penalize_newline" else "use top_p or min_p"
        raise InvalidParameter(f"{where} is not served here; {instead}.", param=where)
    return {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "seed": None if options.seed == -1 else options.seed,
        "stop": [text for text in options.stop if text] if isinstance(options.stop, list) else options.stop or None,
        "repetition_penalty": penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "max_tokens": num_predicted(options),
    }


def num_predicted(options: OllamaOptions) -> int | None:
    """The number of tokens to generate; None is the rest of the context."""
    return None if options.num_predict is None or options.num_predict < 1 else options.num_predict


def response_format(wanted: Json) -> ResponseFormat | None:
    """`format`: "json", or a JSON schema."""
    if wanted is None or wanted == "":
        return None
    if wanted == "json":
        return ResponseFormat(type="json_object")
    if isinstance(wanted, dict):
        return ResponseFormat(type="json_schema", json_schema=NamedSchema(schema=wanted))
    raise InvalidParameter(f'format is {shown(wanted)}; it may be "json" or a JSON schema.', param="format")


def as_chat(body: OllamaChatBody | OllamaGenerateBody, model: ServedModel) -> ChatBody:
    """The equivalent body of /v1/chat/completions. A last message of the assistant is continued."""
    builder = MessageBuilder()
    if isinstance(body, OllamaChatBody):
        calls = _OpenCalls()
        for place, message in enumerate(body.messages or []):
            _add_message(message, f"messages[{place}]", builder, calls)
    else:
        if body.system:
            builder.add_text("system", body.system)
        builder.add_text("user", body.prompt or "")
    effort = body.think if isinstance(body.think, str) else None
    return ChatBody(
        **sampling_fields(body.options or OllamaOptions()),
        messages=builder.messages(),
        stream=body.stream is not False,
        tools=(body.tools or None) if isinstance(body, OllamaChatBody) else None,
        continue_final_message=builder.ends_with_assistant_text,
        chat_template_kwargs=_template_variables(body.think, model),
        reasoning_effort=effort,
        response_format=response_format(body.format),
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
    )


def _template_variables(think: bool | str | None, model: ServedModel) -> dict[str, Json] | None:
    if think and model.model_format.detected.reasoning is None:
        raise InvalidParameter(f"{shown(model.name)} does not support thinking; omit think.", param="think")
    return {"enable_thinking": think} if isinstance(think, bool) else None


class _OpenCalls:
    """Calls without a result yet. Ollama's messages need no ids: a result is of the first open call of its tool."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by id, in order
        self._ids: dict[str, deque[str]] = {}  # by name
        self._num_calls = 0

    def add(self, call: OllamaCall) -> str:
        """The id of a call; a new one, if it has none."""
        self._num_calls += 1
        call_id = call.id or f"call_{self._num_calls}"
        self._names[call_id] = call.function.name
        self._ids.setdefault(call.function.name, deque()).append(call_id)
        return call_id

    def take(self, call_id: str | None, name: str | None) -> str:
        """The id of the call that a result is for."""
        if call_id is None and name is not None and self._ids.get(name):
            call_id = self._ids[name].popleft()
        elif call_id is None and name is None and self._names:
            call_id = next(iter(self._names))
        call_id = call_id or "call_0"
        self._names.pop(call_id, None)
        return call_id


def _add_message(message: OllamaMessage, where: str, builder: MessageBuilder, calls: _OpenCalls) -> None:
    if message.role not in _ROLES:
        raise refused_part(f"{where}.role is {shown(message.role)}; it may be one of {', '.join(_ROLES)}", where)
    if message.images:
        raise refused_part(f"{where} has images: this model reads text only", f"{where}.images")
    text = message.content or ""
    if message.role == "tool":
        builder.add_result(calls.take(message.tool_call_id, message.tool_name), text)
        return
    if message.thinking and message.role == "assistant":
        builder.add_reasoning(message.thinking)
    if text or not message.tool_calls:
        builder.add_text(message.role, text)
    for call in message.tool_calls or ():
        arguments = msgspec.json.encode(call.function.arguments).decode()
        builder.add_call(calls.add(call), call.function.name, arguments)


async def chat(state: ServerState, request: Request) -> Response:
    began_s = time.monotonic()
    body = await read(request, OllamaChatBody)
    if not body.messages:
        return _loaded(state.model, body, is_chat=True)
    return await _respond(state, request, body, began_s)


async def generate(state: ServerState, request: Request) -> Response:
    began_s = time.monotonic()
    body = await read(request, OllamaGenerateBody)
    _check(body)
    if not body.prompt:
        return _loaded(state.model, body, is_chat=False)
    return await _respond(state, request, body, began_s)


def _check(body: OllamaGenerateBody) -> None:
    refused = {
        "template": "the server runs the model's own; with raw the prompt is used as it is",
        "context": "send the conversation to /api/chat",
    }
    for name, instead in refused.items():
        if getattr(body, name):
            raise InvalidParameter(f"{name} is not served here; {instead}.", param=name)
    if body.raw and body.system:
        raise InvalidParameter("system has no place in a raw prompt; put it into prompt or omit raw.", param="system")
    if body.images:
        raise InvalidPrompt("images are not served here: this model reads text only.", param="images")


def _loaded(model: ServedModel, body: OllamaBody, *, is_chat: bool) -> Response:
    """The response to a request without a prompt, with which clients load a model."""
    return json_response(OllamaResponse.loaded(check_name(model, body.model), is_chat=is_chat))


async def _respond(
    state: ServerState, request: Request, body: OllamaChatBody | OllamaGenerateBody, began_s: float
) -> Response:
    model = state.model
    name = check_name(model, body.model)
    with rename_error_params(PARAM_NAMES):
        if isinstance(body, OllamaGenerateBody) and (body.raw or body.suffix):
            output = await _start_raw(state, body)
        else:
            model.check_length(len(body.messages or []) if isinstance(body, OllamaChatBody) else 1)
            chat_body = await run_inline_if_short(request, as_chat, body, model)
            generation, prompt = chat_generation(chat_body, model), chat_prompt(chat_body)
            output = await _start_chat(state, prompt, generation, body)
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        token_text = TokenText(model.tokenizer, as_ids=False)
        is_chat = isinstance(body, OllamaChatBody)
        response = OllamaResponse(name, output, token_text, began_s, is_chat=is_chat, num_top=num_top)
        if body.stream is not False:
            events = _events(output, response)
            return await stream(request, events, output.close, state.keep_alive_s, response.failed, JSON_LINES)
        try:
            result = await until_disconnect(request, output.result())
            num_scores = result.output.num_scores
            return await model.text_threads.run_scored(num_scores, lambda: json_response(response.whole(result)))
        finally:
            output.close()


async def _start_chat(
    state: ServerState, prompt: ChatPrompt, generation: GenerationRequest, body: OllamaBody
) -> ChatStream:
    """Old turns of a conversation that is longer than the context, or than `num_ctx`, are dropped, as Ollama does."""
    model = state.model
    options = body.options or OllamaOptions()
    limit = min(max(options.num_ctx or model.max_model_len, 1), model.max_model_len)
    limited = replace(model, max_model_len=limit)
    num_output = min(num_predicted(options) or limit, limit // _OUTPUT_SHARE) or 1
    truncates = body.truncate is not False
    if truncates and limit < model.max_model_len:
        prompt = await model.text_threads.run(drop_oldest_turns, prompt, limited, num_output)
    try:
        return await start_chat(state.engine, model, prompt, generation, clamp=True)
    except ContextLengthExceeded:
        if not truncates:
            raise
    prompt = await model.text_threads.run(drop_oldest_turns, prompt, limited, num_output)
    return await start_chat(state.engine, model, prompt, generation, clamp=True)


async def _start_raw(state: ServerState, body: OllamaGenerateBody) -> ChatStream:
    """A text to continue, or one before a suffix, without the chat template and without parsing of the output."""
    model = state.model
    prompt, suffix = body.prompt or "", body.suffix
    completion = CompletionBody(
        **sampling_fields(body.options or OllamaOptions()),
        prompt=prompt,
        stream=body.stream is not False,
        response_format=response_format(body.format),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    generation = await constrain(completion_generation(completion, model), model)

    def prompt_ids() -> list[int]:
        return middle_ids(model, prompt, suffix, param="suffix") if suffix else model.prompt_ids(prompt, "prompt")

    ids = await model.text_threads.run(prompt_ids)
    generation = clamp_max_tokens(generation, len(ids), model)
    tokens = submit(state.engine, ids, generation, streaming=generation.stream)
    return ChatStream(model, ChatPrompt([]), ids, [ModelFormat().parser(tools=(), parallel=True, prompt="")], tokens)


async def _events(chat: ChatStream, response: OllamaResponse) -> Events:
    while isinstance(update := await chat.receive(), ChatDelta):
        if lines := response.lines(update):
            yield lines
    yield response.last_line(update)

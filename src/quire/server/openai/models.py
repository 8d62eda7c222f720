"""GET /v1/models and /version; tokenization without generation: /tokenize, /detokenize, /tokenizer_info,
/apply-template."""

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidParameter, InvalidPrompt
from quire.server.chat.prompt import ChatPrompt, chat_prompt
from quire.server.context import ListedModel, ServedModel, ServerState
from quire.server.http.errors import sanitized
from quire.server.http.sse import json_response
from quire.server.request.decode import read
from quire.server.request.schema import ApplyTemplateBody, ChatBody, DetokenizeBody, TemplateBody, TokenizeBody
from quire.version import __version__

MAX_DETOKENIZED = 1 << 20  # tokens, or the context length if longer: decoding holds the GIL


async def models(state: ServerState, request: Request) -> Response:
    cards = [_card(listed, name) for listed in state.models for name in listed.model.names]
    return json_response({"object": "list", "data": cards})


async def model(state: ServerState, request: Request) -> Response:
    name = request.path_params["name"]
    return json_response(_card(state.find_model(name), name))


async def version(state: ServerState, request: Request) -> Response:
    return json_response({"version": __version__})


def _card(listed: ListedModel, name: str) -> dict[str, object]:
    model = listed.model
    card: dict[str, object] = {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "quire",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
    }
    if model.summary is not None:
        own = asdict(model.summary.sampling)
        card["default_sampling_params"] = {field: value for field, value in own.items() if value is not None}
    if listed.status is not None:  # as llama.cpp has it
        card["status"] = {"value": listed.status}
        if listed.reason is not None:
            card["status"] = {"value": listed.status, "failed": True, "reason": sanitized(listed.reason)}
    return card


async def tokenize(state: ServerState, request: Request) -> Response:
    body = await read(request, TokenizeBody)
    model = state.model
    model.check_model(body.model)
    return json_response(await model.text_threads.run(_tokens, body, model))


async def detokenize(state: ServerState, request: Request) -> Response:
    body = await read(request, DetokenizeBody)
    state.model.check_model(body.model)
    return json_response({"prompt": await state.model.text_threads.run(_text, body, state.model)})


async def tokenizer_info(state: ServerState, request: Request) -> Response:
    """The fields of a tokenizer_config.json, so that lm-eval needs no download."""
    model = state.model
    tokenizer = model.text()
    return json_response(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **tokenizer.named_tokens,
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_id,
            "chat_template": model.chat_template,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": model.max_model_len,
        }
    )


async def apply_template(state: ServerState, request: Request) -> Response:
    body = await read(request, ApplyTemplateBody)
    state.model.check_model(body.model)
    text = await state.model.text_threads.run(_chat_prompt(body, body.messages).render, state.model)
    return json_response({"prompt": text})


def _tokens(body: TokenizeBody, model: ServedModel) -> dict[str, object]:
    ids = _ids(body, model)
    response: dict[str, object] = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
    if body.return_token_strs:
        response["token_strs"] = [model.text().id_to_piece(token) for token in ids]
    return response


def _text(body: DetokenizeBody, model: ServedModel) -> str:
    model.text()
    most = max(model.max_model_len, MAX_DETOKENIZED)
    if len(body.tokens) > most:
        raise InvalidPrompt(f"There are {len(body.tokens)} tokens; a request may bring {most}.", param="tokens")
    return model.decode(model.checked_ids(body.tokens, "tokens"))


def _ids(body: TokenizeBody, model: ServedModel) -> list[int]:
    """A text gets special tokens unless disabled; a rendered template contains its own."""
    if body.messages is not None and body.prompt is None:
        text = _chat_prompt(body, body.messages).render(model)
        return model.text().encode(text, add_special_tokens=bool(body.add_special_tokens))
    if body.prompt is not None and body.messages is None:
        return model.text().encode(model.checked_text(body.prompt, "prompt"), body.add_special_tokens is not False)
    raise InvalidParameter("Give prompt or messages, and not both.", param="prompt")


def _chat_prompt(body: TemplateBody, messages: list[dict[str, object]]) -> ChatPrompt:
    """The prompt of a chat with these fields."""
    fields = {name: getattr(body, name) for name in TemplateBody.__struct_fields__ if name != "model"}
    return chat_prompt(ChatBody(messages=messages, **fields))

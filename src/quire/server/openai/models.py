"""GET /v1/models and /version; tokenization without generation: /tokenize, /detokenize, /tokenizer_info,
/apply-template."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidParameter, InvalidPrompt
from quire.server.chat.prompt import ChatPrompt, check_tools
from quire.server.context import ServedModel, ServerState
from quire.server.http.sse import json_response
from quire.server.request.decode import read
from quire.server.request.schema import ApplyTemplateBody, DetokenizeBody, TokenizeBody
from quire.version import __version__

MAX_DETOKENIZED = 1 << 20  # tokens, or the context length if longer: decoding holds the GIL


async def models(desk: ServerState, request: Request) -> Response:
    return json_response({"object": "list", "data": [_card(desk.served, name) for name in desk.served.names]})


async def model(desk: ServerState, request: Request) -> Response:
    name = request.path_params["name"]
    desk.served.check_model(name)
    return json_response(_card(desk.served, name))


async def version(desk: ServerState, request: Request) -> Response:
    return json_response({"version": __version__})


def _card(served: ServedModel, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "quire",
        "root": served.name,
        "parent": None,
        "max_model_len": served.max_model_len,
    }


async def tokenize(desk: ServerState, request: Request) -> Response:
    body = await read(request, TokenizeBody)
    served = desk.served
    served.check_model(body.model)
    return json_response(await run_in_threadpool(_tokens, body, served))


async def detokenize(desk: ServerState, request: Request) -> Response:
    body = await read(request, DetokenizeBody)
    desk.served.check_model(body.model)
    return json_response({"prompt": await run_in_threadpool(_text, body, desk.served)})


async def tokenizer_info(desk: ServerState, request: Request) -> Response:
    """The fields of a tokenizer_config.json, so that lm-eval needs no download."""
    served = desk.served
    tokenizer = served.text()
    return json_response(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **tokenizer.named_tokens,
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_id,
            "chat_template": served.chat_template,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": served.max_model_len,
        }
    )


async def apply_template(desk: ServerState, request: Request) -> Response:
    body = await read(request, ApplyTemplateBody)
    desk.served.check_model(body.model)
    text = await run_in_threadpool(_chat_prompt(body, body.messages).render, desk.served)
    return json_response({"prompt": text})


def _tokens(body: TokenizeBody, served: ServedModel) -> dict[str, object]:
    ids = _ids(body, served)
    response: dict[str, object] = {"count": len(ids), "max_model_len": served.max_model_len, "tokens": ids}
    if body.return_token_strs:
        response["token_strs"] = [served.text().id_to_piece(token) for token in ids]
    return response


def _text(body: DetokenizeBody, served: ServedModel) -> str:
    served.text()
    most = max(served.max_model_len, MAX_DETOKENIZED)
    if len(body.tokens) > most:
        raise InvalidPrompt(f"There are {len(body.tokens)} tokens; a request may bring {most}.", param="tokens")
    return served.spelled(served.checked_ids(body.tokens, "tokens"))


def _ids(body: TokenizeBody, served: ServedModel) -> list[int]:
    """A text gets special tokens unless disabled; a rendered template contains its own."""
    if body.messages is not None and body.prompt is None:
        text = _chat_prompt(body, body.messages).render(served)
        return served.text().encode(text, add_special_tokens=bool(body.add_special_tokens))
    if body.prompt is not None and body.messages is None:
        return served.text().encode(served.readable(body.prompt, "prompt"), body.add_special_tokens is not False)
    raise InvalidParameter("Give prompt or messages, and not both.", param="prompt")


def _chat_prompt(body: TokenizeBody | ApplyTemplateBody, messages: list[dict[str, object]]) -> ChatPrompt:
    return ChatPrompt(
        messages=messages,
        tools=body.tools or [],
        tool_choice=check_tools(body.tools),
        template_variables=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )

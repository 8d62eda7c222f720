"""POST /v1/responses, and the routes that would need stored responses."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import QuireError
from quire.server.chat.prompt import chat_prompt, drop_oldest_turns
from quire.server.chat.session import ChatDelta, ChatStream, start_chat
from quire.server.context import ServerState
from quire.server.http.errors import rename_error_params
from quire.server.http.sse import Events, json_response, run_inline_if_short, stream, until_disconnect
from quire.server.openai.responses_input import PARAM_NAMES, ResponsesBody, as_chat
from quire.server.openai.responses_output import ResponsesResponse
from quire.server.request.decode import read
from quire.server.request.params import chat_generation


class NotStored(QuireError):
    """A stored response was requested by id."""

    status = 404
    code = "response_not_found"


async def responses(state: ServerState, request: Request) -> Response:
    body = await read(request, ResponsesBody)
    model = state.model
    model.check_model(body.model)
    with rename_error_params(PARAM_NAMES):
        if body.truncation != "auto" and isinstance(body.input, list):
            model.check_length(len(body.input), "input")
        chat_body = await run_inline_if_short(request, as_chat, body)
        generation, prompt = chat_generation(chat_body, model), chat_prompt(chat_body)
        if body.truncation == "auto":
            prompt = await run_in_threadpool(drop_oldest_turns, prompt, model, generation.params.max_tokens)
        chat = await start_chat(state.engine, model, prompt, generation)
        response = ResponsesResponse(model.name, body, generation)
        if generation.stream:
            events = _events(chat, response)
            return await stream(request, events, chat.close, state.keep_alive_s, response.failed)
        result = await until_disconnect(request, chat.result(), chat.close)
    return json_response(response.whole(result, await chat.num_reasoning_tokens()))


async def stored_response(state: ServerState, request: Request) -> Response:
    raise NotStored("This server stores no responses: there is none to get, cancel or delete.", param="response_id")


async def _events(chat: ChatStream, response: ResponsesResponse) -> Events:
    while isinstance(update := await chat.receive(), ChatDelta):
        if events := response.events(update):
            yield events
    yield response.last_event(update, await chat.num_reasoning_tokens())

"""POST /v1/responses, and the routes that would need stored responses."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import QuireError
from quire.server.chat.prompt import dialogue_of, fitted
from quire.server.chat.session import ChatDelta, ChatStream
from quire.server.context import ServerState
from quire.server.http.errors import called
from quire.server.http.sse import Events, json_response, stream, unless_gone, worked
from quire.server.openai.responses_input import NAMES, ResponsesBody, as_chat
from quire.server.openai.responses_output import ResponsesResponse
from quire.server.request.decode import read
from quire.server.request.params import chat_wanted


class NotStored(QuireError):
    """A response is asked for by its id."""

    status = 404
    code = "response_not_found"


async def responses(desk: ServerState, request: Request) -> Response:
    body = await read(request, ResponsesBody)
    served = desk.served
    served.check_model(body.model)
    with called(NAMES):
        if body.truncation != "auto" and isinstance(body.input, list):
            served.check_least(len(body.input), "input")
        chat = await worked(request, as_chat, body)
        wanted, dialogue = chat_wanted(chat, served), dialogue_of(chat)
        if body.truncation == "auto":
            dialogue = await run_in_threadpool(fitted, dialogue, served, wanted.params.max_tokens)
        exchange = await ChatStream.begin(desk.service, served, dialogue, wanted)
        answer = ResponsesResponse(served.name, body, wanted)
        if wanted.stream:
            events = _events(exchange, answer)
            return await stream(request, events, exchange.leave, desk.keep_alive_s, answer.failed)
        answered = await unless_gone(request, exchange.whole(), exchange.leave)
    return json_response(answer.whole(answered, await exchange.num_thought_tokens()))


async def stored_response(desk: ServerState, request: Request) -> Response:
    raise NotStored("This server stores no responses: there is none to get, cancel or delete.", param="response_id")


async def _events(exchange: ChatStream, answer: ResponsesResponse) -> Events:
    while isinstance(news := await exchange.hear(), ChatDelta):
        if told := answer.events(news):
            yield told
    yield answer.ending(news, await exchange.num_thought_tokens())

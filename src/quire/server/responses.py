"""POST /v1/responses, and the routes that would need stored responses."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import QuireError
from quire.server.bodies.responses import ResponsesBody
from quire.server.chat import dialogue_of
from quire.server.desk import Desk
from quire.server.edge import json_response, read, unless_gone, worked
from quire.server.exchange import Exchange, Spoken
from quire.server.fitting import fitted
from quire.server.naming import called
from quire.server.responses_answer import ResponsesAnswer
from quire.server.responses_request import NAMES, as_chat
from quire.server.sse import Events, stream
from quire.server.translate import chat_wanted


class NotStored(QuireError):
    """A response is asked for by its id."""

    status = 404
    code = "response_not_found"


async def responses(desk: Desk, request: Request) -> Response:
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
        exchange = await Exchange.begin(desk.service, served, dialogue, wanted)
        answer = ResponsesAnswer(served.name, body, wanted)
        if wanted.stream:
            events = _events(exchange, answer)
            return await stream(request, events, exchange.leave, desk.keep_alive_s, answer.failed)
        answered = await unless_gone(request, exchange.whole(), exchange.leave)
    return json_response(answer.whole(answered, await exchange.num_thought_tokens()))


async def stored_response(desk: Desk, request: Request) -> Response:
    raise NotStored("This server stores no responses: there is none to get, cancel or delete.", param="response_id")


async def _events(exchange: Exchange, answer: ResponsesAnswer) -> Events:
    while isinstance(news := await exchange.hear(), Spoken):
        if told := answer.events(news):
            yield told
    yield answer.ending(news, await exchange.num_thought_tokens())

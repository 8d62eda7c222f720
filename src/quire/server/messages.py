"""POST /v1/messages and /v1/messages/count_tokens, for Anthropic's clients."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from quire.server.bodies.messages import CountTokensBody, MessagesBody
from quire.server.chat import dialogue_of
from quire.server.desk import Desk
from quire.server.edge import json_response, read, unless_gone, worked
from quire.server.exchange import Exchange, Spoken
from quire.server.messages_answer import MessagesAnswer
from quire.server.messages_request import NAMES, as_chat
from quire.server.naming import called
from quire.server.served import Served
from quire.server.sse import Events, stream
from quire.server.translate import chat_wanted
from quire.server.visit import visit_of


async def messages(desk: Desk, request: Request) -> Response:
    body = await read(request, MessagesBody)
    served = desk.served
    served.check_model(body.model)
    with called(NAMES if body.stop is not None else {**NAMES, "stop": "stop_sequences"}):
        served.check_least(len(body.messages))
        chat = await worked(request, as_chat, body)
        wanted = chat_wanted(chat, served)
        exchange = await Exchange.begin(desk.service, served, dialogue_of(chat), wanted, clamp=True)
        answer = MessagesAnswer(served.name, len(exchange.prompt_ids), visit_of(request.scope).request_id)
        if wanted.stream:
            events = _events(exchange, answer)
            return await stream(request, events, exchange.leave, desk.keep_alive_s, answer.failed)
        answered = await unless_gone(request, exchange.whole(), exchange.leave)
    return json_response(answer.whole(answered))


async def count_tokens(desk: Desk, request: Request) -> Response:
    body = await read(request, CountTokensBody)
    served = desk.served
    served.check_model(body.model)
    served.check_least(len(body.messages))
    return json_response({"input_tokens": await run_in_threadpool(_num_tokens, body, served)})


async def _events(exchange: Exchange, answer: MessagesAnswer) -> Events:
    while isinstance(news := await exchange.hear(), Spoken):
        if told := answer.events(news):
            yield told
    yield answer.ending(news)


def _num_tokens(body: CountTokensBody, served: Served) -> int:
    return len(dialogue_of(as_chat(body)).rendered(served).ids)

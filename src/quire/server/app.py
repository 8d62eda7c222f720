"""The HTTP surface: completions and chat completions, streamed or whole; models; health; load."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from quire.core.errors import EngineFailed, InvalidPrompt, ModelNotFound, QuireError
from quire.engine.build import Built
from quire.engine.front import Prompt
from quire.engine.outputs import Delta, RequestOutput
from quire.llm import LLM
from quire.server.answers import DONE, Answer, error_body, event
from quire.server.schema import Wanted, fields_of, messages_of, prompt_of, read_chat, read_completion
from quire.server.service import Call, News, Service

MAX_BODY_BYTES = 16 << 20
_CLIENT_LEFT = 499  # nobody reads it; what servers write in their logs for a client that hung up

_log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


class BodyTooLarge(QuireError):
    """More bytes than any request may have."""

    status = 413
    code = "body_too_large"


class EventStream(StreamingResponse):
    """Server-sent events of one call, which is left when the response ends, however it ends."""

    def __init__(self, events: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


class Api:
    """The endpoints over one engine."""

    def __init__(self, built: Built, service: Service) -> None:
        self._llm = LLM.over(built)
        self._name = built.name
        self._service = service

    async def completions(self, request: Request) -> Response:
        body = fields_of(await _json(request), self._name)
        wanted = read_completion(body, self._llm.get_default_sampling_params())
        return await self._answer(request, prompt_of(body), wanted, chat=False)

    async def chat_completions(self, request: Request) -> Response:
        body = fields_of(await _json(request), self._name)
        wanted = read_chat(body, self._llm.get_default_sampling_params())
        prompt = await run_in_threadpool(self._llm.chat_prompt, messages_of(body))
        return await self._answer(request, prompt, wanted, chat=True)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._name:
            raise ModelNotFound(f"There is no model {name!r:.100} here; this server has {self._name!r}.", param="model")
        return JSONResponse(self._card())

    async def health(self, request: Request) -> Response:
        failure = self._service.failure
        return Response(status_code=200) if failure is None else JSONResponse(error_body(failure), 503)

    async def load(self, request: Request) -> Response:
        return JSONResponse({"requests": self._service.num_calls, "idle": self._service.idle})

    async def _answer(self, request: Request, prompt: Prompt, wanted: Wanted, *, chat: bool) -> Response:
        _, ids = await run_in_threadpool(self._llm.front.encode, prompt)  # a long text takes long to read
        answer = Answer(self._name, chat)
        call = self._service.submit(ids, wanted.params, terms=wanted.terms, streaming=wanted.stream)
        try:
            if not wanted.stream:
                output = await _unless_gone(request, _output(call))
                self._service.leave(call)
                return JSONResponse(answer.whole(output))
            first = await _unless_gone(request, call.hear())  # what fails before a token is a real error, no event
            return EventStream(_events(first, call, answer, wanted), lambda: self._service.leave(call))
        except BaseException:
            self._service.leave(call)
            raise

    def _card(self) -> dict[str, object]:
        return {"id": self._name, "object": "model", "created": 0, "owned_by": "quire"}


async def _output(call: Call) -> RequestOutput:
    while not isinstance(news := await call.hear(), RequestOutput):
        pass
    return news


async def _events(first: News, call: Call, answer: Answer, wanted: Wanted) -> AsyncIterator[bytes]:
    for chunk in answer.opening(wanted.params.n):
        yield chunk
    news = first
    try:
        while isinstance(news, Delta):
            for chunk in answer.chunks(news):
                yield chunk
            news = await call.hear()
    except QuireError as error:
        yield event(error_body(error))
        return
    if wanted.include_usage:
        yield answer.usage_chunk(news)
    yield DONE


async def _unless_gone(request: Request, work: Coroutine[None, None, T]) -> T:
    """The result of some work, or `ClientDisconnect` if the client hangs up before."""
    wanted = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hang_up(request))
    try:
        await asyncio.wait({wanted, gone}, return_when=asyncio.FIRST_COMPLETED)
        if wanted.done():
            return wanted.result()
        raise ClientDisconnect
    finally:
        wanted.cancel()
        gone.cancel()


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _json(request: Request) -> object:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"The body is larger than {MAX_BODY_BYTES} bytes, the most that is read.")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidPrompt(f"The body is not JSON: {error}.") from error


def _answering(endpoint: Endpoint) -> Endpoint:
    """Errors a client can cause become their own answers; our mistakes become a plain 500."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except QuireError as error:
            return JSONResponse(error_body(error), status_code=error.status)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_LEFT)
        except Exception:
            _log.exception("an endpoint failed")
            failure = EngineFailed("The server failed to answer this request; its log says why.")
            return JSONResponse(error_body(failure), status_code=500)

    return answer


async def _no_such_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    wrong = QuireError(f"{request.method} {request.url.path:.200} is not served here.")
    return JSONResponse(error_body(wrong), status_code=status)


def make_app(built: Built, service: Service) -> Starlette:
    """The application over an engine; the engine's thread lives as long as it does."""
    api = Api(built, service)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    routes = [
        Route("/v1/completions", _answering(api.completions), methods=["POST"]),
        Route("/v1/chat/completions", _answering(api.chat_completions), methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", _answering(api.model)),
        Route("/health", api.health),
        Route("/load", api.load),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _no_such_route})

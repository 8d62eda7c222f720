"""The HTTP surface: completions and chat completions, streamed or whole; models; health."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from quire.core.errors import InvalidPrompt, QuireError
from quire.engine.build import Built
from quire.engine.outputs import Delta, RequestOutput
from quire.llm import LLM
from quire.server.schema import Wanted, messages_of, read_chat, read_completion
from quire.server.service import Service

MAX_BODY_BYTES = 16 << 20


class Shape(NamedTuple):
    """How one endpoint dresses a text: object names, and a choice whole or in part."""

    prefix: str
    whole: str
    part: str
    choice: Callable[[str, bool], dict[str, object]]


COMPLETION = Shape("cmpl", "text_completion", "text_completion", lambda text, whole: {"text": text})
CHAT = Shape(
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    lambda text, whole: {("message" if whole else "delta"): {"role": "assistant", "content": text}},
)


class Api:
    """The endpoints over one engine."""

    def __init__(self, built: Built) -> None:
        self._llm = LLM.over(built)
        self._name = built.name
        self.service = Service(built.front)

    async def completions(self, request: Request) -> Response:
        wanted = read_completion(await _json(request), self._llm.get_default_sampling_params())
        return await self._answer(request, wanted, COMPLETION)

    async def chat_completions(self, request: Request) -> Response:
        body = await _json(request)
        prompt = self._llm.chat_prompt(messages_of(body))
        wanted = read_chat(body, self._llm.get_default_sampling_params(), prompt)
        return await self._answer(request, wanted, CHAT)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self._name, "object": "model", "owned_by": "quire"}]})

    async def health(self, request: Request) -> Response:
        failure = self.service.failure
        return Response(status_code=200 if failure is None else 503)

    async def _answer(self, request: Request, wanted: Wanted, shape: Shape) -> Response:
        head = {"id": f"{shape.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self._name}
        news = self.service.stream(wanted.prompt, wanted.params)
        if wanted.stream:
            first = await anext(news)  # errors known before the first token are real errors, not events
            events = _events(first, news, head, shape, wanted.include_usage)
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        output = await _whole(news, request)
        choices = [
            {
                "index": o.index,
                **shape.choice(o.text, True),
                "finish_reason": o.finish_reason,
                "logprobs": None,
            }
            for o in output.outputs
        ]
        return JSONResponse({**head, "object": shape.whole, "choices": choices, "usage": _usage(output)})


async def _whole(news: AsyncIterator[Delta | RequestOutput], request: Request) -> RequestOutput:
    async for item in news:
        if isinstance(item, RequestOutput):
            return item
        if await request.is_disconnected():
            await news.aclose()  # type: ignore[attr-defined]
            raise QuireError("The client left.")
    raise AssertionError("a request ended without an output")


async def _events(
    first: Delta | RequestOutput,
    news: AsyncIterator[Delta | RequestOutput],
    head: dict[str, object],
    shape: Shape,
    include_usage: bool,
) -> AsyncIterator[bytes]:
    async def everything() -> AsyncIterator[Delta | RequestOutput]:
        yield first
        async for item in news:
            yield item

    try:
        async for item in everything():
            if isinstance(item, Delta):
                if item.text or item.finish_reason:
                    choice = {
                        "index": item.index,
                        **shape.choice(item.text, False),
                        "finish_reason": item.finish_reason,
                    }
                    yield _event({**head, "object": shape.part, "choices": [choice]})
            elif include_usage:
                yield _event({**head, "object": shape.part, "choices": [], "usage": _usage(item)})
    except QuireError as error:
        yield _event(_error_body(error))
        return
    finally:
        await news.aclose()  # type: ignore[attr-defined]
    yield b"data: [DONE]\n\n"


def _event(body: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def _usage(output: RequestOutput) -> dict[str, int]:
    prompt = len(output.prompt_token_ids)
    completion = sum(len(o.token_ids) for o in output.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _error_body(error: QuireError) -> dict[str, object]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


async def _json(request: Request) -> object:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            error = InvalidPrompt(f"The body is larger than {MAX_BODY_BYTES} bytes.")
            error.status = 413
            raise error
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidPrompt(f"The body is not JSON: {error}.") from error


def _answering(
    endpoint: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Errors a client can cause become their own answers."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except QuireError as error:
            return JSONResponse(_error_body(error), status_code=error.status)

    return answer


def make_app(built: Built) -> Starlette:
    """The application over an engine; the engine's thread lives as long as it does."""
    api = Api(built)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        api.service.start()
        yield
        api.service.stop()

    routes = [
        Route("/v1/completions", _answering(api.completions), methods=["POST"]),
        Route("/v1/chat/completions", _answering(api.chat_completions), methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/health", api.health),
    ]
    return Starlette(routes=routes, lifespan=lifespan)

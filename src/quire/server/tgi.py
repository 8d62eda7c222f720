"""POST /, /generate, /generate_stream and GET /info, for clients of text-generation-inference."""

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from quire.core.sampling import MAX_STOP_STRINGS
from quire.engine.outputs import Delta
from quire.server.bodies.tgi import GenerateBody, TgiParameters
from quire.server.chorus import Chorus
from quire.server.desk import Desk
from quire.server.edge import json_response, read, unless_gone
from quire.server.naming import called
from quire.server.served import Served
from quire.server.sse import Events, stream
from quire.server.tgi_answer import TgiAnswer
from quire.server.tgi_request import NAMES, as_completion
from quire.server.translate import Wanted, completion_wanted, constrained, shortened
from quire.version import __version__


async def root(desk: Desk, request: Request) -> Response:
    """Where TGI's own clients ask; they read a list of one."""
    body = await read(request, GenerateBody)
    if body.stream:
        return await _streamed(desk, request, body)
    told = await _whole(desk, request, body)
    return Response(msgspec.json.encode([told]), media_type="application/json")


async def generate(desk: Desk, request: Request) -> Response:
    return json_response(await _whole(desk, request, await read(request, GenerateBody)))


async def generate_stream(desk: Desk, request: Request) -> Response:
    return await _streamed(desk, request, await read(request, GenerateBody))


async def info(desk: Desk, request: Request) -> Response:
    served = desk.served
    return json_response(
        {
            "model_id": served.name,
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "max_best_of": 1,
            "max_stop_sequences": MAX_STOP_STRINGS,
            "max_input_tokens": served.max_model_len - 1,
            "max_total_tokens": served.max_model_len,
            "router": "quire",
            "version": __version__,
        }
    )


async def _whole(desk: Desk, request: Request, body: GenerateBody) -> dict[str, object]:
    with called(NAMES):
        chorus, answer = await _begin(desk, body, streaming=False)
        [output] = await unless_gone(request, chorus.outputs(), chorus.leave)
    return answer.whole(output)


async def _streamed(desk: Desk, request: Request, body: GenerateBody) -> Response:
    with called(NAMES):
        chorus, answer = await _begin(desk, body, streaming=True)
        return await stream(request, _frames(chorus, answer), chorus.leave, desk.keep_alive_s, answer.failed)


async def _begin(desk: Desk, body: GenerateBody, *, streaming: bool) -> tuple[Chorus, TgiAnswer]:
    served = desk.served
    completion = as_completion(body, stream=streaming)
    wanted = completion_wanted(completion, served)
    wanted = await constrained(wanted, wanted.grammar, served)
    ids = await run_in_threadpool(_ids, body, completion.truncate_prompt_tokens, wanted, served)
    answer = TgiAnswer(body.inputs, len(ids), body.parameters or TgiParameters(), served.text())
    return Chorus(desk.service, [ids], wanted, streaming=streaming), answer


def _ids(body: GenerateBody, truncate: int | None, wanted: Wanted, served: Served) -> list[int]:
    return shortened(served.text().encode(served.readable(body.inputs, "inputs")), truncate, wanted, served)


async def _frames(chorus: Chorus, answer: TgiAnswer) -> Events:
    while isinstance(news := (await chorus.hear()).news, Delta):
        if frames := answer.frames(news):
            yield frames

"""POST /v1/completions."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.outputs import RequestOutput
from quire.server.bodies.completion import CompletionBody
from quire.server.chorus import Chorus
from quire.server.completion_answer import Asked, CompletionAnswer
from quire.server.desk import Desk
from quire.server.edge import json_response, read, unless_gone
from quire.server.frames import Label
from quire.server.listed import listed
from quire.server.naming import called
from quire.server.scores import Spelling
from quire.server.served import Served
from quire.server.sse import DONE, Events, stream
from quire.server.translate import Wanted, completion_wanted, constrained, shortened
from quire.text.detok import decode_whole

MAX_PROMPTS = 128
_NAMES = {"messages": "prompt"}


async def completions(desk: Desk, request: Request) -> Response:
    body = await read(request, CompletionBody)
    served = desk.served
    served.check_model(body.model)
    with called(_NAMES):
        wanted = completion_wanted(body, served)
        wanted = await constrained(wanted, wanted.grammar, served)
        prompts = await run_in_threadpool(_prompts, body, wanted, served)
        answer = CompletionAnswer(
            Label(served.name, "cmpl"), prompts, wanted, Spelling(served.tokenizer, as_ids=wanted.tokens_as_ids)
        )
        at_once = wanted.stream and wanted.params.prompt_logprobs is not None
        all_ids = [prompt.ids for prompt in prompts]
        chorus = Chorus(desk.service, all_ids, wanted, streaming=wanted.stream and not at_once)
        if wanted.stream:
            events = (_scored_events if at_once else _events)(chorus, answer, wanted, len(prompts))
            return await stream(request, events, chorus.leave, desk.keep_alive_s)
        outputs = await unless_gone(request, chorus.outputs(), chorus.leave)
    return json_response(answer.whole(outputs))


async def _events(chorus: Chorus, answer: CompletionAnswer, wanted: Wanted, num_prompts: int) -> Events:
    outputs: dict[int, RequestOutput] = {}
    while len(outputs) < num_prompts:
        place, news = await chorus.hear()
        if isinstance(news, RequestOutput):
            outputs[place] = news
        elif chunks := answer.chunks(place, news):
            yield chunks
    if wanted.include_usage:
        yield answer.usage_chunk(list(outputs.values()))
    yield DONE


async def _scored_events(chorus: Chorus, answer: CompletionAnswer, wanted: Wanted, num_prompts: int) -> Events:
    outputs = await chorus.outputs()
    yield answer.whole_as_chunks(outputs)
    if wanted.include_usage:
        yield answer.usage_chunk(outputs)
    yield DONE


def _prompts(body: CompletionBody, wanted: Wanted, served: Served) -> list[Asked]:
    """Each as ids, with its text where that is to come back. A long text takes long to read."""
    prompts = []
    for prompt in listed(body.prompt, param="prompt", most=MAX_PROMPTS):
        special = body.add_special_tokens is not False
        if isinstance(prompt, str):
            whole = served.text().encode(served.readable(prompt, "prompt"), special)
        else:
            whole = served.checked_ids(prompt)
        ids = shortened(whole, body.truncate_prompt_tokens, wanted, served)
        echo = None
        if body.echo:
            echo = prompt if isinstance(prompt, str) and len(ids) == len(whole) else _echoed(ids, served)
        prompts.append(Asked(ids, echo))
    return prompts


def _echoed(ids: list[int], served: Served) -> str:
    """A character that the prompt begins and does not finish is the answer's."""
    return "" if served.tokenizer is None else decode_whole(served.tokenizer, ids)

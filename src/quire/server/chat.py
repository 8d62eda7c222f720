"""POST /v1/chat/completions."""

from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidParameter
from quire.server.bodies.chat import ChatBody
from quire.server.bodies.sampling import Json
from quire.server.chat_answer import ChatAnswer
from quire.server.desk import Desk
from quire.server.dialogue import Dialogue, check_tools, only_tools
from quire.server.edge import json_response, read, unless_gone
from quire.server.exchange import Exchange, Spoken
from quire.server.frames import Label
from quire.server.naming import called
from quire.server.scores import Spelling
from quire.server.sse import DONE, Events, stream
from quire.server.translate import Wanted, chat_wanted


async def chat_completions(desk: Desk, request: Request) -> Response:
    body = await read(request, ChatBody)
    served = desk.served
    served.check_model(body.model)
    with called({} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}):
        wanted, dialogue = chat_wanted(body, served), dialogue_of(body)
        exchange = await Exchange.begin(
            desk.service, served, dialogue, wanted, truncate=body.truncate_prompt_tokens, echo=bool(body.echo)
        )
        answer = ChatAnswer(
            Label(served.name, "chatcmpl"),
            exchange,
            wanted,
            Spelling(served.tokenizer, as_ids=wanted.tokens_as_ids),
            tell_thoughts=body.include_reasoning is not False,
        )
        if wanted.stream:
            return await stream(request, _events(exchange, answer, wanted), exchange.leave, desk.keep_alive_s)
        answered = await unless_gone(request, exchange.whole(), exchange.leave)
    return json_response(answer.whole(answered, await exchange.num_thought_tokens()))


async def _events(exchange: Exchange, answer: ChatAnswer, wanted: Wanted) -> Events:
    while isinstance(news := await exchange.hear(), Spoken):
        if chunks := answer.chunks(news):
            yield chunks
    if wanted.include_usage:
        yield answer.usage_chunk(news, await exchange.num_thought_tokens())
    yield DONE


def dialogue_of(body: ChatBody) -> Dialogue:
    """What a chat wants continued."""
    if body.chat_template is not None:
        raise InvalidParameter(
            "chat_template is not taken from requests: the server runs the model's own. Use chat_template_kwargs.",
            param="chat_template",
        )
    if body.documents:
        raise InvalidParameter("documents are not served here; put their text into the messages.", param="documents")
    tools, mode, named = _chosen(body)
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        variables.setdefault("enable_thinking", body.reasoning_effort != "none")
    return Dialogue(
        messages=body.messages,
        tools=tools,
        tool_choice=check_tools(tools, mode, named),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_variables=variables,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )


class _Chosen(NamedTuple):
    """The tools that may be called, and whether one must be, or which one."""

    tools: list[dict[str, Json]]
    mode: str | None = None
    name: str | None = None


def _chosen(body: ChatBody) -> _Chosen:
    tools, choice = body.tools or [], body.tool_choice
    if choice is None or isinstance(choice, str):
        return _Chosen(tools, choice)
    if choice.type == "function" and choice.function is not None:
        return _Chosen(tools, name=choice.function.name)
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        allowed = choice.allowed_tools
        return _Chosen(only_tools(tools, (tool.function.name for tool in allowed.tools)), allowed.mode)
    raise InvalidParameter(
        "tool_choice may be 'none', 'auto', 'required', "
        '{"type": "function", "function": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}.',
        param="tool_choice",
    )

"""The openai client, 2.x and 3.x."""

import asyncio
import json

import openai
import pydantic
from cases import (
    ASK_PERSON,
    ASK_WEATHER,
    CITY,
    GREET,
    GREETING,
    KEY,
    MODEL,
    PERSON,
    TOO_LONG,
    URL,
    WEATHER,
    WEATHER_SCHEMA,
    main,
    raises,
    same,
)

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
HELLO = [{"role": "user", "content": GREET}]
QUESTION = [{"role": "user", "content": ASK_WEATHER}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER_SCHEMA}}
FLAT_TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER_SCHEMA, "strict": True}


class Person(pydantic.BaseModel):
    name: str
    age: int


def models() -> None:
    (model,) = client.models.list().data
    same(model.id, MODEL)
    same(client.models.retrieve(MODEL).id, MODEL)


def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    same(answer.choices[0].message.content, GREETING)
    same(answer.choices[0].finish_reason, "stop")
    same(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)
    same(answer._request_id is None, False)
    parts = [{"role": "user", "content": [{"type": "text", "text": GREET}]}]
    same(client.chat.completions.create(model=MODEL, messages=parts).choices[0].message.content, GREETING)


def stream() -> None:
    asked = client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(asked)
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    same("".join(choice.delta.content or "" for choice in deltas), GREETING)
    same([choice.finish_reason for choice in deltas if choice.finish_reason], ["stop"])
    same(deltas[0].delta.role, "assistant")
    same(chunks[-1].usage.completion_tokens > 1, True)
    with client.chat.completions.stream(model=MODEL, messages=HELLO) as events:
        same(events.get_final_completion().choices[0].message.content, GREETING)


def asynchronous() -> None:
    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as several:
            asked = await several.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in asked])

    same(asyncio.run(run()), GREETING)


def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt=[GREET, ASK_PERSON], max_tokens=64)
    same([choice.text for choice in answer.choices], [GREETING, json.dumps(PERSON)])
    scored = client.completions.create(model=MODEL, prompt=GREET, max_tokens=1, echo=True, logprobs=1)
    scores = scored.choices[0].logprobs.token_logprobs
    same([score is None for score in scores], [True] + [False] * (len(scores) - 1))
    pieces = client.completions.create(model=MODEL, prompt=GREET, max_tokens=64, stream=True)
    same("".join(piece.choices[0].text for piece in pieces), GREETING)


def tools() -> None:
    first = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[TOOL]).choices[0]
    (call,) = first.message.tool_calls
    same((call.function.name, json.loads(call.function.arguments)), ("get_weather", {"city": CITY}))
    same(first.finish_reason, "tool_calls")
    told = [*QUESTION, first.message, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
    second = client.chat.completions.create(model=MODEL, messages=told, tools=[TOOL]).choices[0]
    same((second.message.content, second.message.tool_calls), (WEATHER, None))


def tools_stream() -> None:
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, tools=[TOOL]) as events:
        choice = events.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls
    same((call.function.name, json.loads(call.function.arguments)), ("get_weather", {"city": CITY}))
    same((bool(call.id), choice.finish_reason), (True, "tool_calls"))


def tools_required() -> None:
    for wish in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        choice = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[TOOL], tool_choice=wish).choices[
            0
        ]
        same(json.loads(choice.message.tool_calls[0].function.arguments), {"city": CITY})


def json_schema() -> None:
    asked = [{"role": "user", "content": ASK_PERSON}]
    parsed = client.chat.completions.parse(model=MODEL, messages=asked, response_format=Person)
    same(parsed.choices[0].message.parsed, Person(**PERSON))


def responses() -> None:
    answer = client.responses.create(model=MODEL, input=GREET)
    same((answer.output_text, answer.status), (GREETING, "completed"))
    same(answer.usage.total_tokens, answer.usage.input_tokens + answer.usage.output_tokens)


def responses_stream() -> None:
    events = list(client.responses.create(model=MODEL, input=GREET, stream=True))
    same([event.sequence_number for event in events], list(range(len(events))))
    same((events[0].type, events[-1].type), ("response.created", "response.completed"))
    same("".join(event.delta for event in events if event.type == "response.output_text.delta"), GREETING)
    same(events[-1].response.output_text, GREETING)


def responses_tools() -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, tools=[FLAT_TOOL])
    (call,) = [item for item in first.output if item.type == "function_call"]
    same((call.name, json.loads(call.arguments)), ("get_weather", {"city": CITY}))
    told = [*QUESTION, call, {"type": "function_call_output", "call_id": call.call_id, "output": "21"}]
    same(client.responses.create(model=MODEL, input=told, tools=[FLAT_TOOL]).output_text, WEATHER)


def responses_json_schema() -> None:
    parsed = client.responses.parse(model=MODEL, input=ASK_PERSON, text_format=Person)
    same(parsed.output_parsed, Person(**PERSON))


def errors() -> None:
    create = client.chat.completions.create
    same(raises(openai.NotFoundError, lambda: create(model="other", messages=HELLO)).code, "model_not_found")
    long = [{"role": "user", "content": TOO_LONG}]
    for streamed in (False, True):
        error = raises(openai.BadRequestError, lambda s=streamed: create(model=MODEL, messages=long, stream=s))
        same(error.code, "context_length_exceeded")
    same(raises(openai.BadRequestError, lambda: create(model=MODEL, messages=HELLO, temperature=-1)).status_code, 400)
    stranger = openai.OpenAI(base_url=f"{URL}/v1", api_key="sk-wrong", max_retries=0)
    raises(openai.AuthenticationError, stranger.models.list)


if __name__ == "__main__":
    main(models, chat, stream, asynchronous, completions, tools, tools_stream, tools_required, json_schema,
         responses, responses_stream, responses_tools, responses_json_schema, errors)  # fmt: skip

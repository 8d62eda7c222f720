"""LiteLLM, with the server as an OpenAI and as an Anthropic endpoint."""

import json
import os

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

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the import looks for prices in the internet
import litellm

SETTINGS = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0}
HELLO = [{"role": "user", "content": GREET}]
QUESTION = [{"role": "user", "content": ASK_WEATHER}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER_SCHEMA}}


class Person(pydantic.BaseModel):
    name: str
    age: int


def chat() -> None:
    answer = litellm.completion(messages=HELLO, **SETTINGS)
    same(answer.choices[0].message.content, GREETING)
    same(answer.choices[0].finish_reason, "stop")


def stream() -> None:
    pieces = list(litellm.completion(messages=HELLO, stream=True, **SETTINGS))
    same("".join(piece.choices[0].delta.content or "" for piece in pieces), GREETING)


def completions() -> None:
    settings = SETTINGS | {"model": f"text-completion-openai/{MODEL}"}
    same(litellm.text_completion(prompt=GREET, max_tokens=64, **settings).choices[0].text, GREETING)


def tools() -> None:
    first = litellm.completion(messages=QUESTION, tools=[TOOL], **SETTINGS).choices[0].message
    (call,) = first.tool_calls
    same((call.function.name, json.loads(call.function.arguments)), ("get_weather", {"city": CITY}))
    told = [*QUESTION, first, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
    same(litellm.completion(messages=told, tools=[TOOL], **SETTINGS).choices[0].message.content, WEATHER)


def tools_stream() -> None:
    pieces = list(litellm.completion(messages=QUESTION, tools=[TOOL], stream=True, **SETTINGS))
    (call,) = litellm.stream_chunk_builder(pieces).choices[0].message.tool_calls
    same((call.function.name, json.loads(call.function.arguments)), ("get_weather", {"city": CITY}))


def json_schema() -> None:
    asked = [{"role": "user", "content": ASK_PERSON}]
    said = litellm.completion(messages=asked, response_format=Person, **SETTINGS).choices[0].message.content
    same(json.loads(said), PERSON)


def responses() -> None:
    answer = litellm.responses(input=GREET, **SETTINGS)
    same("".join(part.text for item in answer.output if item.type == "message" for part in item.content), GREETING)


def messages() -> None:
    settings = SETTINGS | {"model": f"anthropic/{MODEL}", "api_base": URL}
    same(litellm.completion(messages=HELLO, **settings).choices[0].message.content, GREETING)
    pieces = list(litellm.completion(messages=HELLO, stream=True, **settings))
    same("".join(piece.choices[0].delta.content or "" for piece in pieces), GREETING)


def errors() -> None:
    unknown = SETTINGS | {"model": "openai/other"}
    raises(litellm.NotFoundError, lambda: litellm.completion(messages=HELLO, **unknown))
    long = [{"role": "user", "content": TOO_LONG}]
    raises(litellm.ContextWindowExceededError, lambda: litellm.completion(messages=long, **SETTINGS))
    wrong = SETTINGS | {"api_key": "sk-wrong"}
    raises(litellm.AuthenticationError, lambda: litellm.completion(messages=HELLO, **wrong))


if __name__ == "__main__":
    main(chat, stream, completions, tools, tools_stream, json_schema, responses, messages, errors)

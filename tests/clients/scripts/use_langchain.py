"""LangChain's ChatOpenAI and OpenAI."""

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
    main,
    raises,
    same,
)
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

SETTINGS = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0}
model = ChatOpenAI(**SETTINGS)


class Person(pydantic.BaseModel):
    """Somebody."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "21"


def chat() -> None:
    answer = model.invoke(GREET)
    same(answer.content, GREETING)
    same(answer.usage_metadata["total_tokens"] > 0, True)


def stream() -> None:
    pieces = list(model.stream(GREET))
    same("".join(piece.content for piece in pieces), GREETING)


def completions() -> None:
    same(OpenAI(**SETTINGS, max_tokens=64).invoke(GREET), GREETING)


def tools() -> None:
    able = model.bind_tools([get_weather])
    first = able.invoke(ASK_WEATHER)
    (call,) = first.tool_calls
    same((call["name"], call["args"]), ("get_weather", {"city": CITY}))
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    same(able.invoke([HumanMessage(ASK_WEATHER), first, result]).content, WEATHER)


def tools_stream() -> None:
    whole = None
    for piece in model.bind_tools([get_weather]).stream(ASK_WEATHER):
        whole = piece if whole is None else whole + piece
    same([(call["name"], call["args"]) for call in whole.tool_calls], [("get_weather", {"city": CITY})])


def json_schema() -> None:
    same(model.with_structured_output(Person, method="json_schema").invoke(ASK_PERSON), Person(**PERSON))


def responses() -> None:
    other = ChatOpenAI(**SETTINGS, use_responses_api=True)
    same(other.invoke(GREET).text, GREETING)
    same("".join(piece.text for piece in other.stream(GREET)), GREETING)


def errors() -> None:
    raises(openai.NotFoundError, lambda: ChatOpenAI(**(SETTINGS | {"model": "other"})).invoke(GREET))
    raises(openai.BadRequestError, lambda: model.invoke(TOO_LONG))


if __name__ == "__main__":
    main(chat, stream, completions, tools, tools_stream, json_schema, responses, errors)

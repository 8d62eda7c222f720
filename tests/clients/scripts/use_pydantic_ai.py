"""pydantic-ai over chat completions and over responses."""

import asyncio

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
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
model = OpenAIChatModel(MODEL, provider=provider)


class Person(pydantic.BaseModel):
    name: str
    age: int


def agent_with_weather(chosen: object, cities: list[str]) -> Agent:
    agent = Agent(chosen)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return "21"

    return agent


def chat() -> None:
    same(Agent(model).run_sync(GREET).output, GREETING)


def stream() -> None:
    async def run() -> str:
        async with Agent(model).run_stream(GREET) as answer:
            return "".join([piece async for piece in answer.stream_text(delta=True)])

    same(asyncio.run(run()), GREETING)


def tools() -> None:
    cities: list[str] = []
    same((agent_with_weather(model, cities).run_sync(ASK_WEATHER).output, cities), (WEATHER, [CITY]))


def json_schema() -> None:
    same(Agent(model, output_type=NativeOutput(Person)).run_sync(ASK_PERSON).output, Person(**PERSON))


def responses() -> None:
    other = OpenAIResponsesModel(MODEL, provider=provider)
    same(Agent(other).run_sync(GREET).output, GREETING)


def responses_tools() -> None:
    cities: list[str] = []
    other = OpenAIResponsesModel(MODEL, provider=provider)
    same((agent_with_weather(other, cities).run_sync(ASK_WEATHER).output, cities), (WEATHER, [CITY]))


def errors() -> None:
    unknown = OpenAIChatModel("other", provider=provider)
    same(raises(ModelHTTPError, lambda: Agent(unknown).run_sync(GREET)).status_code, 404)
    raises(Exception, lambda: Agent(model).run_sync(TOO_LONG))


if __name__ == "__main__":
    main(chat, stream, tools, json_schema, responses, responses_tools, errors)

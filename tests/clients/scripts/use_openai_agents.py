"""openai-agents over chat completions and over responses."""

import asyncio

import pydantic
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.models.interface import Model
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
from openai import AsyncOpenAI, BadRequestError, NotFoundError

set_tracing_disabled(True)  # traces would go to OpenAI


class Person(pydantic.BaseModel):
    name: str
    age: int


def chat_model(name: str = MODEL) -> Model:
    return OpenAIChatCompletionsModel(name, AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY))


def responses_model() -> Model:
    return OpenAIResponsesModel(MODEL, AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY))


def run(model: Model, text: str, **options: object) -> object:
    return Runner.run_sync(Agent(name="one", model=model, **options), text).final_output


def streamed(model: Model) -> str:
    async def pieces() -> str:
        answer = Runner.run_streamed(Agent(name="one", model=model), GREET)
        found = [event.data async for event in answer.stream_events() if event.type == "raw_response_event"]
        return "".join(each.delta for each in found if each.type == "response.output_text.delta")

    return asyncio.run(pieces())


def with_tool(model: Model) -> tuple[object, list[str]]:
    cities: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return "21"

    return run(model, ASK_WEATHER, tools=[get_weather]), cities


def chat() -> None:
    same(run(chat_model(), GREET), GREETING)


def stream() -> None:
    same(streamed(chat_model()), GREETING)


def tools() -> None:
    same(with_tool(chat_model()), (WEATHER, [CITY]))


def json_schema() -> None:
    same(run(chat_model(), ASK_PERSON, output_type=Person), Person(**PERSON))


def responses() -> None:
    same(run(responses_model(), GREET), GREETING)


def responses_stream() -> None:
    same(streamed(responses_model()), GREETING)


def responses_tools() -> None:
    same(with_tool(responses_model()), (WEATHER, [CITY]))


def responses_json_schema() -> None:
    same(run(responses_model(), ASK_PERSON, output_type=Person), Person(**PERSON))


def errors() -> None:
    raises(NotFoundError, lambda: run(chat_model("other"), GREET))
    raises(BadRequestError, lambda: run(chat_model(), TOO_LONG))


if __name__ == "__main__":
    main(chat, stream, tools, json_schema, responses, responses_stream, responses_tools, responses_json_schema, errors)

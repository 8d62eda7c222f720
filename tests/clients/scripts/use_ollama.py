"""Ollama's own client."""

import asyncio

import ollama
from cases import (
    ASK_PERSON,
    ASK_WEATHER,
    CITY,
    GREET,
    GREETING,
    KEY,
    MODEL,
    PERSON_SCHEMA,
    TOO_LONG,
    URL,
    WEATHER,
    WEATHER_SCHEMA,
    main,
    raises,
    same,
)

HEADERS = {"Authorization": f"Bearer {KEY}"}
client = ollama.Client(host=URL, headers=HEADERS)
HELLO = [{"role": "user", "content": GREET}]
QUESTION = [{"role": "user", "content": ASK_WEATHER}]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": WEATHER_SCHEMA},
}


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
      city: its name
    """
    return f"21 in {city}"


def chat() -> None:
    answer = client.chat(MODEL, messages=HELLO, options={"temperature": 0, "num_ctx": 2048}, keep_alive="5m")
    same((answer.message.role, answer.message.content, answer.done_reason), ("assistant", GREETING, "stop"))
    same((answer.model, answer.done, answer.eval_count > 0, answer.total_duration > 0), (MODEL, True, True, True))
    short = client.chat(MODEL, messages=HELLO, options={"num_predict": 2})
    same((short.done_reason, short.eval_count), ("length", 2))
    same(client.chat(MODEL, messages=HELLO, options={"stop": ["!"]}).message.content, "Hello")


def chat_stream() -> None:
    *parts, last = client.chat(MODEL, messages=HELLO, stream=True)
    same("".join(part.message.content for part in parts), GREETING)
    same((last.done, last.done_reason, last.prompt_eval_count > 0), (True, "stop", True))


def generate() -> None:
    same(client.generate(MODEL, prompt=GREET, system="Be kind.").response, GREETING)
    same("".join(part.response for part in client.generate(MODEL, prompt=GREET, raw=True, stream=True)), GREETING)
    same(client.generate(MODEL, prompt="").done_reason, "load")


def tools() -> None:
    for tool in (TOOL, get_weather):  # a function's schema is made by the client
        first = client.chat(MODEL, messages=QUESTION, tools=[tool])
        (call,) = first.message.tool_calls
        same((call.function.name, dict(call.function.arguments)), ("get_weather", {"city": CITY}))
        result = {"role": "tool", "content": "21", "tool_name": call.function.name}
        same(client.chat(MODEL, messages=[*QUESTION, first.message, result], tools=[tool]).message.content, WEATHER)
    *_, part, last = client.chat(MODEL, messages=QUESTION, tools=[TOOL], stream=True)
    same((part.message.tool_calls[0].function.name, last.done), ("get_weather", True))


def json_schema() -> None:
    asked = [{"role": "user", "content": ASK_PERSON}]
    answer = client.chat(MODEL, messages=asked, format=PERSON_SCHEMA, options={"num_predict": 60})
    same(answer.message.content.lstrip()[:1], "{")


def asynchronous() -> None:
    async def talk() -> str:
        caller = ollama.AsyncClient(host=URL, headers=HEADERS)
        return "".join([part.message.content async for part in await caller.chat(MODEL, messages=HELLO, stream=True)])

    same(asyncio.run(talk()), GREETING)


def embeddings() -> None:
    answer = client.embed(MODEL, input=["rain", "snow"])
    same((len(answer.embeddings), answer.prompt_eval_count > 0), (2, True))
    same(list(client.embeddings(MODEL, prompt="snow").embedding), list(answer.embeddings[1]))


def models() -> None:
    same([model.model for model in client.list().models], [f"{MODEL}:latest"])
    same([model.model for model in client.ps().models], [f"{MODEL}:latest"])
    shown = client.show(MODEL)
    same(("completion" in shown.capabilities, shown.details.family), (True, "llama"))
    same(client.pull(MODEL).status, "success")
    same([part.status for part in client.pull(MODEL, stream=True)], ["success"])


def errors() -> None:
    def status(call: object) -> int:
        return raises(ollama.ResponseError, call).status_code

    same(status(lambda: client.chat("other", messages=HELLO)), 404)
    same(status(lambda: list(client.chat("other", messages=HELLO, stream=True))), 404)
    same(status(lambda: client.chat(MODEL, messages=[{"role": "user", "content": TOO_LONG}])), 400)
    same(status(lambda: client.pull("other")), 403)
    same(status(lambda: client.delete(MODEL)), 403)
    same(status(lambda: ollama.Client(host=URL, headers={"Authorization": "Bearer no"}).list()), 401)
    image = [{"role": "user", "content": "What is this?", "images": [b"png"]}]
    same("reads text only" in str(raises(ollama.ResponseError, lambda: client.chat(MODEL, messages=image))), True)


if __name__ == "__main__":
    main(chat, chat_stream, generate, tools, json_schema, asynchronous, embeddings, models, errors)

"""The anthropic client."""

import anthropic
from cases import (
    ASK_WEATHER,
    CITY,
    GREET,
    GREETING,
    KEY,
    MODEL,
    TOO_LONG,
    URL,
    WEATHER,
    WEATHER_SCHEMA,
    main,
    raises,
    same,
)

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
HELLO = [{"role": "user", "content": GREET}]
QUESTION = [{"role": "user", "content": ASK_WEATHER}]
TOOL = {"name": "get_weather", "description": "The weather of a city.", "input_schema": WEATHER_SCHEMA}


def messages() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=100, messages=HELLO)
    same([(block.type, block.text) for block in answer.content], [("text", GREETING)])
    same((answer.stop_reason, answer.role), ("end_turn", "assistant"))
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO)
    same(counted.input_tokens, answer.usage.input_tokens + answer.usage.cache_read_input_tokens)


def messages_system() -> None:
    blocks = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    answer = client.messages.create(model=MODEL, max_tokens=100, system=blocks, messages=HELLO)
    same(answer.content[0].text, GREETING)
    same(client.messages.create(model=MODEL, max_tokens=2, messages=HELLO).stop_reason, "max_tokens")
    stopped = client.messages.create(model=MODEL, max_tokens=100, messages=HELLO, stop_sequences=["!"])
    same((stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence), ("Hello", "stop_sequence", "!"))


def messages_stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=100, messages=HELLO) as events:
        same("".join(events.text_stream), GREETING)
        same(events.get_final_message().stop_reason, "end_turn")


def messages_tools() -> None:
    first = client.messages.create(model=MODEL, max_tokens=100, messages=QUESTION, tools=[TOOL])
    (call,) = [block for block in first.content if block.type == "tool_use"]
    same((call.name, call.input, first.stop_reason), ("get_weather", {"city": CITY}, "tool_use"))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21"}
    told = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    same(client.messages.create(model=MODEL, max_tokens=100, messages=told, tools=[TOOL]).content[0].text, WEATHER)


def messages_tools_stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=100, messages=QUESTION, tools=[TOOL]) as events:
        final = events.get_final_message()
    (call,) = [block for block in final.content if block.type == "tool_use"]
    same((call.name, call.input, final.stop_reason), ("get_weather", {"city": CITY}, "tool_use"))


def messages_errors() -> None:
    create = client.messages.create
    raises(anthropic.NotFoundError, lambda: create(model="other", max_tokens=9, messages=HELLO))
    long = [{"role": "user", "content": TOO_LONG}]
    error = raises(anthropic.BadRequestError, lambda: create(model=MODEL, max_tokens=9, messages=long))
    same(error.body["error"]["type"], "invalid_request_error")
    stranger = anthropic.Anthropic(base_url=URL, api_key="sk-wrong", max_retries=0)
    raises(anthropic.AuthenticationError, lambda: stranger.messages.create(model=MODEL, max_tokens=9, messages=HELLO))


if __name__ == "__main__":
    main(messages, messages_system, messages_stream, messages_tools, messages_tools_stream, messages_errors)

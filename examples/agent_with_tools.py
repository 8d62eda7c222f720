"""A tool-calling agent: the model asks for functions, this program runs them, until the model answers with text."""

import json
import sys

from openai import OpenAI

TEMPERATURES = {"Oslo": 4, "Cairo": 29}


def get_temperature(city: str) -> str:
    return f"{TEMPERATURES.get(city, 15)} degrees"


FUNCTIONS = {"get_temperature": get_temperature}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_temperature",
            "description": "The temperature in a city, in degrees Celsius.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
MAX_TURNS = 8


def run(client: OpenAI, question: str) -> str:
    model = client.models.list().data[0].id
    messages: list = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        message = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = FUNCTIONS[call.function.name](**arguments)
            print(f"{call.function.name}({arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "no answer after the last turn"


def main(base_url: str) -> None:
    client = OpenAI(base_url=base_url, api_key="none")
    print(run(client, "Is it warmer in Cairo or in Oslo?"))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")

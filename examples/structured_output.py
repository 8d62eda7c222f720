"""Ask a running server for answers that follow a JSON schema, and for one of several choices."""

import json
import sys

from openai import OpenAI

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main(base_url: str) -> None:
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Invent a person, as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        max_tokens=64,
        seed=1,
    )
    print(json.loads(answer.choices[0].message.content))

    mood = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Is 'I love this' positive or negative?"}],
        extra_body={"structured_outputs": {"choice": ["positive", "negative"]}},
    )
    print(mood.choices[0].message.content)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")

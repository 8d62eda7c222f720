"""instructor over the openai client: objects through a JSON schema, through JSON, through a tool."""

import instructor
import openai
import pydantic
from cases import ASK_PERSON, CALL_PERSON, KEY, MODEL, PERSON, TOO_LONG, URL, main, raises, same

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


class Person(pydantic.BaseModel):
    name: str
    age: int


def ask(mode: instructor.Mode, question: str) -> dict[str, object]:
    asked = [{"role": "user", "content": question}]
    several = instructor.from_openai(client, mode=mode)
    return several.chat.completions.create(
        model=MODEL, messages=asked, response_model=Person, max_retries=0
    ).model_dump()


def json_schema() -> None:
    same(ask(instructor.Mode.JSON_SCHEMA, ASK_PERSON), PERSON)


def json_object() -> None:
    same(ask(instructor.Mode.JSON, ASK_PERSON), PERSON)


def tools_required() -> None:
    same(ask(instructor.Mode.TOOLS, CALL_PERSON), PERSON)


def json_schema_stream() -> None:
    several = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    asked = [{"role": "user", "content": ASK_PERSON}]
    *_, last = several.chat.completions.create_partial(model=MODEL, messages=asked, response_model=Person)
    same((last.name, last.age), (PERSON["name"], PERSON["age"]))


def errors() -> None:
    raises(Exception, lambda: ask(instructor.Mode.JSON_SCHEMA, TOO_LONG))


if __name__ == "__main__":
    main(json_schema, json_object, json_schema_stream, tools_required, errors)

"""What every client's script shares: where the server is, what it says to what, and how a case is reported.

Runs inside a client's own environment: the standard library alone. `python use_NAME.py URL MODEL` prints one JSON line
per case, with the error if it had one.
"""

import json
import sys
import traceback
from collections.abc import Callable

URL, MODEL = sys.argv[1:3]
KEY = "sk-client"

# What tests/clients/client_world.py scripts the server to say to these.
GREET, GREETING = "Say hello.", "Hello! Grüße, 你好, 🙂👩‍🚀."
ASK_WEATHER, CITY, WEATHER = "What is the weather in Paris?", "Paris", "It is 21 degrees in Paris."
ASK_PERSON, PERSON = "How old is Ada?", {"name": "Ada", "age": 36}
CALL_PERSON = "Hand Ada to the tool."
TOO_LONG = "word " * 5000

WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
PERSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def same(found: object, wanted: object) -> None:
    if found != wanted:
        raise AssertionError(f"{found!r} is not {wanted!r}")


def raises(kind: type[BaseException], call: Callable[[], object]) -> BaseException:
    try:
        said = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {said!r}")


def main(*cases: Callable[[], None]) -> None:
    for case in cases:
        error = None
        try:
            case()
        except Exception:
            error = traceback.format_exc(limit=-4)
        print(json.dumps({"case": case.__name__, "error": error}), flush=True)

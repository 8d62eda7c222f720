"""Earlier calls in a conversation, as chat templates expect them. Knows nothing of templates' languages.

Functions that a client offers, as plain values. Knows nothing of how a model is told of them.

What a model is told of functions when its chat template has no words for them. Knows no template.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from quire.output_parsing.json_dialects import CLOSE, OPEN

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def normal_calls(message: Mapping[str, object]) -> dict[str, object]:
    """A message whose calls carry their arguments as objects; clients send them as JSON text.

    Text that is no JSON object stays as it is: some templates print it, and a wrong old call is no reason to refuse.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return dict(message)
    return {**message, "tool_calls": [_normal_call(call) for call in calls]}


def with_short_ids(message: Mapping[str, object]) -> dict[str, object]:
    """The ids of calls as nine letters and digits; the same id always becomes the same one."""
    told = dict(message)
    calls = told.get("tool_calls")
    if isinstance(calls, list):
        told["tool_calls"] = [
            {**call, "id": _short_id(call.get("id"))} if isinstance(call, Mapping) else call for call in calls
        ]
    if "tool_call_id" in told:
        told["tool_call_id"] = _short_id(told["tool_call_id"])
    return told


def in_words(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """For a template that knows neither calls nor results: calls are text of the assistant, as hermes.py reads them,
    and the results that follow each other are one message of the user. Contents are texts, arguments objects."""
    told: list[dict[str, object]] = []
    for is_result, group in groupby(messages, key=lambda message: message.get("role") == "tool"):
        if is_result:
            results = (f"<tool_response>\n{message.get('content')}\n</tool_response>" for message in group)
            told.append({"role": "user", "content": "\n".join(results)})
        else:
            told += [_with_written_calls(message) for message in group]
    return told


def _with_written_calls(message: Mapping[str, object]) -> dict[str, object]:
    told = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        written = [f"{OPEN}\n{json.dumps(_essence(call), ensure_ascii=False)}\n{CLOSE}" for call in calls]
        content = message.get("content")
        told["content"] = "\n".join([*([content] if isinstance(content, str) and content else []), *written])
    return told


def _essence(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {"name": function.get("name"), "arguments": function.get("arguments")}


def _short_id(name: object) -> str:
    text = str(name)
    return text if _SHORT_ID.fullmatch(text) else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:9]


def _normal_call(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    named = {"name": function.get("name"), **function}  # models write the name first, so templates should show it so
    return {**call, "function": {**named, "arguments": _as_object(arguments)}}


def _as_object(text: str) -> object:
    try:
        value = json.loads(text, parse_constant=_refuse) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _refuse(word: str) -> None:
    raise ValueError(word)  # NaN and Infinity are Python's, not JSON's


@dataclass(frozen=True, slots=True)
class Tool:
    """A function: its name, what it does, and the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    strict: bool = False

    def as_declared(self) -> dict[str, object]:
        """As chat templates expect it, and as OpenAI's clients send it."""
        declared: dict[str, object] = {"name": self.name, "description": self.description}
        declared["parameters"] = dict(self.parameters) or {"type": "object", "properties": {}}
        return {"type": "function", "function": declared}


def tool_instructions(tools: Sequence[Tool]) -> str:
    """A part of the system message; the answer is read as `hermes.py` does."""
    declared = "\n".join(json.dumps(tool.as_declared(), ensure_ascii=False) for tool in tools)
    return (
        "You can call functions. These are their JSON schemas, one a line:\n"
        f"<tools>\n{declared}\n</tools>\n"
        "To call a function, answer with a JSON object that has its name and its arguments, inside these tags:\n"
        '<tool_call>\n{"name": "the function", "arguments": {"an argument": "its value"}}\n</tool_call>\n'
        "Call a function only if it helps. You may call several, each in tags of its own."
    )

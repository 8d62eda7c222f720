"""Chat template input: tools, and messages with tool calls, in the shape that templates expect.

Templates without tool support get calls and results as text, and the tools as instructions in the system message.
Does not depend on the template language.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from quire.output_parsing.json_calls import reject_constant
from quire.output_parsing.json_dialects import CLOSE, OPEN

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def with_parsed_arguments(message: Mapping[str, object]) -> dict[str, object]:
    """The message with the arguments of its calls as objects; clients send them as JSON text.

    Text that is not a JSON object is kept: some templates print it, and an invalid earlier call must not fail the
    request.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return dict(message)
    return {**message, "tool_calls": [_parse_arguments(call) for call in calls]}


def with_short_ids(message: Mapping[str, object]) -> dict[str, object]:
    """The message with call ids of nine letters and digits. Equal ids stay equal."""
    shortened = dict(message)
    calls = shortened.get("tool_calls")
    if isinstance(calls, list):
        shortened["tool_calls"] = [
            {**call, "id": _short_id(call.get("id"))} if isinstance(call, Mapping) else call for call in calls
        ]
    if "tool_call_id" in shortened:
        shortened["tool_call_id"] = _short_id(shortened["tool_call_id"])
    return shortened


def tools_as_text(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Messages for a template without tool support. Contents must be strings, arguments objects.

    Calls become assistant text in Hermes tags; consecutive results become one user message.
    """
    rewritten: list[dict[str, object]] = []
    for is_result, group in groupby(messages, key=lambda message: message.get("role") == "tool"):
        if is_result:
            results = (f"<tool_response>\n{message.get('content')}\n</tool_response>" for message in group)
            rewritten.append({"role": "user", "content": "\n".join(results)})
        else:
            rewritten += [_calls_as_text(message) for message in group]
    return rewritten


def _calls_as_text(message: Mapping[str, object]) -> dict[str, object]:
    rewritten = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        texts = [f"{OPEN}\n{json.dumps(_name_and_arguments(call), ensure_ascii=False)}\n{CLOSE}" for call in calls]
        content = message.get("content")
        rewritten["content"] = "\n".join([*([content] if isinstance(content, str) and content else []), *texts])
    return rewritten


def _name_and_arguments(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {"name": function.get("name"), "arguments": function.get("arguments")}


def _short_id(name: object) -> str:
    text = str(name)
    return text if _SHORT_ID.fullmatch(text) else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:9]


def _parse_arguments(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    named = {"name": function.get("name"), **function}  # name first, in the order in which models write calls
    return {**call, "function": {**named, "arguments": _as_object(arguments)}}


def _as_object(text: str) -> object:
    try:
        value = json.loads(text, parse_constant=reject_constant) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a client offers: name, description, and JSON schema of the arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    strict: bool = False

    def declaration(self) -> dict[str, object]:
        """The declaration in OpenAI's shape, which chat templates expect."""
        function: dict[str, object] = {"name": self.name, "description": self.description}
        function["parameters"] = dict(self.parameters) or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


def tool_instructions(tools: Sequence[Tool]) -> str:
    """A section of the system message; the output is parsed as Hermes calls."""
    declarations = "\n".join(json.dumps(tool.declaration(), ensure_ascii=False) for tool in tools)
    return (
        "You can call functions. These are their JSON schemas, one a line:\n"
        f"<tools>\n{declarations}\n</tools>\n"
        "To call a function, answer with a JSON object that has its name and its arguments, inside these tags:\n"
        '<tool_call>\n{"name": "the function", "arguments": {"an argument": "its value"}}\n</tool_call>\n'
        "Call a function only if it helps. You may call several, each in tags of its own."
    )

"""Earlier calls in a conversation, as chat templates expect them. Knows nothing of templates' languages."""

import json
from collections.abc import Mapping


def normal_calls(message: Mapping[str, object]) -> dict[str, object]:
    """A message whose calls carry their arguments as objects; clients send them as JSON text.

    Text that is no JSON object stays as it is: some templates print it, and a wrong old call is no reason to refuse.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return dict(message)
    return {**message, "tool_calls": [_normal_call(call) for call in calls]}


def _normal_call(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": _as_object(arguments)}}


def _as_object(text: str) -> object:
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text

"""Checks chat messages and brings them to plain data. Knows nothing of templates."""

import math
from collections.abc import Mapping, Sequence

from quire.core.errors import InvalidPrompt

_MAX_DEPTH = 64  # of nested lists and objects in a message or a tool

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
Message = dict[str, Plain]


def plain_messages(messages: object) -> list[Message]:
    """Fresh copies with a role each, and content that is text (or None beside tool calls)."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidPrompt("messages must be a non-empty list of objects with role and content.", param="messages")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def plain_data(value: object, where: str, depth: int = 0) -> Plain:
    """JSON's types and nothing else: a template must not meet objects with methods of their own."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidPrompt(f"{where} holds {value!r}, which JSON cannot say.", param=_param(where))
        return float.__float__(value)
    if depth >= _MAX_DEPTH:
        raise InvalidPrompt(f"{where} is nested more than {_MAX_DEPTH} levels deep.", param=_param(where))
    if isinstance(value, Mapping):
        return {str(key): plain_data(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item, where, depth + 1) for item in value]
    raise InvalidPrompt(f"{where} holds a {type(value).__name__}, which is not JSON data.", param=_param(where))


def _param(where: str) -> str:
    """The field of the request that a place such as messages[3].content lies in."""
    return where.partition("[")[0].partition(".")[0]


def _message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidPrompt(f"{where} must be an object with role and content, not {message!r:.80}.", param="messages")
    plain = plain_data(message, where)
    assert isinstance(plain, dict)
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidPrompt(f"{where}.role must be a word such as 'user', not {role!r:.80}.", param="messages")
    content = plain.get("content")
    if content is None and not plain.get("tool_calls"):
        raise InvalidPrompt(f"{where} has no content. Give it text.", param="messages")
    plain["content"] = _text(content, f"{where}.content")
    return plain


def _text(content: Plain, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidPrompt(f"{where} must be text or a list of text parts, not {content!r:.80}.", param="messages")
    return "\n".join(_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _part(part: Plain, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
        raise InvalidPrompt(
            f"{where} must be {{'type': 'text', 'text': …}}, not {part!r:.80}: this model reads text only.",
            param="messages",
        )
    return text

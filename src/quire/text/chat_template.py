"""Validates chat messages and renders them with the model's chat template. The only place that renders one.

Messages are copied to plain JSON data first. Does not depend on tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from quire.core.errors import ChatTemplateError, InvalidParameter, InvalidPrompt
from quire.text.template_worker import render_in_worker

_MAX_DEPTH = 64  # of nested lists and objects in a message or a tool

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
Message = dict[str, Plain]


def plain_messages(messages: object) -> list[Message]:
    """Validated copies: each has a role, and content that is text (or None if there are tool calls)."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidPrompt("messages must be a non-empty list of objects with role and content.", param="messages")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def plain_data(value: object, where: str, depth: int = 0) -> Plain:
    """A copy that holds JSON types only: a template must not get objects with methods."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidPrompt(f"{where} holds {value!r}, which JSON cannot represent.", param=_param(where))
        return float.__float__(value)
    if depth >= _MAX_DEPTH:
        raise InvalidPrompt(f"{where} is nested more than {_MAX_DEPTH} levels deep.", param=_param(where))
    if isinstance(value, Mapping):
        return {str(key): plain_data(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item, where, depth + 1) for item in value]
    raise InvalidPrompt(f"{where} holds a {type(value).__name__}, which is not JSON data.", param=_param(where))


def _param(where: str) -> str:
    """The request field of a path such as messages[3].content."""
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


# Appended to the last message if the model is to continue it. The trailing space shows whether the template trims.
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


def render(
    template: str | None,
    messages: Sequence[Mapping[str, object]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, object]] | None = None,
    named_tokens: Mapping[str, str] | None = None,
    extra: Mapping[str, object] | None = None,
    now: Callable[[], datetime] = datetime.now,
) -> str:
    """Render the prompt. `named_tokens`: bos_token and so on; `extra`: the request's chat_template_kwargs."""
    if template is None:
        raise ChatTemplateError(
            "This model has no chat template, so it cannot chat. Send a plain prompt or use another model."
        )
    if continue_final_message and add_generation_prompt:
        raise InvalidParameter(
            "continue_final_message and add_generation_prompt cannot both be true: the first goes on with "
            "the last message, the second begins a new one.",
            param="continue_final_message",
        )
    plain = plain_messages(messages)
    final = _mark_end(plain) if continue_final_message else None
    variables: dict[str, object] = {
        **(named_tokens or {}),
        **_checked_extra(extra or {}),
        "messages": plain,
        "tools": plain_data(tools, "tools") if tools else None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    rendered = render_in_worker(template, variables, now())
    return rendered if final is None else _cut_at_mark(rendered, final)


def _checked_extra(extra: Mapping[str, object]) -> dict[str, object]:
    for name in extra:
        if name in _RESERVED:
            raise InvalidParameter(
                f"chat_template_kwargs may not set {name!r}; it has a field of its own.",
                param="chat_template_kwargs",
            )
    return {str(name): plain_data(value, f"chat_template_kwargs.{name}") for name, value in extra.items()}


def _mark_end(messages: list[Message]) -> str:
    content = messages[-1]["content"]
    if not isinstance(content, str):
        raise ChatTemplateError("The last message has no text that could be continued.")
    messages[-1]["content"] = content + _END_MARK
    return content


def _cut_at_mark(rendered: str, final: str) -> str:
    place = rendered.rfind(_END_MARK.strip())
    if place < 0 or final.strip() not in rendered:
        raise ChatTemplateError(
            "The model's chat template does not keep the last message as it is, so it cannot be continued."
        )
    kept = rendered[:place]
    trims = not rendered.startswith(_END_MARK, place)
    return kept.rstrip() if trims else kept

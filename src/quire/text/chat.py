"""Messages to the text a model expects, through its own chat template. None is rendered elsewhere."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import jinja2

from quire.core.errors import ChatTemplateError, InvalidParameter
from quire.text.messages import Message, plain_data, plain_messages
from quire.text.sandbox import TemplateTooLargeError, compiled, run

# Marks where the last message ends, when the model is to go on with it. The space shows if a template trims.
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
    """The prompt. `named_tokens` are bos_token and its like, `extra` what a request adds for the template."""
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
    rendered = _rendered(template, variables, now)
    return rendered if final is None else _cut_at_mark(rendered, final)


def check_template(template: str) -> None:
    """Raises `ChatTemplateError` for one that no messages could be put through."""
    try:
        compiled(template)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"line {error.lineno} is not valid: {(error.message or '').rstrip('.')}.") from error
    except Exception as error:  # Python's own compiler has limits too, e.g. on nesting
        raise ChatTemplateError(f"it is not valid: {type(error).__name__}: {error}.") from error


def _rendered(template: str, variables: dict[str, object], now: Callable[[], datetime]) -> str:
    try:
        return run(template, variables, now)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"The model's chat template is not valid (line {error.lineno}): {error.message}."
        ) from error
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"The model's chat template refused these messages: {error}") from error
    except TemplateTooLargeError as error:
        raise ChatTemplateError(f"The model's chat template was stopped: {error}.") from error
    except Exception as error:  # a template is foreign code: it may raise anything
        raise ChatTemplateError(
            f"The model's chat template failed on these messages: {type(error).__name__}: {error}"
        ) from error


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

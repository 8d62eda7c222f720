"""From a chat template, in which manner its model writes calls and thoughts. Looks for strings and renders nothing."""

import re
from dataclasses import dataclass

from quire.speech.formats import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, PYTHONIC, QWEN_CODER, ToolFormat
from quire.speech.reasoning import MISTRAL_THINK, THINK, ReasoningTags

_TOOLS = re.compile(r"\btools\b")

# The first format all of whose strings are in the template. A template may speak of what another format uses too
# (Qwen3-Coder's has the tags of Hermes), so the order matters.
_SIGNS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<function=", "<parameter="), QWEN_CODER),
    (("<tool_call>",), HERMES),
    (("<|python_start|>",), PYTHONIC),
    (("<function_calls>",), PYTHONIC),
    (("[func_name1(",), PYTHONIC),
    (("<|python_tag|>",), LLAMA),
    (('"parameters": dictionary',), LLAMA),
)


@dataclass(frozen=True, slots=True)
class Manner:
    """How a model speaks. Without a tool format, the template has no words for tools that we can read: use GENERIC."""

    tools: ToolFormat | None = None
    reasoning: ReasoningTags | None = None


def detect(template: str | None) -> Manner:
    if not template:
        return Manner()
    return Manner(_tool_format(template), _reasoning_tags(template))


def _tool_format(template: str) -> ToolFormat | None:
    if not _TOOLS.search(template):
        return None
    for signs, tool_format in _SIGNS:
        if all(sign in template for sign in signs):
            return tool_format
    return None


def _reasoning_tags(template: str) -> ReasoningTags | None:
    for tags in (MISTRAL_THINK, THINK):
        if tags.end in template:
            return tags
    return None

"""The ways in which models write calls, by name. One row each; what tells them apart in a template is in detect.py."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.core.errors import ConfigError, shown
from quire.output_parsing.emitter import EventEmitter
from quire.output_parsing.json_dialects import (
    ARGS,
    CALL_ID,
    CLOSE,
    FUNCTION,
    OPEN,
    PYTHON_TAG,
    TOOL_CALLS,
    read_hermes,
    read_llama,
    read_mistral,
)
from quire.output_parsing.pythonic_calls import FUNCTION_CALLS, PYTHON_END, PYTHON_START, read_pythonic
from quire.output_parsing.qwen_coder import read_qwen_coder
from quire.output_parsing.reader import Reading, StreamReader


@dataclass(frozen=True, slots=True)
class CallDelimiters:
    """What stands around calls that a model is made to write, in the order in which it stands there."""

    opening: str
    before_name: str
    before_arguments: str
    after_arguments: str
    between: str
    closing: str


_OBJECT = CallDelimiters(f"{OPEN}\n", '{"name": "', '", "arguments": ', "}", f"\n{CLOSE}\n{OPEN}\n", f"\n{CLOSE}")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls."""

    name: str
    read: Callable[[StreamReader, EventEmitter], Reading[None]]
    markers: tuple[str, ...]  # strings that must reach the parser as text
    needs_special_tokens: bool = False  # some markers are special tokens, which detokenizing must not skip
    is_instructed: bool = False  # the template has no words for tools: the system message needs instructions.py
    has_short_ids: bool = False  # the template refuses ids of calls that are not nine letters and digits
    brackets: CallDelimiters = _OBJECT  # when it is made to call; a format without JSON borrows the tags of Hermes


HERMES = ToolFormat("hermes", read_hermes, (OPEN, CLOSE))
GENERIC = ToolFormat("generic", read_hermes, (OPEN, CLOSE), is_instructed=True)
QWEN_CODER = ToolFormat("qwen3_coder", read_qwen_coder, (OPEN, FUNCTION, CLOSE))
LLAMA = ToolFormat(
    "llama3_json",
    read_llama,
    (PYTHON_TAG, FUNCTION),
    needs_special_tokens=True,
    brackets=CallDelimiters("", '{"name": "', '", "parameters": ', "}", "; ", ""),
)
MISTRAL = ToolFormat(
    "mistral",
    read_mistral,
    (TOOL_CALLS,),
    needs_special_tokens=True,
    has_short_ids=True,
    brackets=CallDelimiters(f"{TOOL_CALLS} [", '{"name": "', '", "arguments": ', "}", ", ", "]"),
)
MISTRAL_ARGS = ToolFormat(
    "mistral_args",
    read_mistral,
    (TOOL_CALLS, CALL_ID, ARGS),
    needs_special_tokens=True,
    has_short_ids=True,
    brackets=CallDelimiters(TOOL_CALLS, "", ARGS, "", TOOL_CALLS, ""),
)
PYTHONIC = ToolFormat("pythonic", read_pythonic, (PYTHON_START, PYTHON_END, FUNCTION_CALLS), needs_special_tokens=True)

FORMATS = {each.name: each for each in (HERMES, QWEN_CODER, LLAMA, MISTRAL, MISTRAL_ARGS, PYTHONIC, GENERIC)}


def by_name(name: str) -> ToolFormat:
    """The format that an operator named."""
    if name not in FORMATS:
        raise ConfigError(f"There is no tool format {shown(name)}; choose one of {', '.join(sorted(FORMATS))}.")
    return FORMATS[name]

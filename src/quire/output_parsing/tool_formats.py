"""The table of tool-call formats by name. `parser.py` has the strings that identify each in a chat template."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.core.errors import ConfigError, shown
from quire.output_parsing.events import EventEmitter
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
    """The strings around forced calls, in the order in which they are written."""

    opening: str
    before_name: str
    before_arguments: str
    after_arguments: str
    between: str
    closing: str


_OBJECT = CallDelimiters(f"{OPEN}\n", '{"name": "', '", "arguments": ', "}", f"\n{CLOSE}\n{OPEN}\n", f"\n{CLOSE}")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls."""

    name: str
    read: Callable[[StreamReader, EventEmitter], Reading[None]]
    markers: tuple[str, ...]  # strings that must reach the parser as text
    needs_instructions: bool = False  # the template does not render tools: the system message has `tool_instructions`
    has_short_ids: bool = False  # the template rejects call ids that are not nine letters and digits
    delimiters: CallDelimiters = _OBJECT  # of forced calls; a format without JSON uses the tags of Hermes


HERMES = ToolFormat("hermes", read_hermes, (OPEN, CLOSE))
GENERIC = ToolFormat("generic", read_hermes, (OPEN, CLOSE), needs_instructions=True)
QWEN_CODER = ToolFormat("qwen3_coder", read_qwen_coder, (OPEN, FUNCTION, CLOSE))
LLAMA = ToolFormat(
    "llama3_json",
    read_llama,
    (PYTHON_TAG, FUNCTION),
    delimiters=CallDelimiters("", '{"name": "', '", "parameters": ', "}", "; ", ""),
)
MISTRAL = ToolFormat(
    "mistral",
    read_mistral,
    (TOOL_CALLS,),
    has_short_ids=True,
    delimiters=CallDelimiters(f"{TOOL_CALLS} [", '{"name": "', '", "arguments": ', "}", ", ", "]"),
)
MISTRAL_ARGS = ToolFormat(
    "mistral_args",
    read_mistral,
    (TOOL_CALLS, CALL_ID, ARGS),
    has_short_ids=True,
    delimiters=CallDelimiters(TOOL_CALLS, "", ARGS, "", TOOL_CALLS, ""),
)
PYTHONIC = ToolFormat("pythonic", read_pythonic, (PYTHON_START, PYTHON_END, FUNCTION_CALLS))

FORMATS = {each.name: each for each in (HERMES, QWEN_CODER, LLAMA, MISTRAL, MISTRAL_ARGS, PYTHONIC, GENERIC)}

_OTHER_NAMES = {"qwen": HERMES, "qwen25": HERMES, "llama3": LLAMA, "llama4_pythonic": PYTHONIC}  # of vLLM and SGLang


def tool_format_by_name(name: str) -> ToolFormat:
    """The format of `--tool-call-parser`."""
    if name not in FORMATS:
        here = _OTHER_NAMES.get(name)
        hint = "" if here is None else f" The format of {name} is {here.name} here."
        raise ConfigError(f"There is no tool format {shown(name)}; choose one of {', '.join(sorted(FORMATS))}.{hint}")
    return FORMATS[name]

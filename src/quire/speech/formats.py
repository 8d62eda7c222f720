"""The ways in which models write calls, by name. One row each; what tells them apart in a template is in detect.py."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.core.errors import ConfigError, shown
from quire.speech.hermes import CLOSE, OPEN, read_hermes
from quire.speech.llama import FUNCTION, PYTHON_TAG, read_llama
from quire.speech.mistral import ARGS, CALL_ID, TOOL_CALLS, read_mistral
from quire.speech.pythonic import FUNCTION_CALLS, PYTHON_END, PYTHON_START, read_pythonic
from quire.speech.qwen_coder import read_qwen_coder
from quire.speech.tape import Reading, Tape
from quire.speech.voice import Voice


@dataclass(frozen=True, slots=True)
class Brackets:
    """What stands around calls that a model is made to write, in the order in which it stands there."""

    opening: str
    before_name: str
    before_arguments: str
    after_arguments: str
    between: str
    closing: str


_OBJECT = Brackets(f"{OPEN}\n", '{"name": "', '", "arguments": ', "}", f"\n{CLOSE}\n{OPEN}\n", f"\n{CLOSE}")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls."""

    name: str
    read: Callable[[Tape, Voice], Reading[None]]
    markers: tuple[str, ...]  # strings that must reach the parser as text
    needs_special_tokens: bool = False  # some markers are special tokens, which detokenizing must not skip
    is_instructed: bool = False  # the template has no words for tools: the system message needs instructions.py
    has_short_ids: bool = False  # the template refuses ids of calls that are not nine letters and digits
    brackets: Brackets = _OBJECT  # when it is made to call; a format without JSON borrows the tags of Hermes


HERMES = ToolFormat("hermes", read_hermes, (OPEN, CLOSE))
GENERIC = ToolFormat("generic", read_hermes, (OPEN, CLOSE), is_instructed=True)
QWEN_CODER = ToolFormat("qwen3_coder", read_qwen_coder, (OPEN, FUNCTION, CLOSE))
LLAMA = ToolFormat(
    "llama3_json",
    read_llama,
    (PYTHON_TAG, FUNCTION),
    needs_special_tokens=True,
    brackets=Brackets("", '{"name": "', '", "parameters": ', "}", "; ", ""),
)
MISTRAL = ToolFormat(
    "mistral",
    read_mistral,
    (TOOL_CALLS,),
    needs_special_tokens=True,
    has_short_ids=True,
    brackets=Brackets(f"{TOOL_CALLS} [", '{"name": "', '", "arguments": ', "}", ", ", "]"),
)
MISTRAL_ARGS = ToolFormat(
    "mistral_args",
    read_mistral,
    (TOOL_CALLS, CALL_ID, ARGS),
    needs_special_tokens=True,
    has_short_ids=True,
    brackets=Brackets(TOOL_CALLS, "", ARGS, "", TOOL_CALLS, ""),
)
PYTHONIC = ToolFormat("pythonic", read_pythonic, (PYTHON_START, PYTHON_END, FUNCTION_CALLS), needs_special_tokens=True)

FORMATS = {each.name: each for each in (HERMES, QWEN_CODER, LLAMA, MISTRAL, MISTRAL_ARGS, PYTHONIC, GENERIC)}


def by_name(name: str) -> ToolFormat:
    """The format that an operator named."""
    if name not in FORMATS:
        raise ConfigError(f"There is no tool format {shown(name)}; choose one of {', '.join(sorted(FORMATS))}.")
    return FORMATS[name]

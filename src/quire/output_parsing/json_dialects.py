"""Tool-call formats whose calls are JSON: Hermes, Llama 3 and Mistral.

- Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
- Llama 3: bare objects `{"name": …, "parameters": {…}}`, several separated by `;`, at the start of the answer or after
  `<|python_tag|>`. `<function=name>{…}</function>`, which Llama 3.1 was trained on too, is accepted anywhere.
- Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]` up to tokenizer v3; later `[TOOL_CALLS]name[ARGS]{…}`,
  some with `[CALL_ID]…` before the arguments, some without `[ARGS]`.
"""

from quire.output_parsing.events import EventEmitter, emit_text_until, skip_call_end
from quire.output_parsing.json_calls import read_call, read_name, read_named_arguments
from quire.output_parsing.reader import Markers, Reading, StreamReader

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
FUNCTION = "<function="
TOOL_CALLS = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"
_HERMES_MARKERS = Markers(OPEN)
_LLAMA_MARKERS = Markers(PYTHON_TAG, FUNCTION)
_MISTRAL_MARKERS = Markers(TOOL_CALLS)


def read_hermes(reader: StreamReader, emitter: EventEmitter) -> Reading[None]:
    while (yield from emit_text_until(reader, emitter, _HERMES_MARKERS)):
        yield from read_tagged_call(reader, emitter)


def read_tagged_call(reader: StreamReader, emitter: EventEmitter) -> Reading[None]:
    """One call, from its opening tag on."""
    reader.mark()
    reader.take(len(OPEN))
    if (yield from read_call(reader, emitter)):
        yield from skip_call_end(reader, emitter, CLOSE)
    else:
        emitter.emit_text(reader.take_marked())


def read_llama(reader: StreamReader, emitter: EventEmitter) -> Reading[None]:
    reader.mark()
    if (yield from reader.skip_space()) == "{":
        yield from _read_bare_calls(reader, emitter)
    else:
        emitter.emit_text(reader.take_marked())
    while marker := (yield from emit_text_until(reader, emitter, _LLAMA_MARKERS)):
        reader.mark()
        reader.take(len(marker))
        if marker == PYTHON_TAG:
            yield from _read_bare_calls(reader, emitter)
        else:
            yield from _read_function(reader, emitter)


def _read_bare_calls(reader: StreamReader, emitter: EventEmitter) -> Reading[None]:
    """Calls separated by semicolons; the text that may be the next call is marked."""
    while (yield from read_call(reader, emitter, bare=True)):
        reader.mark()
        if (yield from reader.skip_space()) != ";":
            break
        reader.take()
    emitter.emit_text(reader.take_marked())


def _read_function(reader: StreamReader, emitter: EventEmitter) -> Reading[None]:
    """`name>{…}</function>`"""
    name = yield from read_name(reader)
    if (yield from reader.accept(">")) and (yield from read_named_arguments(reader, emitter, name)):
        yield from skip_call_end(reader, emitter, "</function>")
    else:
        emitter.emit_text(reader.take_marked())


def read_mistral(reader: StreamReader, emitter: EventEmitter) -> Reading[None]:
    while (yield from emit_text_until(reader, emitter, _MISTRAL_MARKERS)):
        reader.mark()
        reader.take(len(TOOL_CALLS))
        if (yield from reader.skip_space()) == "[":
            reader.take()
            yield from _read_list(reader, emitter)
        elif not (yield from _read_named(reader, emitter)):
            emitter.emit_text(reader.take_marked())


def _read_list(reader: StreamReader, emitter: EventEmitter) -> Reading[None]:
    """The list after its opening bracket; the text that may be the next call is marked."""
    while (yield from read_call(reader, emitter)):
        reader.mark()
        char = yield from reader.skip_space()
        if char == "]":
            reader.take()
            reader.drop_mark()
            return
        if char != ",":
            break
        reader.take()
    emitter.emit_text(reader.take_marked())


def _read_named(reader: StreamReader, emitter: EventEmitter) -> Reading[bool]:
    name = yield from read_name(reader)
    if (yield from reader.accept(CALL_ID)):
        yield from read_name(reader)
    yield from reader.accept(ARGS)
    return (yield from read_named_arguments(reader, emitter, name))

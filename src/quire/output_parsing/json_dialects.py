"""Calls as Hermes and Qwen models write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Calls as Llama 3 models write them: bare objects `{"name": …, "parameters": {…}}`, one or several with `;` between.

They stand alone at the beginning of the answer, or after `<|python_tag|>`. The form `<function=name>{…}</function>`,
which Llama 3.1 was trained on too, is read anywhere.

Calls as Mistral models write them, after `[TOOL_CALLS]`: a list of objects, or a name and its arguments.

`[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]` up to the third tokenizer; later
`[TOOL_CALLS]name[ARGS]{…}`, some with `[CALL_ID]…` before the arguments, some without `[ARGS]`.
"""

from quire.output_parsing.emitter import EventEmitter, close, say_until
from quire.output_parsing.json_calls import read_call, read_name, read_named_arguments
from quire.output_parsing.reader import Markers, Reading, StreamReader

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_HERMES_MARKERS = Markers(OPEN)


def read_hermes(tape: StreamReader, voice: EventEmitter) -> Reading[None]:
    while (yield from say_until(tape, voice, _HERMES_MARKERS)):
        yield from read_tagged_call(tape, voice)


def read_tagged_call(tape: StreamReader, voice: EventEmitter) -> Reading[None]:
    """One call, from its mark on."""
    tape.record()
    tape.take(len(OPEN))
    if (yield from read_call(tape, voice)):
        yield from close(tape, voice, CLOSE)
    else:
        voice.say(tape.spill())


PYTHON_TAG = "<|python_tag|>"
FUNCTION = "<function="
_LLAMA_MARKERS = Markers(PYTHON_TAG, FUNCTION)


def read_llama(tape: StreamReader, voice: EventEmitter) -> Reading[None]:
    tape.record()
    if (yield from tape.skip_space()) == "{":
        yield from _read_bare_calls(tape, voice)
    else:
        voice.say(tape.spill())
    while marker := (yield from say_until(tape, voice, _LLAMA_MARKERS)):
        tape.record()
        tape.take(len(marker))
        if marker == PYTHON_TAG:
            yield from _read_bare_calls(tape, voice)
        else:
            yield from _read_function(tape, voice)


def _read_bare_calls(tape: StreamReader, voice: EventEmitter) -> Reading[None]:
    """One call after another; the tape keeps a record of what may be the next."""
    while (yield from read_call(tape, voice, bare=True)):
        tape.record()
        if (yield from tape.skip_space()) != ";":
            break
        tape.take()
    voice.say(tape.spill())


def _read_function(tape: StreamReader, voice: EventEmitter) -> Reading[None]:
    """`name>{…}</function>`"""
    name = yield from read_name(tape)
    if (yield from tape.accept(">")) and (yield from read_named_arguments(tape, voice, name)):
        yield from close(tape, voice, "</function>")
    else:
        voice.say(tape.spill())


TOOL_CALLS = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"
_MISTRAL_MARKERS = Markers(TOOL_CALLS)


def read_mistral(tape: StreamReader, voice: EventEmitter) -> Reading[None]:
    while (yield from say_until(tape, voice, _MISTRAL_MARKERS)):
        tape.record()
        tape.take(len(TOOL_CALLS))
        if (yield from tape.skip_space()) == "[":
            tape.take()
            yield from _read_list(tape, voice)
        elif not (yield from _read_named(tape, voice)):
            voice.say(tape.spill())


def _read_list(tape: StreamReader, voice: EventEmitter) -> Reading[None]:
    """What follows the bracket; the tape keeps a record of what may be the next call."""
    while (yield from read_call(tape, voice)):
        tape.record()
        letter = yield from tape.skip_space()
        if letter == "]":
            tape.take()
            tape.forget()
            return
        if letter != ",":
            break
        tape.take()
    voice.say(tape.spill())


def _read_named(tape: StreamReader, voice: EventEmitter) -> Reading[bool]:
    name = yield from read_name(tape)
    if (yield from tape.accept(CALL_ID)):
        yield from read_name(tape)
    yield from tape.accept(ARGS)
    return (yield from read_named_arguments(tape, voice, name))

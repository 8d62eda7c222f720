"""Calls as Mistral models write them, after `[TOOL_CALLS]`: a list of objects, or a name and its arguments.

`[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]` up to the third tokenizer; later
`[TOOL_CALLS]name[ARGS]{…}`, some with `[CALL_ID]…` before the arguments, some without `[ARGS]`.
"""

from quire.speech.json_call import read_call, read_name, read_named_arguments
from quire.speech.tape import Markers, Reading, Tape
from quire.speech.voice import Voice, say_until

TOOL_CALLS = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"
_MARKERS = Markers(TOOL_CALLS)


def read_mistral(tape: Tape, voice: Voice) -> Reading[None]:
    while (yield from say_until(tape, voice, _MARKERS)):
        tape.record()
        tape.take(len(TOOL_CALLS))
        if (yield from tape.skip_space()) == "[":
            tape.take()
            yield from _read_list(tape, voice)
        elif not (yield from _read_named(tape, voice)):
            voice.say(tape.spill())


def _read_list(tape: Tape, voice: Voice) -> Reading[None]:
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


def _read_named(tape: Tape, voice: Voice) -> Reading[bool]:
    name = yield from read_name(tape)
    if (yield from tape.accept(CALL_ID)):
        yield from read_name(tape)
    yield from tape.accept(ARGS)
    return (yield from read_named_arguments(tape, voice, name))

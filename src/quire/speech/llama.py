"""Calls as Llama 3 models write them: bare objects `{"name": …, "parameters": {…}}`, one or several with `;` between.

They stand alone at the beginning of the answer, or after `<|python_tag|>`. The form `<function=name>{…}</function>`,
which Llama 3.1 was trained on too, is read anywhere.
"""

from quire.speech.json_call import read_call, read_name, read_named_arguments
from quire.speech.tape import Markers, Reading, Tape
from quire.speech.voice import Voice, close, say_until

PYTHON_TAG = "<|python_tag|>"
FUNCTION = "<function="
_MARKERS = Markers(PYTHON_TAG, FUNCTION)


def read_llama(tape: Tape, voice: Voice) -> Reading[None]:
    tape.record()
    if (yield from tape.skip_space()) == "{":
        yield from _read_bare_calls(tape, voice)
    else:
        voice.say(tape.spill())
    while marker := (yield from say_until(tape, voice, _MARKERS)):
        tape.record()
        tape.take(len(marker))
        if marker == PYTHON_TAG:
            yield from _read_bare_calls(tape, voice)
        else:
            yield from _read_function(tape, voice)


def _read_bare_calls(tape: Tape, voice: Voice) -> Reading[None]:
    """One call after another; the tape keeps a record of what may be the next."""
    while (yield from read_call(tape, voice, bare=True)):
        tape.record()
        if (yield from tape.skip_space()) != ";":
            break
        tape.take()
    voice.say(tape.spill())


def _read_function(tape: Tape, voice: Voice) -> Reading[None]:
    """`name>{…}</function>`"""
    name = yield from read_name(tape)
    if (yield from tape.accept(">")) and (yield from read_named_arguments(tape, voice, name)):
        yield from close(tape, voice, "</function>")
    else:
        voice.say(tape.spill())

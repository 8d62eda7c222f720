"""Calls as Hermes and Qwen models write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from quire.speech.json_call import read_call
from quire.speech.tape import Markers, Reading, Tape
from quire.speech.voice import Voice, close, say_until

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_MARKERS = Markers(OPEN)


def read_hermes(tape: Tape, voice: Voice) -> Reading[None]:
    while (yield from say_until(tape, voice, _MARKERS)):
        yield from read_tagged_call(tape, voice)


def read_tagged_call(tape: Tape, voice: Voice) -> Reading[None]:
    """One call, from its mark on."""
    tape.record()
    tape.take(len(OPEN))
    if (yield from read_call(tape, voice)):
        yield from close(tape, voice, CLOSE)
    else:
        voice.say(tape.spill())

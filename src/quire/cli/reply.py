"""One reply, printed as it comes. Ctrl-C ends it between two steps, never inside one, so the engine stays whole."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

from quire.core.errors import QuireError
from quire.core.sampling import SamplingParams
from quire.engine.failures import failure_of
from quire.engine.front import Prompt
from quire.llm import LLM


class Reply(NamedTuple):
    """What was said, and how it ended: "stop", "length", or "abort" when the user had enough; or why it failed."""

    text: str
    finish_reason: str | None
    num_tokens: int
    seconds: float
    failure: QuireError | None = None


@dataclass(slots=True)
class Wish:
    """Whether the user wants the reply to end."""

    to_stop: bool = False


@contextmanager
def _listening() -> Iterator[Wish]:
    """The first Ctrl-C is a wish. A second one, if a step takes long, is the usual interruption."""
    wish = Wish()

    def note(number: int, frame: FrameType | None) -> None:
        wish.to_stop = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield wish
    finally:
        signal.signal(signal.SIGINT, before)


def say(llm: LLM, prompt: Prompt, params: SamplingParams) -> Reply:
    """Print a completion piece by piece and return it."""
    front = llm.front
    started_s = front.now()
    with _listening() as wish:
        ticket = front.submit(prompt, params, streaming=True)
        try:
            while not ticket.finished and not wish.to_stop:
                for delta in front.turn():
                    print(delta.text, end="", flush=True)
        finally:
            if not ticket.finished:
                front.abort(ticket)
    said = ticket.output().outputs[0]
    failure = failure_of(ticket.transcripts[0].finish_reason, len(ticket.prompt_ids), params)
    return Reply(said.text, said.finish_reason, len(said.token_ids), front.now() - started_s, failure)

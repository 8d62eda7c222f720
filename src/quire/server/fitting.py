"""Shortens a conversation that is too long for the context, by whole turns, the oldest first. Sends nothing."""

from bisect import bisect_left
from dataclasses import replace

from quire.core.errors import ContextLengthExceeded
from quire.server.dialogue import Dialogue
from quire.server.served import Served

_ROOM_SHARE = 8  # of the context, an eighth is left for an answer of which no length was said


def fitted(dialogue: Dialogue, served: Served, max_tokens: int | None) -> Dialogue:
    """With as many turns as leave room for the answer; instructions stay. The last turn stays whatever its length."""
    room = max_tokens or served.max_model_len // _ROOM_SHARE
    messages = dialogue.messages
    num_kept = 1 if messages and messages[0].get("role") in ("system", "developer") else 0
    turns = [place for place, message in enumerate(messages) if message.get("role") == "user" and place > num_kept]
    starts = [num_kept, *turns]

    def shorter(start: int) -> Dialogue:
        return replace(dialogue, messages=messages[:num_kept] + messages[start:])

    def fits(start: int) -> bool:
        try:
            return len(shorter(start).rendered(served).ids) + room <= served.max_model_len
        except ContextLengthExceeded:
            return False

    return shorter(starts[min(bisect_left(starts, True, key=fits), len(starts) - 1)])

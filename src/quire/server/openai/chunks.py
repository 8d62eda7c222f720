"""OpenAI response parts: stream chunks and usage.

`ChunkWriter` encodes the constant part of a chunk once; a text chunk then costs the encoding of its text alone.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from quire.engine.outputs import RequestOutput

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """The fields shared by all bodies and chunks of one response."""

    model: str
    prefix: str  # of the id: chatcmpl or cmpl
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, object]:
        return {"id": f"{self.prefix}-{self.key}", "object": kind, "created": self.created, "model": self.model}


class ChunkWriter:
    """Writes the chunks of one stream. `before` and `after` are the JSON around the text of a choice."""

    __slots__ = ("_after", "_before", "_head", "_heads")

    def __init__(self, head: Mapping[str, object], before: bytes, after: bytes) -> None:
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._before = before
        self._after = after + b"]}\n\n"
        self._heads: dict[int, bytes] = {}

    def text(self, index: int, text: str) -> bytes:
        """The common chunk: text alone. Runs for every token."""
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = self._head + b'{"index":%d,' % index + self._before
        return head + _encode(text) + self._after

    def choice(self, choice: Mapping[str, object], extra: Mapping[str, object] | None = None) -> bytes:
        """Any other chunk; `extra` fields go beside the choices."""
        return self._head + _encode(choice) + b"]" + self._tail(extra)

    def last(self, extra: Mapping[str, object]) -> bytes:
        """A chunk without choices."""
        return self._head + b"]" + self._tail(extra)

    @staticmethod
    def _tail(extra: Mapping[str, object] | None) -> bytes:
        return b"," + _encode(extra)[1:] + b"\n\n" if extra else b"}\n\n"


def usage(
    outputs: Sequence[RequestOutput], *, num_reasoning_tokens: int = 0, without_tokens: bool = False
) -> dict[str, object]:
    """Usage of all prompts of a request. `without_tokens`: the one token that was computed is not counted."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    cached = sum(output.metrics.num_cached_tokens for output in outputs)
    total = running_usage(prompt, 0 if without_tokens else completion)
    total["prompt_tokens_details"] = {"cached_tokens": cached}
    details = {"reasoning_tokens": num_reasoning_tokens} if num_reasoning_tokens else {}
    drafted = sum(output.metrics.num_drafted_tokens for output in outputs)
    if drafted:
        accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    if details:
        total["completion_tokens_details"] = details
    return total


def running_usage(num_prompt: int, num_completion: int) -> dict[str, object]:
    """Usage while generation runs; the number of cached tokens is known at the end."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }

"""Writes the chunks of one streamed answer: what never changes is encoded once, a piece of text alone each time.

What an answer cost, in tokens, as OpenAI's clients read it.

Log-probabilities as OpenAI's clients read them. Each number is written once, from the one the engine gave.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import msgspec

from quire.engine.outputs import Logprob, RequestOutput
from quire.server.http.sse import finite
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What all bodies of one answer share."""

    model: str
    prefix: str  # of its id: chatcmpl or cmpl
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, object]:
        return {"id": f"{self.prefix}-{self.key}", "object": kind, "created": self.created, "model": self.model}


class ChunkWriter:
    """`before` and `after` are what a choice says around its text, as JSON."""

    __slots__ = ("_after", "_before", "_head", "_heads")

    def __init__(self, head: Mapping[str, object], before: bytes, after: bytes) -> None:
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._before = before
        self._after = after + b"]}\n\n"
        self._heads: dict[int, bytes] = {}

    def text(self, index: int, text: str) -> bytes:
        """The usual chunk, as cheaply as it goes."""
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = self._head + b'{"index":%d,' % index + self._before
        return head + _encode(text) + self._after

    def choice(self, choice: Mapping[str, object], extra: Mapping[str, object] | None = None) -> bytes:
        """Any other chunk; `extra` stands beside the choices."""
        return self._head + _encode(choice) + b"]" + self._tail(extra)

    def last(self, extra: Mapping[str, object]) -> bytes:
        """A chunk of no choice."""
        return self._head + b"]" + self._tail(extra)

    @staticmethod
    def _tail(extra: Mapping[str, object] | None) -> bytes:
        return b"," + _encode(extra)[1:] + b"\n\n" if extra else b"}\n\n"


def usage(outputs: Sequence[RequestOutput], *, num_thought: int = 0, without_tokens: bool = False) -> dict[str, object]:
    """Of all prompts of a request together. `without_tokens`: the one token that was computed is not counted."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    cached = sum(output.metrics.num_cached_tokens for output in outputs)
    told = running_usage(prompt, 0 if without_tokens else completion)
    told["prompt_tokens_details"] = {"cached_tokens": cached}
    if num_thought:
        told["completion_tokens_details"] = {"reasoning_tokens": num_thought}
    return told


def running_usage(num_prompt: int, num_completion: int) -> dict[str, object]:
    """While an answer is under way; what the cache gave is known at its end."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


Entry = Mapping[int, Logprob]  # the token itself first, then the likeliest


class TokenText:
    """How tokens are written: as text, or as `token_id:7`."""

    __slots__ = ("_as_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    @property
    def has_text(self) -> bool:
        return self._tokenizer is not None

    def token(self, token_id: int, logprob: Logprob | None) -> str:
        """A token without a score is spelled here."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        if logprob is None:
            return self._tokenizer.spell(token_id)
        return logprob.decoded_token or ""

    def unique(self, token_id: int, logprob: Logprob | None) -> str:
        """The same, but for parts of a character, which all look alike as text: their bytes, as OpenAI spells them."""
        text = self.token(token_id, logprob)
        data = self.bytes(token_id, text) if "\ufffd" in text else b""
        if not data or data == text.encode():
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes(self, token_id: int, text: str) -> bytes:
        if self._tokenizer is None:
            return text.encode()
        if self._tokenizer.byte_level:
            return self._tokenizer.piece_bytes(token_id)
        return self._tokenizer.fallback_byte(token_id) or text.encode()

    def begins(self, text: str, token_id: int) -> bool:
        """Whether a prompt's text says its first token; what a tokenizer put before it, it does not."""
        if self._tokenizer is None or token_id not in self._tokenizer.special_ids:
            return True
        return text.startswith(self._tokenizer.spell(token_id))

    def detokenizer(self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = False) -> Detokenizer | None:
        return None if self._tokenizer is None else Detokenizer(self._tokenizer, skip_special_tokens, prompt_ids)


def chat_scores(entries: Sequence[Entry], num_top: int, spelling: TokenText) -> list[dict[str, object]]:
    """`logprobs.content` of a chat: each token with its likeliest alternatives."""
    content = []
    for entry in entries:
        token_id, logprob = next(iter(entry.items()))
        likeliest = sorted((item for item in entry.items() if item[1].rank <= num_top), key=lambda item: item[1].rank)
        content.append(
            {
                **_scored(token_id, logprob, spelling),
                "top_logprobs": [_scored(*item, spelling) for item in likeliest[:num_top]],
            }
        )
    return content


class PlacedToken(NamedTuple):
    """A token, where it stands in its text, and its score, if anything stands before it."""

    place: int
    token_id: int
    entry: Entry | None

    @property
    def logprob(self) -> Logprob | None:
        return None if self.entry is None else self.entry[self.token_id]


class CompletionScores:
    """`logprobs` of a completion, piece by piece. `detokenizer` follows its text, which begins at the place `start`."""

    __slots__ = ("_detokenizer", "_spelling", "_start", "_untold")

    def __init__(self, spelling: TokenText, detokenizer: Detokenizer | None, start: int = 0) -> None:
        self._spelling = spelling
        self._detokenizer = detokenizer
        self._start = start
        self._untold: list[PlacedToken] = []

    def echo(self, text: str, token_ids: Sequence[int], entries: Sequence[Entry | None]) -> None:
        """A prompt that is repeated, and its scores."""
        detokenizer = self._spelling.detokenizer()
        begun = False
        for token_id, entry in zip(token_ids, entries, strict=True):
            place = 0 if detokenizer is None else min(detokenizer.place, len(text))
            self._untold.append(PlacedToken(place, token_id, entry))
            begun = begun or self._spelling.begins(text, token_id)
            if begun and detokenizer is not None:
                detokenizer.push([token_id])

    def add(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            token_id = next(iter(entry))
            place = self._start
            if self._detokenizer is not None:
                place += self._detokenizer.place
                self._detokenizer.push([token_id])
            self._untold.append(PlacedToken(place, token_id, entry))

    def take(self, num_told: int, *, ended: bool) -> dict[str, object]:
        """Of the tokens that stand in the text that is told, to its end; when it has ended, of all.

        What stands behind it may be a stop string, which is not told: then its tokens stand at the end.
        """
        told = self._untold if ended else list(takewhile(lambda placed: placed.place <= num_told, self._untold))
        self._untold = self._untold[len(told) :]
        return {
            "tokens": [self._spelling.unique(placed.token_id, placed.logprob) for placed in told],
            "token_logprobs": [placed.logprob and finite(placed.logprob.logprob) for placed in told],
            "top_logprobs": [placed.entry and self._top(placed.entry) for placed in told],
            "text_offset": [min(placed.place, num_told) for placed in told],
        }

    def _top(self, entry: Entry) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in entry.items():
            name, value = self._spelling.unique(token_id, logprob), finite(logprob.logprob)
            top[name] = max(value, top.get(name, value))  # two tokens of one spelling: the likelier
        return top


def prompt_scores(entries: Sequence[Entry | None] | None) -> list[dict[str, object] | None] | None:
    """`prompt_logprobs` as vLLM has it: by token id, with ranks."""
    if entries is None:
        return None
    return [None if entry is None else {str(token): _ranked(logprob) for token, logprob in entry.items()}
            for entry in entries]  # fmt: skip


def _ranked(logprob: Logprob) -> dict[str, object]:
    return {
        "logprob": finite(logprob.logprob),
        "rank": logprob.rank,
        "decoded_token": logprob.decoded_token,
    }


def _scored(token_id: int, logprob: Logprob, spelling: TokenText) -> dict[str, object]:
    token = spelling.token(token_id, logprob)
    return {
        "token": token,
        "logprob": finite(logprob.logprob),
        "bytes": list(spelling.bytes(token_id, logprob.decoded_token or "")),
    }

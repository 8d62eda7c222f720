"""Log-probabilities in JSON, for chats and completions. Every one is written from the engine's number, so that all
fields agree. Shared by the APIs that have them."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from quire.engine.outputs import Logprob
from quire.server.http.sse import finite
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer

Entry = Mapping[int, Logprob]  # the token itself first, then the top ones


class TokenText:
    """Tokens as text, or as `token_id:7`."""

    __slots__ = ("_as_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    @property
    def has_text(self) -> bool:
        return self._tokenizer is not None

    def token(self, token_id: int, logprob: Logprob | None) -> str:
        """The token's text. One without a log-probability has no text yet and is decoded here."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        if logprob is None:
            return self._tokenizer.spell(token_id)
        return logprob.decoded_token or ""

    def unique(self, token_id: int, logprob: Logprob | None) -> str:
        """The token's text; of partial characters, which all decode to U+FFFD, the bytes in OpenAI's notation."""
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

    def starts(self, text: str, token_id: int) -> bool:
        """Whether a prompt's text contains its first token; special tokens added by the tokenizer are not in it."""
        if self._tokenizer is None or token_id not in self._tokenizer.special_ids:
            return True
        return text.startswith(self._tokenizer.spell(token_id))

    def detokenizer(self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = False) -> Detokenizer | None:
        return None if self._tokenizer is None else Detokenizer(self._tokenizer, skip_special_tokens, prompt_ids)


def chat_logprobs(entries: Sequence[Entry], num_top: int, token_text: TokenText) -> list[dict[str, object]]:
    """`logprobs.content` of a chat: each token with its top alternatives."""
    content = []
    for entry in entries:
        token_id, logprob = next(iter(entry.items()))
        top = sorted((item for item in entry.items() if item[1].rank <= num_top), key=lambda item: item[1].rank)
        content.append(
            {
                **_token_logprob(token_id, logprob, token_text),
                "top_logprobs": [_token_logprob(*item, token_text) for item in top[:num_top]],
            }
        )
    return content


class PlacedToken(NamedTuple):
    """A token, its offset in the text, and its log-probabilities; the first token of a prompt has none."""

    offset: int
    token_id: int
    entry: Entry | None

    @property
    def logprob(self) -> Logprob | None:
        return None if self.entry is None else self.entry[self.token_id]


class CompletionLogprobs:
    """`logprobs` of a completion, incrementally. `detokenizer` follows the output, which starts at offset `start`."""

    __slots__ = ("_detokenizer", "_pending", "_start", "_token_text")

    def __init__(self, token_text: TokenText, detokenizer: Detokenizer | None, start: int = 0) -> None:
        self._token_text = token_text
        self._detokenizer = detokenizer
        self._start = start
        self._pending: list[PlacedToken] = []

    def echo(self, text: str, token_ids: Sequence[int], entries: Sequence[Entry | None]) -> None:
        """Adds the tokens of an echoed prompt."""
        detokenizer = self._token_text.detokenizer()
        started = False
        for token_id, entry in zip(token_ids, entries, strict=True):
            offset = 0 if detokenizer is None else min(detokenizer.place, len(text))
            self._pending.append(PlacedToken(offset, token_id, entry))
            started = started or self._token_text.starts(text, token_id)
            if started and detokenizer is not None:
                detokenizer.push([token_id])

    def add(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            token_id = next(iter(entry))
            offset = self._start
            if self._detokenizer is not None:
                offset += self._detokenizer.place
                self._detokenizer.push([token_id])
            self._pending.append(PlacedToken(offset, token_id, entry))

    def take(self, num_sent: int, *, ended: bool) -> dict[str, object]:
        """The pending tokens within the first `num_sent` characters; all of them if the output has ended.

        Tokens of a stop string, which is not sent, get the offset of the end.
        """
        taken = self._pending if ended else list(takewhile(lambda placed: placed.offset <= num_sent, self._pending))
        self._pending = self._pending[len(taken) :]
        return {
            "tokens": [self._token_text.unique(placed.token_id, placed.logprob) for placed in taken],
            "token_logprobs": [placed.logprob and finite(placed.logprob.logprob) for placed in taken],
            "top_logprobs": [placed.entry and self._top(placed.entry) for placed in taken],
            "text_offset": [min(placed.offset, num_sent) for placed in taken],
        }

    def _top(self, entry: Entry) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in entry.items():
            name, value = self._token_text.unique(token_id, logprob), finite(logprob.logprob)
            top[name] = max(value, top.get(name, value))  # of two tokens with the same text, the more likely
        return top


def prompt_logprobs_json(entries: Sequence[Entry | None] | None) -> list[dict[str, object] | None] | None:
    """`prompt_logprobs` in vLLM's shape: by token id, with ranks."""
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


def _token_logprob(token_id: int, logprob: Logprob, token_text: TokenText) -> dict[str, object]:
    token = token_text.token(token_id, logprob)
    return {
        "token": token,
        "logprob": finite(logprob.logprob),
        "bytes": list(token_text.bytes(token_id, logprob.decoded_token or "")),
    }

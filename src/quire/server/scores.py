"""Log-probabilities as OpenAI's clients read them. Each number is written once, from the one the engine gave."""

from collections.abc import Mapping, Sequence

from quire.engine.outputs import Logprob
from quire.text.tokenizer import Tokenizer

Entry = Mapping[int, Logprob]  # the token itself first, then the likeliest

_LEAST = -9999.0  # JSON has no infinity


class Spelling:
    """How tokens are written: as text, or as `token_id:7`."""

    __slots__ = ("_as_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    @property
    def has_text(self) -> bool:
        return self._tokenizer is not None

    def token(self, token_id: int, logprob: Logprob) -> str:
        return f"token_id:{token_id}" if self._as_ids else logprob.decoded_token or ""

    def alone(self, token_id: int) -> str:
        """A token that has no score."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def unique(self, token_id: int, logprob: Logprob) -> str:
        """The same, but for parts of a character, which all look alike as text: their bytes, as OpenAI spells them."""
        text = self.token(token_id, logprob)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token_id, text))

    def bytes(self, token_id: int, text: str) -> bytes:
        if self._tokenizer is not None and self._tokenizer.byte_level:
            return self._tokenizer.piece_bytes(token_id)
        piece = "" if self._tokenizer is None else self._tokenizer.id_to_piece(token_id) or ""
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return text.encode()


def chat_scores(entries: Sequence[Entry], num_top: int, spelling: Spelling) -> list[dict[str, object]]:
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


class CompletionScores:
    """`logprobs` of a completion, piece by piece: offsets go on where the last piece ended."""

    __slots__ = ("_offset", "_spelling")

    def __init__(self, spelling: Spelling, offset: int = 0) -> None:
        self._spelling = spelling
        self._offset = offset

    def piece(self, entries: Sequence[Entry | None], unscored: str = "") -> dict[str, object]:
        """A token without a score (nothing stands before it) is spelled `unscored`."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry in entries:
            offsets.append(self._offset)
            if entry is None:
                tokens.append(unscored)
                values.append(None)
                tops.append(None)
                self._offset += len(unscored)
                continue
            token_id, logprob = next(iter(entry.items()))
            tokens.append(self._spelling.unique(token_id, logprob))
            values.append(finite(logprob.logprob))
            tops.append(self._top(entry))
            self._offset += len(logprob.decoded_token or "")
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

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


def _scored(token_id: int, logprob: Logprob, spelling: Spelling) -> dict[str, object]:
    token = spelling.token(token_id, logprob)
    return {
        "token": token,
        "logprob": finite(logprob.logprob),
        "bytes": list(spelling.bytes(token_id, logprob.decoded_token or "")),
    }


def finite(value: float) -> float:
    """As JSON can say it."""
    return max(value, _LEAST)

"""Rebuilds a model's tokenizer from GGUF metadata. Knows the metadata's keys, nothing of files or tensors.

Two kinds of vocabulary are read: byte-level BPE ("gpt2"), whose words are cut as `splits` says, and
SentencePiece BPE with byte fallback ("llama"), whose merges follow from the scores.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from quire.core.errors import BrokenModelFile, UnsupportedModel
from quire.text.splits import Split, split_named
from quire.text.vocabulary import Vocabulary, frame

_PREFIX = "tokenizer.ggml."
_SPACE = "▁"

# Tokens that end a turn in some family, for files that name only one of theirs.
_TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|return|>"})

Value = TypeVar("Value")
Merges = list[tuple[str, str]]


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, one number per token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Pieces(NamedTuple):
    """The vocabulary as the file lists it: the token's id is its place."""

    texts: list[str]
    types: list[int]

    def of_type(self, *types: TokenType) -> list[str]:
        return [text for text, kind in zip(self.texts, self.types, strict=True) if kind in types]


def vocabulary_from_gguf(metadata: Mapping[str, object]) -> Vocabulary:
    """The tokenizer, the special ids and the chat template that the metadata describes."""
    model = _required(metadata, "model", str)
    pieces = _pieces(metadata)
    if model == "gpt2":
        split = split_named(_optional(metadata, "pre", str) or "default")
        backend = _byte_level(metadata, pieces, split)
        adds_bos = split.adds_bos
    elif model == "llama":
        backend = _sentence_piece(metadata, pieces)
        adds_bos = True
    else:
        raise UnsupportedModel(
            f"This GGUF file's tokenizer (tokenizer.ggml.model) is {model!r}; quire reads 'gpt2' (byte-level "
            f"BPE) and 'llama' (SentencePiece). Use the model's Hugging Face folder instead."
        )
    _add_tokens(backend, pieces)
    bos_id = _token_id(metadata, "bos_token_id", pieces)
    eos_id = _token_id(metadata, "eos_token_id", pieces)
    stated_bos = _optional(metadata, "add_bos_token", bool)
    adds_bos = adds_bos if stated_bos is None else stated_bos
    adds_eos = _optional(metadata, "add_eos_token", bool) or False
    frame(
        backend,
        before=[bos_id] if adds_bos and bos_id is not None else [],
        after=[eos_id] if adds_eos and eos_id is not None else [],
    )
    return Vocabulary(
        backend=backend,
        bos_id=bos_id,
        eos_id=eos_id,
        end_ids=_end_ids(metadata, pieces, eos_id),
        chat_template=_chat_template(metadata),
        named_tokens=_named_tokens(metadata, pieces),
    )


def _byte_level(metadata: Mapping[str, object], pieces: Pieces, split: Split) -> Backend:
    """`add_space_prefix` is not read: llama.cpp gives it no meaning in byte-level vocabularies either."""
    merges = [_merge(line) for line in _strings(metadata, "merges")]
    backend = Backend(_bpe(pieces, merges, ignore_merges=split.whole_words))
    if split.composes:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(metadata: Mapping[str, object], pieces: Pieces) -> Backend:
    merges = [_merge(line) for line in _strings(metadata, "merges")] if _has(metadata, "merges") else None
    if merges is None:
        merges = _merges_by_score(pieces, _scores(metadata, pieces))
    unknown_id = _token_id(metadata, "unknown_token_id", pieces)
    unknown = None if unknown_id is None else pieces.texts[unknown_id]
    backend = Backend(_bpe(pieces, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    prefixed = _optional(metadata, "add_space_prefix", bool)
    spaces = normalizers.Replace(" ", _SPACE)
    unspaced = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed is False:
        backend.normalizer = spaces
        backend.decoder = decoders.Sequence(unspaced)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        backend.decoder = decoders.Sequence([*unspaced, decoders.Strip(" ", 1, 0)])
    return backend


def _bpe(
    pieces: Pieces,
    merges: Merges,
    *,
    ignore_merges: bool = False,
    byte_fallback: bool = False,
    fuse_unk: bool = False,
    unk_token: str | None = None,
) -> BPE:
    ids = {text: token_id for token_id, text in enumerate(pieces.texts)}
    try:
        return BPE(
            vocab=ids,
            merges=merges,
            ignore_merges=ignore_merges,
            byte_fallback=byte_fallback,
            fuse_unk=fuse_unk,
            unk_token=unk_token,
        )
    except Exception as error:  # the library raises bare Exception: a merge names a token that is not there
        raise BrokenModelFile(f"The merges in this GGUF file do not fit its tokens: {error}.") from error


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if not left or not right:
        raise BrokenModelFile(f"tokenizer.ggml.merges holds {line!r}, which is not two tokens and a space.")
    return left, right


def _merges_by_score(pieces: Pieces, scores: Sequence[float]) -> Merges:
    """SentencePiece joins the neighbours whose union scores best: every cut of a token in two, best first."""
    normal = {
        text: token_id
        for token_id, (text, kind) in enumerate(zip(pieces.texts, pieces.types, strict=True))
        if kind == TokenType.NORMAL
    }
    ranked: list[tuple[float, int, int, str, str]] = []
    for text, token_id in normal.items():
        cuts = [(text[:place], text[place:]) for place in range(1, len(text))]
        known = [(left, right) for left, right in cuts if left in normal and right in normal]
        known.sort(key=lambda cut: (normal[cut[0]], normal[cut[1]]))
        ranked += [(scores[token_id], len(left), len(right), left, right) for left, right in known]
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in ranked]


def _add_tokens(backend: Backend, pieces: Pieces) -> None:
    """Control and user-defined tokens are found whole in any text, before it is cut."""
    control = pieces.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    defined = pieces.of_type(TokenType.USER_DEFINED)
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in defined])


def _end_ids(metadata: Mapping[str, object], pieces: Pieces, eos_id: int | None) -> tuple[int, ...]:
    named = [eos_id, *(_token_id(metadata, key, pieces) for key in ("eot_token_id", "eom_token_id"))]
    control = set(pieces.of_type(TokenType.CONTROL, TokenType.USER_DEFINED)) & _TURN_ENDS
    spelled = [token_id for token_id, text in enumerate(pieces.texts) if text in control]
    return tuple(dict.fromkeys(token_id for token_id in (*named, *spelled) if token_id is not None))


def _named_tokens(metadata: Mapping[str, object], pieces: Pieces) -> dict[str, str]:
    keys = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found = {name: _token_id(metadata, f"{key}_token_id", pieces) for key, name in keys.items()}
    return {name: pieces.texts[token_id] for name, token_id in found.items() if token_id is not None}


def _chat_template(metadata: Mapping[str, object]) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise BrokenModelFile(f"tokenizer.chat_template must be text, not {type(template).__name__}.")
    return template


# Reading the metadata: once, here, with every type checked.


def _pieces(metadata: Mapping[str, object]) -> Pieces:
    listed = _strings(metadata, "tokens")
    texts = [text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(listed)]
    if len(set(texts)) != len(texts):
        twice = next(text for place, text in enumerate(texts) if texts.index(text) != place)
        raise BrokenModelFile(f"tokenizer.ggml.tokens lists {twice!r} more than once.")
    if not _has(metadata, "token_type"):
        return Pieces(texts, [int(TokenType.NORMAL)] * len(texts))
    types = [int(kind) for kind in _numbers(metadata, "token_type", len(texts))]
    return Pieces(texts, types)


def _scores(metadata: Mapping[str, object], pieces: Pieces) -> list[float]:
    return [float(score) for score in _numbers(metadata, "scores", len(pieces.texts))]


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    values = _array(metadata, key)
    if not all(isinstance(value, str) for value in values):
        raise BrokenModelFile(f"{_PREFIX}{key} must hold text only.")
    return [str(value) for value in values]


def _numbers(metadata: Mapping[str, object], key: str, count: int) -> list[float]:
    values = _array(metadata, key)
    if len(values) != count:
        raise BrokenModelFile(f"{_PREFIX}{key} holds {len(values)} numbers for {count} tokens.")
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) != count:
        raise BrokenModelFile(f"{_PREFIX}{key} must hold numbers only.")
    return numbers


def _array(metadata: Mapping[str, object], key: str) -> Sequence[object]:
    values = metadata.get(_PREFIX + key)
    if not isinstance(values, list | tuple):
        raise BrokenModelFile(f"This GGUF file has no list {_PREFIX}{key}, so its tokenizer cannot be rebuilt.")
    return values


def _has(metadata: Mapping[str, object], key: str) -> bool:
    return metadata.get(_PREFIX + key) is not None


def _optional(metadata: Mapping[str, object], key: str, kind: type[Value]) -> Value | None:
    value = metadata.get(_PREFIX + key)
    if value is None:
        return None
    if not isinstance(value, kind):
        raise BrokenModelFile(f"{_PREFIX}{key} must be {kind.__name__}, not {value!r}.")
    return value


def _required(metadata: Mapping[str, object], key: str, kind: type[Value]) -> Value:
    value = _optional(metadata, key, kind)
    if value is None:
        raise BrokenModelFile(f"This GGUF file has no {_PREFIX}{key}, so its tokenizer cannot be rebuilt.")
    return value


def _token_id(metadata: Mapping[str, object], key: str, pieces: Pieces) -> int | None:
    value = _optional(metadata, key, int)
    if value is not None and not 0 <= value < len(pieces.texts):
        raise BrokenModelFile(f"{_PREFIX}{key} is {value}, but there are {len(pieces.texts)} tokens.")
    return value

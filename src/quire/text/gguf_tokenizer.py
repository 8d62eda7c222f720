"""Builds a tokenizer from GGUF metadata. Does not depend on files or tensors.

Two vocabulary types are supported: byte-level BPE ("gpt2"), pre-tokenized as `SPLITS` says, and SentencePiece BPE with
byte fallback ("llama"), whose merges are derived from the scores.

The pre-tokenizer names are llama.cpp's (`tokenizer.ggml.pre`); the regexes are those of the models' tokenizer.json.
Each regex splits the parts that the one before left; text that no regex matches stays one part.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import groupby
from typing import NamedTuple, TypeVar

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from quire.core.errors import BrokenModelFile, UnsupportedModel
from quire.text.hf_tokenizer import TokenizerFiles, frame


class PreTokenizerSplit(NamedTuple):
    """The regexes, in order, and the other settings that llama.cpp implies by the name."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is itself a token is not merged from its bytes
    adds_bos: bool = False  # unless the file says otherwise
    composes: bool = False  # text is normalized to NFC first


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAPPED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_SHOUTED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_TEKKEN = rf"{_CAPPED}|{_SHOUTED}|\p{{N}}|{_MARKS}"
_GPT4O = rf"{_CAPPED}{_SUFFIXES}?|{_SHOUTED}{_SUFFIXES}?|\p{{N}}{{1,3}}|{_MARKS}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)
# Escaped: some of these letters look like others, and editors may normalize them.
_DEEPSEEK_LETTERS = (
    r"\s?["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
    "]+"
)
_CJK = r"[一-龥ࠀ-一가-퟿]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_PLAIN = PreTokenizerSplit((_GPT2,))
_DIGITS_APART = PreTokenizerSplit((r"\p{N}", _GPT2))
_LLAMA3_FAMILY = PreTokenizerSplit((_LLAMA3,), whole_words=True, adds_bos=True)
_LLAMA3_MERGED = PreTokenizerSplit((_LLAMA3,))
_QWEN2_FAMILY = PreTokenizerSplit((_QWEN2,), composes=True)
_GPT4O_FAMILY = PreTokenizerSplit((_GPT4O,))
_DEEPSEEK3_FAMILY = PreTokenizerSplit((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3))

SPLITS: dict[str, PreTokenizerSplit] = {
    # For files older than the key; llama.cpp does the same, with a warning.
    "default": PreTokenizerSplit((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "jais": _PLAIN,
    "exaone4": _PLAIN,
    "trillion": _PLAIN,
    "granite-docling": _PLAIN,
    "gigachat": _PLAIN,
    "mellum": _PLAIN,
    "a.x-4.0": _PLAIN,
    "mpt": PreTokenizerSplit((_GPT2,), composes=True),
    "olmo": PreTokenizerSplit((_GPT2,), composes=True),
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "codeshell": _DIGITS_APART,
    "exaone": _DIGITS_APART,
    "minerva-7b": _DIGITS_APART,
    "mellum2": _DIGITS_APART,
    "command-r": PreTokenizerSplit((r"\p{N}", _GPT2), composes=True),
    "llama3": _LLAMA3_FAMILY,
    "llama-v3": _LLAMA3_FAMILY,
    "llama-bpe": _LLAMA3_FAMILY,
    "falcon3": _LLAMA3_FAMILY,
    "falcon-h1": _LLAMA3_FAMILY,
    "pixtral": _LLAMA3_FAMILY,
    "midm-2.0": _LLAMA3_FAMILY,
    "lfm2": _LLAMA3_FAMILY,
    "dbrx": _LLAMA3_MERGED,
    "smaug-bpe": _LLAMA3_MERGED,
    "chatglm-bpe": _LLAMA3_MERGED,
    "glm4": _LLAMA3_MERGED,
    "qwen2": _QWEN2_FAMILY,
    "deepseek-r1-qwen": _QWEN2_FAMILY,
    "megrez": _QWEN2_FAMILY,
    "kormo": _QWEN2_FAMILY,
    "stablelm2": _QWEN2_FAMILY,
    "hunyuan": PreTokenizerSplit((_QWEN2,)),
    "solar-open": PreTokenizerSplit((_QWEN2,)),
    "grok-2": PreTokenizerSplit((_QWEN2,)),
    "qwen35": PreTokenizerSplit((_QWEN35,), composes=True),
    "tekken": PreTokenizerSplit((_TEKKEN,), whole_words=True, adds_bos=True),
    "gpt-4o": _GPT4O_FAMILY,
    "llama4": _GPT4O_FAMILY,
    "kanana2": _GPT4O_FAMILY,
    "minimax-m2": _GPT4O_FAMILY,
    "deepseek-llm": PreTokenizerSplit(
        (r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizerSplit((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": _DEEPSEEK3_FAMILY,
    "hunyuan-dense": _DEEPSEEK3_FAMILY,
    "joyai-llm": _DEEPSEEK3_FAMILY,
    "falcon": PreTokenizerSplit((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "bloom": PreTokenizerSplit((_BLOOM,)),
    "poro-chat": PreTokenizerSplit((_BLOOM,)),
    "gpt3-finnish": PreTokenizerSplit((_BLOOM,)),
    "viking": PreTokenizerSplit((_BLOOM, r"\p{N}")),
}


def split_named(name: str) -> PreTokenizerSplit:
    """The entry for a `tokenizer.ggml.pre`. Raises an error that lists the known names."""
    if name not in SPLITS:
        raise UnsupportedModel(
            f"This GGUF file's text splitting (tokenizer.ggml.pre) is {name!r}, which quire does not support. "
            f"Known: {', '.join(sorted(SPLITS))}. Use the model's Hugging Face folder instead."
        )
    return SPLITS[name]


_PREFIX = "tokenizer.ggml."
_SPACE = "▁"

# End-of-turn tokens of known model families, for files that list only one of them.
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


class GgufTokens(NamedTuple):
    """The vocabulary as the file lists it: a token's id is its index."""

    texts: list[str]
    types: list[int]

    def of_type(self, *types: TokenType) -> list[str]:
        return [text for text, kind in zip(self.texts, self.types, strict=True) if kind in types]


def vocabulary_from_gguf(metadata: Mapping[str, object]) -> TokenizerFiles:
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
    return TokenizerFiles(
        backend=backend,
        bos_id=bos_id,
        eos_id=eos_id,
        end_ids=_end_ids(metadata, pieces, eos_id),
        chat_template=_chat_template(metadata),
        named_tokens=_named_tokens(metadata, pieces),
    )


def _byte_level(metadata: Mapping[str, object], pieces: GgufTokens, split: PreTokenizerSplit) -> Backend:
    """`add_space_prefix` is ignored, as in llama.cpp for byte-level vocabularies."""
    merges = [_merge(line) for line in _strings(metadata, "merges")]
    backend = Backend(_bpe(pieces, merges, ignore_merges=split.whole_words))
    if split.composes:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(metadata: Mapping[str, object], pieces: GgufTokens) -> Backend:
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
    pieces: GgufTokens,
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
    except Exception as error:  # the library raises bare Exception if a merge names an unknown token
        raise BrokenModelFile(f"The merges in this GGUF file do not fit its tokens: {error}.") from error


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if not left or not right:
        raise BrokenModelFile(f"tokenizer.ggml.merges holds {line!r}, which is not two tokens and a space.")
    return left, right


def _merges_by_score(pieces: GgufTokens, scores: Sequence[float]) -> Merges:
    """SentencePiece merges the adjacent pair with the best score: lists all splits of each token, best first.

    Of equal scores the longer left part comes first, then the longer right part, then the lower id.
    """
    listed = zip(pieces.texts, scores, pieces.types, strict=True)
    normal = {text: score for text, score, kind in listed if kind == TokenType.NORMAL}
    merges: Merges = []
    for _, tied in groupby(sorted(normal, key=normal.__getitem__, reverse=True), key=normal.__getitem__):
        first = len(merges)
        count = 0
        for count, text in enumerate(tied, 1):  # noqa: B007  # the number of tokens with this score
            for place in range(len(text) - 1, 0, -1):
                if text[:place] in normal and text[place:] in normal:
                    merges.append((text[:place], text[place:]))
        if count > 1:  # most scores are one token's, whose splits are in order
            merges[first:] = sorted(merges[first:], key=lambda cut: (-len(cut[0]), -len(cut[1])))
    return merges


def _add_tokens(backend: Backend, pieces: GgufTokens) -> None:
    """Control and user-defined tokens are matched in the text before pre-tokenization."""
    control = pieces.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    defined = pieces.of_type(TokenType.USER_DEFINED)
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in defined])


def _end_ids(metadata: Mapping[str, object], pieces: GgufTokens, eos_id: int | None) -> tuple[int, ...]:
    named = [eos_id, *(_token_id(metadata, key, pieces) for key in ("eot_token_id", "eom_token_id"))]
    control = set(pieces.of_type(TokenType.CONTROL, TokenType.USER_DEFINED)) & _TURN_ENDS
    spelled = [token_id for token_id, text in enumerate(pieces.texts) if text in control]
    return tuple(dict.fromkeys(token_id for token_id in (*named, *spelled) if token_id is not None))


def _named_tokens(metadata: Mapping[str, object], pieces: GgufTokens) -> dict[str, str]:
    keys = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found = {name: _token_id(metadata, f"{key}_token_id", pieces) for key, name in keys.items()}
    return {name: pieces.texts[token_id] for name, token_id in found.items() if token_id is not None}


def _chat_template(metadata: Mapping[str, object]) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise BrokenModelFile(f"tokenizer.chat_template must be text, not {type(template).__name__}.")
    return template


# Reading the metadata, with type checks.


def _pieces(metadata: Mapping[str, object]) -> GgufTokens:
    listed = _strings(metadata, "tokens")
    texts = [text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(listed)]
    if len(set(texts)) != len(texts):
        twice = next(text for place, text in enumerate(texts) if texts.index(text) != place)
        raise BrokenModelFile(f"tokenizer.ggml.tokens lists {twice!r} more than once.")
    if not _has(metadata, "token_type"):
        return GgufTokens(texts, [int(TokenType.NORMAL)] * len(texts))
    types = [int(kind) for kind in _numbers(metadata, "token_type", len(texts))]
    return GgufTokens(texts, types)


def _scores(metadata: Mapping[str, object], pieces: GgufTokens) -> list[float]:
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


def _token_id(metadata: Mapping[str, object], key: str, pieces: GgufTokens) -> int | None:
    value = _optional(metadata, key, int)
    if value is not None and not 0 <= value < len(pieces.texts):
        raise BrokenModelFile(f"{_PREFIX}{key} is {value}, but there are {len(pieces.texts)} tokens.")
    return value

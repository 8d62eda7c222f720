"""How a byte-level vocabulary cuts text into words before merging, by the names GGUF files use.

The names are llama.cpp's (`tokenizer.ggml.pre`); the patterns are those of the models' own tokenizer files.
Each pattern cuts what the one before it left whole, and what no pattern matches stays a word of its own.
"""

from typing import NamedTuple

from quire.core.errors import UnsupportedModel


class Split(NamedTuple):
    """The patterns, in order, and what else llama.cpp ties to the name."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is itself a token is not merged from its bytes
    adds_bos: bool = False  # unless the file says otherwise
    composes: bool = False  # text is brought to NFC first


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
# Escaped: some of these are written the same as other letters, and editors bring them together.
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

_PLAIN = Split((_GPT2,))
_DIGITS_APART = Split((r"\p{N}", _GPT2))
_LLAMA3_FAMILY = Split((_LLAMA3,), whole_words=True, adds_bos=True)
_LLAMA3_MERGED = Split((_LLAMA3,))
_QWEN2_FAMILY = Split((_QWEN2,), composes=True)
_GPT4O_FAMILY = Split((_GPT4O,))
_DEEPSEEK3_FAMILY = Split((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3))

SPLITS: dict[str, Split] = {
    # Files made before the key existed; llama.cpp reads them so, and warns.
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "jais": _PLAIN,
    "exaone4": _PLAIN,
    "trillion": _PLAIN,
    "granite-docling": _PLAIN,
    "gigachat": _PLAIN,
    "mellum": _PLAIN,
    "a.x-4.0": _PLAIN,
    "mpt": Split((_GPT2,), composes=True),
    "olmo": Split((_GPT2,), composes=True),
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "codeshell": _DIGITS_APART,
    "exaone": _DIGITS_APART,
    "minerva-7b": _DIGITS_APART,
    "mellum2": _DIGITS_APART,
    "command-r": Split((r"\p{N}", _GPT2), composes=True),
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
    "hunyuan": Split((_QWEN2,)),
    "solar-open": Split((_QWEN2,)),
    "grok-2": Split((_QWEN2,)),
    "qwen35": Split((_QWEN35,), composes=True),
    "tekken": Split((_TEKKEN,), whole_words=True, adds_bos=True),
    "gpt-4o": _GPT4O_FAMILY,
    "llama4": _GPT4O_FAMILY,
    "kanana2": _GPT4O_FAMILY,
    "minimax-m2": _GPT4O_FAMILY,
    "deepseek-llm": Split((r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+")),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": _DEEPSEEK3_FAMILY,
    "hunyuan-dense": _DEEPSEEK3_FAMILY,
    "joyai-llm": _DEEPSEEK3_FAMILY,
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "bloom": Split((_BLOOM,)),
    "poro-chat": Split((_BLOOM,)),
    "gpt3-finnish": Split((_BLOOM,)),
    "viking": Split((_BLOOM, r"\p{N}")),
}


def split_named(name: str) -> Split:
    """The row for a `tokenizer.ggml.pre`, or a refusal that lists the ones there are."""
    if name not in SPLITS:
        raise UnsupportedModel(
            f"This GGUF file's text splitting (tokenizer.ggml.pre) is {name!r}, which quire does not know. "
            f"Known: {', '.join(sorted(SPLITS))}. Use the model's Hugging Face folder instead."
        )
    return SPLITS[name]

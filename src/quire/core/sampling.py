"""How a continuation is chosen: what the user says (`SamplingParams`) and what a row needs (`RowSampling`).

`SamplingParams` may speak of text (stop strings, bad words). `RowSampling` is what crosses the bridge: integers
and floats alone, checked against the width of the logits. Both are validated when they are made.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral

from quire.core.errors import InvalidParameter, shown

# Caps on what one request may carry. They bound memory and time per row; generous beside what clients send.
MAX_SEQUENCES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 32
MAX_LOGPROBS = 100
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a user may ask of sampling. The names and defaults are those people know from vLLM."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = 16  # None: as much as context and cache allow
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_SEQUENCES)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}.",
                param="min_tokens",
            )
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(f"{name} must be true or false, not {shown(getattr(self, name))}.", param=name)
        if self.seed is not None:
            _check_int("seed", self.seed, -MAX_SEED, MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if not isinstance(self.stop, str):
            _check_list("stop", self.stop, MAX_STOP_STRINGS)
        _check_strings("stop", self.stop_strings)
        _check_list("bad_words", self.bad_words, MAX_BAD_WORDS)
        _check_strings("bad_words", self.bad_words or ())
        _check_list("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _check_bias(self.logit_bias)
        _check_list("allowed_token_ids", self.allowed_token_ids, None)
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise InvalidParameter("allowed_token_ids is empty: no token could follow.", param="allowed_token_ids")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class RowSampling:
    """What the sampler must know of one row, for as long as it sits. Token ids are inside the vocabulary."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    min_tokens: int = 0  # until so many are generated, no end token may come
    end_ids: tuple[int, ...] = ()  # tokens that end the sequence
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    allowed_ids: tuple[int, ...] | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    num_candidates: int = 0  # likeliest tokens that a tethered row gives back

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def row_sampling(
    params: SamplingParams,
    *,
    vocab_size: int,
    end_ids: Iterable[int],
    bad_words: Iterable[tuple[int, ...]],
    fresh_seed: int,
) -> RowSampling:
    """Resolve what the user said against one model: its vocabulary, its end tokens, its spelling of the bad words."""
    stop_ids = _token_ids("stop_token_ids", params.stop_token_ids or (), vocab_size)
    ends = stop_ids if params.ignore_eos else (*end_ids, *stop_ids)
    allowed = params.allowed_token_ids
    allowed_ids = None if allowed is None else _token_ids("allowed_token_ids", allowed, vocab_size)
    forbidden = _bad_words(bad_words, vocab_size)
    if allowed_ids is not None:
        early = set(ends) if params.min_tokens > 0 else set()
        _check_some_left(set(allowed_ids) - early - {word[0] for word in forbidden if len(word) == 1})
    biased = _token_ids("logit_bias", params.logit_bias or (), vocab_size)
    return RowSampling(
        temperature=float(params.temperature),
        top_k=0 if params.top_k == -1 or params.top_k >= vocab_size else params.top_k,
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        seed=fresh_seed if params.seed is None else params.seed,
        min_tokens=params.min_tokens,
        end_ids=tuple(sorted(set(ends))),
        logit_bias=tuple(zip(biased, map(float, (params.logit_bias or {}).values()), strict=True)),
        bad_words=forbidden,
        allowed_ids=allowed_ids,
        num_logprobs=_within_vocab("logprobs", params.logprobs, vocab_size),
        num_prompt_logprobs=_within_vocab("prompt_logprobs", params.prompt_logprobs, vocab_size),
    )


def _check_some_left(allowed: set[int]) -> None:
    if not allowed:
        raise InvalidParameter(
            "allowed_token_ids, without bad_words and, while min_tokens asks for more, without the tokens that end "
            "the text, leaves no token that could follow.",
            param="allowed_token_ids",
        )


def _bad_words(words: Iterable[tuple[int, ...]], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    checked = tuple(_token_ids("bad_words", word, vocab_size) for word in words if word)
    for word in checked:
        if len(word) > MAX_BAD_WORD_TOKENS:
            raise InvalidParameter(
                f"One of bad_words is {len(word)} tokens long; the most is {MAX_BAD_WORD_TOKENS}.",
                param="bad_words",
            )
    return checked


def _token_ids(name: str, ids: Iterable[object], vocab_size: int) -> tuple[int, ...]:
    checked = []
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
            raise InvalidParameter(
                f"{name} holds {shown(token)}, which is no token id of this model: ids run from 0 to {vocab_size - 1}.",
                param=name,
            )
        checked.append(int(token))
    return tuple(checked)


def _within_vocab(name: str, count: int | None, vocab_size: int) -> int | None:
    if count is not None and count > vocab_size:
        raise InvalidParameter(f"{name} is {count}, but the vocabulary has only {vocab_size} tokens.", param=name)
    return count


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParameter(f"{name} must be a whole number from {low} to {high}, not {shown(value)}.", param=name)


def _check_float(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]  # NaN is nowhere
        bounds = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise InvalidParameter(f"{name} must be a number {bounds}, not {shown(value)}.", param=name)


def _check_list(name: str, values: object, most: int | None) -> None:
    """None, or so many values at most. A text is not meant as the list of its letters."""
    if values is None:
        return
    if not isinstance(values, Sequence | Set) or isinstance(values, str | bytes | bytearray | memoryview):
        raise InvalidParameter(f"{name} must be a list, not {shown(values)}.", param=name)
    _check_count(name, values, most)


def _check_strings(name: str, values: Iterable[object]) -> None:
    for value in values:
        if not isinstance(value, str) or not value:
            raise InvalidParameter(f"{name} must hold non-empty strings, not {shown(value)}.", param=name)


def _check_bias(values: object) -> None:
    if values is None:
        return
    if not isinstance(values, Mapping):
        raise InvalidParameter(f"logit_bias must map token ids to numbers, not be {shown(values)}.", param="logit_bias")
    _check_count("logit_bias", values, MAX_LOGIT_BIAS)
    for bias in values.values():
        _check_float("logit_bias", bias, -100.0, 100.0)


def _check_count(name: str, values: Collection[object], most: int | None) -> None:
    if most is not None and len(values) > most:
        raise InvalidParameter(f"{name} holds {len(values)} entries; the most is {most}.", param=name)

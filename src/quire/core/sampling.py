"""Sampling parameters: of a request, as the user gives them (`SamplingParams`), and of a row (`RowSampling`).

`SamplingParams` may hold text (stop strings, bad words, a `Grammar`). `RowSampling` is sent to the runner: integers and
floats only, checked against the width of the logits. Both are validated when they are made. A grammar is a kind and a
text; this module does not read the text.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from functools import wraps
from numbers import Integral
from typing import Any, Protocol, TypeVar, runtime_checkable

from quire.core.closed_schema import close_objects
from quire.core.errors import InvalidParameter, shown
from quire.core.validation import (
    check_bool,
    check_count,
    check_float,
    check_int,
    check_list,
    check_strings,
    convert_numpy,
)


class GrammarKind(Enum):
    """The language of a grammar's text. The wire carries the values."""

    JSON_OBJECT = "json_object"  # any JSON object; the text is empty
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of the allowed texts
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output of a sequence."""

    kind: GrammarKind
    text: str


@runtime_checkable
class SchemaClass(Protocol):
    """A class that describes itself as a JSON schema, as pydantic's models do."""

    def model_json_schema(self) -> dict[str, object]: ...


def json_grammar(schema: object, param: str = "json") -> Grammar:
    """The grammar of a JSON schema, its text, or a pydantic model, with its objects closed.

    The schema itself is checked when it is compiled.
    """
    if isinstance(schema, SchemaClass):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise InvalidParameter(f"{param} is a text that is not JSON: {error}.", param=param) from None
    if not isinstance(schema, Mapping):
        raise InvalidParameter(
            f"{param} must be a JSON schema (a dict or its text) or a pydantic model, not {shown(schema)}.", param=param
        )
    try:
        json.dumps(schema)  # a schema that contains itself is found here
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(close_objects(schema)))
    except (TypeError, ValueError) as error:
        raise InvalidParameter(f"{param} is not JSON data: {error}.", param=param) from None


class UnknownParameter(InvalidParameter, TypeError):
    """A keyword that is not a parameter; a `TypeError` too, which Python raises for an unexpected keyword."""


_STRUCTURED = "use json, regex, choice or grammar"
_OF_REQUEST = "it is a keyword of generate, chat, stream and stream_chat"
_NO_BEAMS = "use use_beam_search=True with beam_width"
# Keywords of vLLM, transformers and llama-cpp-python that `SamplingParams` does not have, and what replaces each.
_FOREIGN = {
    "guided_decoding": _STRUCTURED, "structured_outputs": _STRUCTURED, "response_format": _STRUCTURED,
    "json_schema": "use json", "guided_json": "use json", "guided_regex": "use regex", "guided_choice": "use choice",
    "guided_grammar": "use grammar, in Lark's syntax",
    "max_new_tokens": "use max_tokens", "max_length": "use max_tokens, which does not count the prompt",
    "n_predict": "use max_tokens", "num_predict": "use max_tokens", "temp": "use temperature",
    "mirostat": "use top_p or min_p", "max_completion_tokens": "use max_tokens", "min_new_tokens": "use min_tokens",
    "repeat_penalty": "use repetition_penalty", "stop_sequences": "use stop", "stop_strings": "use stop",
    "num_beams": _NO_BEAMS, "do_sample": "temperature=0 is greedy, a temperature above 0 samples",
    "num_return_sequences": "use n", "eos_token_id": "use stop_token_ids", "bad_words_ids": "use bad_words",
    "top_logprobs": "use logprobs", "random_seed": "use seed",
    "detokenize": "the text is always there, beside token_ids; omit it", "output_kind": "use LLM.stream",
    "logits_processors": "use logit_bias, bad_words, allowed_token_ids or a grammar", "logits_processor":
    "use logit_bias, bad_words, allowed_token_ids or a grammar", "truncate_prompt_tokens": "cut the token ids",
    "typical_p": "use top_p or min_p", "mirostat_mode": "use top_p or min_p", "tfs_z": "use top_p or min_p",
    **dict.fromkeys(("priority", "tenant", "cache_salt", "timeout_s"), _OF_REQUEST),
    "stream": "use LLM.stream", "echo": "the prompt is in the output: RequestOutput.prompt",
}  # fmt: skip

_Class = TypeVar("_Class", bound=type)


def _explains_keywords(cls: _Class) -> _Class:
    """A keyword that the dataclass does not have is refused with what replaces it, or the nearest name."""
    create: Callable[..., None] = cls.__init__  # type: ignore[misc]
    known = frozenset(cls.__dataclass_fields__)  # type: ignore[attr-defined]

    @wraps(create)
    def check_and_create(self: object, *args: object, **given: object) -> None:
        if not given.keys() <= known:
            raise _unknown(next(name for name in given if name not in known), known)
        create(self, *args, **given)

    cls.__init__ = check_and_create  # type: ignore[misc]
    return cls


def _unknown(name: str, known: Iterable[str]) -> UnknownParameter:
    near = get_close_matches(name, sorted(known), n=1)
    hint = f"{_FOREIGN[name]}." if name in _FOREIGN else f"did you mean {near[0]}?" if near else "see its help()."
    return UnknownParameter(f"SamplingParams has no {name}: {hint}", param=name)


def _resolve_grammar(params: "SamplingParams") -> None:
    """The grammar, in whichever way it was given, as a `Grammar`."""
    given = [name for name in ("grammar", "json", "regex", "choice") if getattr(params, name) is not None]
    if not given:
        return
    if len(given) > 1:
        raise InvalidParameter(f"{' and '.join(given)} both constrain the output; give one of them.", param=given[1])
    [name] = given
    value = getattr(params, name)
    if isinstance(value, Grammar):
        return
    match name:
        case "json":
            grammar = json_grammar(value)
        case "choice":
            grammar = Grammar(GrammarKind.CHOICE, json.dumps(_checked_choice(value)))
        case _:
            if not isinstance(value, str) or not value:
                raise InvalidParameter(f"{name} must be a text that is not empty, not {shown(value)}.", param=name)
            grammar = Grammar(GrammarKind.REGEX if name == "regex" else GrammarKind.LARK, value)
    object.__setattr__(params, name, None)
    object.__setattr__(params, "grammar", grammar)


def _checked_choice(value: object) -> list[object]:
    check_list("choice", value, MAX_CHOICES)
    assert isinstance(value, Sequence | Set)
    check_strings("choice", value, MAX_CHOICE_CHARACTERS)
    if not value:
        raise InvalidParameter("choice is empty; give the texts that may be said.", param="choice")
    return list(value)


# Limits of one request. They bound memory and time per row, and are far above what clients send.
MAX_SEQUENCES = 128
MAX_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 1 << 16
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024  # of each
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 32
LONGEST_TOKEN = 128  # characters: a run of spaces in the vocabularies of GPT-4 and Llama 3
MAX_BAD_WORD_CHARACTERS = MAX_BAD_WORD_TOKENS * LONGEST_TOKEN
MAX_BAD_WORDS_CHARACTERS = 1 << 16  # of all together: they are tokenized before the request can be queued
MAX_LOGPROBS = 100
MAX_TEMPERATURE = 2.0  # as in OpenAI's API: above it texts are noise
MAX_SEED = 2**63 - 1
MAX_LENGTH_PENALTY = 10.0

# Parameters that a beam search cannot apply, with their neutral values.
_NOT_WITH_BEAMS: Mapping[str, tuple[object, ...]] = {
    "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "repetition_penalty": (1.0,), "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,), "stop_strings": ((),), "logprobs": (None,), "grammar": (None,),
}  # fmt: skip


@_explains_keywords
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request, with the names and defaults of vLLM."""

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
    best_of: int | None = None  # continuations computed; the n with the best mean log-probability are returned; None: n
    use_beam_search: bool = False
    beam_width: int | None = None  # None: best_of, or n
    length_penalty: float = 1.0  # of beams: the score is divided by the length to this power
    early_stopping: bool | str = False  # of beams: False, True or "never", as Hugging Face defines them
    grammar: Grammar | None = None  # constrains the output; a text is a grammar in Lark's syntax
    # Shorter ways to give a grammar; each becomes `grammar`, and is None afterwards.
    json: Any = field(default=None, repr=False)  # a JSON schema, its text, or a pydantic model
    regex: str | None = field(default=None, repr=False)
    choice: Sequence[str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _resolve_grammar(self)
        convert_numpy(self, self.__slots__)
        check_int("n", self.n, 1, MAX_SEQUENCES)
        check_float("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_int("top_k", self.top_k, -1, 2**31 - 1)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}.",
                param="min_tokens",
            )
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            check_bool(name, getattr(self, name))
        if self.seed is not None:
            check_int("seed", self.seed, -MAX_SEED, MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if not isinstance(self.stop, str):
            check_list("stop", self.stop, MAX_STOP_STRINGS)
        check_strings("stop", self.stop_strings, MAX_STOP_CHARACTERS)
        _check_bad_words(self.bad_words)
        check_list("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _check_bias(self.logit_bias)
        check_list("allowed_token_ids", self.allowed_token_ids, None)
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise InvalidParameter("allowed_token_ids is empty: no token could be sampled.", param="allowed_token_ids")
        _check_choosing(self)

    @property
    def num_sequences(self) -> int:
        """The continuations that are computed; `n` of them are returned."""
        width = self.beam_width if self.use_beam_search else None
        return width or self.best_of or self.n

    @property
    def chooses(self) -> bool:
        """Whether the continuations are compared when all have ended: nothing can be streamed before."""
        return self.use_beam_search or self.num_sequences > self.n

    @property
    def scored(self) -> bool:
        """Whether every token needs its log-probability: requested, or for the comparison of best_of."""
        return self.logprobs is not None or (self.chooses and not self.use_beam_search)

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
    """The sampler's parameters of one row. Token ids are inside the vocabulary."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    min_tokens: int = 0  # end tokens are masked until this many are generated
    end_ids: tuple[int, ...] = ()  # tokens that end the sequence
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    allowed_ids: tuple[int, ...] | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    num_candidates: int = 0  # most probable tokens that a host-driven row returns
    masked: bool = False  # every token is sampled under a grammar mask
    pooled: bool = False  # an embedding: the prompt's hidden states are summed, no token is sampled

    @property
    def prompt_wide(self) -> bool:
        """Whether every prompt position must be computed: the cache holds no logits and no hidden states."""
        return self.pooled or self.num_prompt_logprobs is not None

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
    """Resolve parameters for one model: its vocabulary, its end tokens, its tokenization of the bad words."""
    stop_ids = checked_token_ids("stop_token_ids", params.stop_token_ids or (), vocab_size)
    ends = stop_ids if params.ignore_eos else (*end_ids, *stop_ids)
    allowed_ids = None
    if params.allowed_token_ids is not None:
        check_count("allowed_token_ids", params.allowed_token_ids, vocab_size)
        allowed_ids = tuple(dict.fromkeys(checked_token_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)))
    forbidden = _bad_words(bad_words, vocab_size)
    if allowed_ids is not None:
        early = set(ends) if params.min_tokens > 0 else set()
        _check_some_left(set(allowed_ids) - early - {word[0] for word in forbidden if len(word) == 1})
    biased = checked_token_ids("logit_bias", params.logit_bias or (), vocab_size)
    hidden = params.scored and params.logprobs is None
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
        num_logprobs=0 if hidden else _within_vocab("logprobs", params.logprobs, vocab_size),
        num_prompt_logprobs=_within_vocab("prompt_logprobs", params.prompt_logprobs, vocab_size),
        masked=params.grammar is not None,
    )


def _check_some_left(allowed: set[int]) -> None:
    if not allowed:
        raise InvalidParameter(
            "allowed_token_ids, without bad_words and, while min_tokens asks for more, without the tokens that end "
            "the text, leaves no token that could be sampled.",
            param="allowed_token_ids",
        )


def _bad_words(words: Iterable[tuple[int, ...]], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    checked = tuple(checked_token_ids("bad_words", word, vocab_size) for word in words if word)
    for word in checked:
        if len(word) > MAX_BAD_WORD_TOKENS:
            raise InvalidParameter(
                f"One of bad_words is {len(word)} tokens long; the limit is {MAX_BAD_WORD_TOKENS}.",
                param="bad_words",
            )
    return checked


def checked_token_ids(name: str, ids: Iterable[object], vocab_size: int) -> tuple[int, ...]:
    """Token ids of the model, or an error that names the parameter."""
    given = tuple(ids)
    plain = [token for token in given if type(token) is int]  # nearly always all of them: no check of each
    if len(plain) == len(given) and min(plain, default=0) >= 0 and max(plain, default=0) < vocab_size:
        return tuple(plain)
    checked = []
    for token in given:
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
            raise InvalidParameter(
                f"{name} has {shown(token)}, which is not a token id of this model (0 to {vocab_size - 1}).",
                param=name,
            )
        checked.append(int(token))
    return tuple(checked)


def _within_vocab(name: str, count: int | None, vocab_size: int) -> int | None:
    if count is not None and count > vocab_size:
        raise InvalidParameter(f"{name} is {count}, but the vocabulary has only {vocab_size} tokens.", param=name)
    return count


def _check_bad_words(words: Sequence[str] | None) -> None:
    check_list("bad_words", words, MAX_BAD_WORDS)
    check_strings("bad_words", words or (), MAX_BAD_WORD_CHARACTERS)
    num_characters = sum(map(len, words or ()))
    if num_characters > MAX_BAD_WORDS_CHARACTERS:
        raise InvalidParameter(
            f"bad_words has {num_characters} characters in total; the limit is {MAX_BAD_WORDS_CHARACTERS}.",
            param="bad_words",
        )


def _check_bias(values: object) -> None:
    if values is None:
        return
    if not isinstance(values, Mapping):
        raise InvalidParameter(f"logit_bias must map token ids to numbers, not be {shown(values)}.", param="logit_bias")
    check_count("logit_bias", values, MAX_LOGIT_BIAS)
    for bias in values.values():
        check_float("logit_bias", bias, -100.0, 100.0)


def _check_choosing(params: SamplingParams) -> None:
    """best_of and beams: their ranges, and the parameters that contradict them."""
    check_bool("use_beam_search", params.use_beam_search)
    check_float("length_penalty", params.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    if not isinstance(params.early_stopping, bool) and params.early_stopping != "never":
        raise InvalidParameter(
            f'early_stopping must be true, false or "never", not {shown(params.early_stopping)}.',
            param="early_stopping",
        )
    for name in ("best_of", "beam_width"):
        if getattr(params, name) is not None:
            check_int(name, getattr(params, name), params.n, MAX_SEQUENCES)
    if params.use_beam_search:
        _check_beams(params)
        return
    for name, usual in (("beam_width", None), ("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(params, name) != usual:
            raise InvalidParameter(f"{name} is for beam search only; set use_beam_search=True.", param=name)
    if params.greedy and params.chooses:
        raise InvalidParameter(
            f"best_of is {params.best_of}, but without a temperature all continuations are the same; use a "
            f"temperature above 0, or omit best_of.",
            param="best_of",
        )


def _check_beams(params: SamplingParams) -> None:
    if params.beam_width is not None and params.best_of not in (None, params.beam_width):
        raise InvalidParameter(
            f"best_of is {params.best_of} and beam_width is {params.beam_width}: with beam search both set the number "
            f"of beams; give one of them.",
            param="best_of",
        )
    if params.temperature not in (0.0, 1.0):
        raise InvalidParameter(
            f"temperature is {params.temperature}, but a beam search does not sample; omit it.",
            param="temperature",
        )
    for name, neutral in _NOT_WITH_BEAMS.items():
        if getattr(params, name) not in neutral:
            param = name.removesuffix("_strings")
            raise InvalidParameter(f"{param} cannot be combined with a beam search; omit it.", param=param)

"""What chat and completion bodies have in common: how to sample, on which terms, how to answer.

The names are those of `SamplingParams` and `Terms`, which check the ranges; the types are checked here.
"""

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from quire.server.bodies.legacy import Legacy

Json = Any  # whatever JSON can say

# Ranges are for whoever reads the schema: `SamplingParams` refuses with better words.
Count = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": 2**31 - 1})]
AtLeastOne = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": 128})]
Temperature = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 100})]
Share = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1})]
Penalty = Annotated[float, Meta(extra_json_schema={"minimum": -2, "maximum": 2})]
NumLogprobs = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": 100})]


class StreamOptions(Struct, kw_only=True):
    """What a stream tells besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class NamedSchema(Struct, kw_only=True):
    """A JSON schema and the name that OpenAI gives it."""

    name: str | None = None
    schema: Json = None


class ResponseFormat(Struct, kw_only=True):
    """OpenAI's way to ask for JSON."""

    type: str
    json_schema: NamedSchema | None = None
    schema: Json = None


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's way to ask for anything a grammar can say. Exactly one of the first five; the others are its options."""

    json: Json = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Json = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None


class SamplingBody(Legacy, kw_only=True):
    """Null means that nothing was said; unknown fields are let through."""

    model: str | None = None
    n: AtLeastOne | None = None
    best_of: AtLeastOne | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: int | None = None
    min_p: Share | None = None
    repetition_penalty: float | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    max_tokens: Count | UnsetType | None = UNSET
    min_tokens: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    use_beam_search: bool | None = None
    beam_width: AtLeastOne | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

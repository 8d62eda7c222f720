"""Request bodies of the OpenAI API, and the fields that other chat APIs share with it.

Field names are those of `SamplingParams` and `RequestOptions`, which check the ranges; the types are checked here.
Null means unset. Unknown fields are ignored, except in constraints.

Fields of other servers, and of older versions, that would change the output are refused by name (`Legacy`): silently
unconstrained output would be worse than an error.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Meta, Struct, UnsetType

from quire.core.errors import InvalidParameter

Json = Any  # any JSON value

Dimensions = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": 65536})]
TruncationSide = Annotated[str, Meta(extra_json_schema={"enum": ["left", "right"]})]
EncodingFormat = Annotated[str, Meta(extra_json_schema={"enum": ["float", "base64"]})]


class EmbeddingBody(Struct, kw_only=True):
    """The body of POST /v1/embeddings: one text or many, each as text or as token ids."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: EncodingFormat | None = None
    dimensions: Dimensions | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None


Refused = Annotated[Any, Meta(extra_json_schema={"deprecated": True})]
_EMPTY: tuple[object, ...] = ("", [])  # {} is a schema: any JSON

REPLACEMENTS: Mapping[str, str] = {
    "guided_json": 'use response_format, or structured_outputs: {"json": …}',
    "guided_regex": 'use structured_outputs: {"regex": …}',
    "guided_choice": 'use structured_outputs: {"choice": […]}',
    "guided_grammar": 'use structured_outputs: {"grammar": …}',
    "guided_json_object": 'use response_format: {"type": "json_object"}',
    "guided_decoding_backend": "omit it: the server chooses",
    "guided_whitespace_pattern": "omit it: the server chooses",
    "structural_tag": "use tools, or structured_outputs",
    "json_schema": 'use response_format: {"type": "json_schema", "json_schema": …}',
    "regex": 'use structured_outputs: {"regex": …}',
    "ebnf": 'use structured_outputs: {"grammar": …} with a Lark grammar',
    "grammar": 'use structured_outputs: {"grammar": …}',
    "functions": "use tools",
    "function_call": "use tool_choice",
    "suffix": "send the text that comes after as part of the prompt",
    "logits_processors": "use logit_bias, bad_words or allowed_token_ids",
    "custom_logit_processor": "use logit_bias, bad_words or allowed_token_ids",
    "format": "use response_format",
    "options": "send its fields in the body itself, under the names of this API",
    "modalities": "the output is text",
    "audio": "the output is text",
    "web_search_options": "pass a tool that searches",
    "prompt_embeds": "send text or token ids",
    "lora_path": "the server has one model",
    "n_predict": "use max_tokens",
    "max_new_tokens": "use max_tokens",
    "repeat_penalty": "use repetition_penalty",
    "stop_regex": "use stop",
    "no_stop_trim": "use include_stop_str_in_output",
    "typical_p": "use top_p or min_p",
    "mirostat": "use top_p or min_p",
    "xtc_probability": "use temperature",
    "dry_multiplier": "use repetition_penalty or frequency_penalty",
    "dynatemp_range": "use temperature",
}
_NO_EFFECT: Mapping[str, tuple[object, ...]] = {  # values that ask for nothing
    "function_call": ("none",), "modalities": (["text"],), "repeat_penalty": (1,), "typical_p": (1,),
    "mirostat": (0,), "xtc_probability": (0,), "dry_multiplier": (0,), "dynatemp_range": (0,),
}  # fmt: skip


class Legacy(Struct, kw_only=True):
    """Fields that are refused unless they are empty."""

    elsewhere: ClassVar[Mapping[str, str]] = {}  # fields of other bodies, and their replacement in this one
    served: ClassVar[tuple[str, ...]] = ()  # fields of these that this body reads

    guided_json: Refused = None
    guided_regex: Refused = None
    guided_choice: Refused = None
    guided_grammar: Refused = None
    guided_json_object: Refused = None
    guided_decoding_backend: Refused = None
    guided_whitespace_pattern: Refused = None
    structural_tag: Refused = None
    json_schema: Refused = None
    regex: Refused = None
    ebnf: Refused = None
    grammar: Refused = None
    functions: Refused = None
    function_call: Refused = None
    suffix: Refused = None
    logits_processors: Refused = None
    custom_logit_processor: Refused = None
    format: Refused = None
    options: Refused = None
    modalities: Refused = None
    audio: Refused = None
    web_search_options: Refused = None
    prompt_embeds: Refused = None
    lora_path: Refused = None
    n_predict: Refused = None
    max_new_tokens: Refused = None
    repeat_penalty: Refused = None
    stop_regex: Refused = None
    no_stop_trim: Refused = None
    typical_p: Refused = None
    mirostat: Refused = None
    xtc_probability: Refused = None
    dry_multiplier: Refused = None
    dynatemp_range: Refused = None


def refuse_legacy(body: Legacy) -> None:
    for name, instead in (*REPLACEMENTS.items(), *body.elsewhere.items()):
        value = getattr(body, name)
        if (
            name not in body.served
            and value is not None
            and value is not False
            and value not in (*_EMPTY, *_NO_EFFECT.get(name, ()))
        ):
            raise InvalidParameter(f"{name} is not served here; {instead}.", param=name)


# Ranges are documentation, for the OpenAPI schema: `SamplingParams` refuses with better messages.
Count = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": 2**31 - 1})]
AtLeastOne = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": 128})]
Temperature = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 100})]
Share = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1})]
Penalty = Annotated[float, Meta(extra_json_schema={"minimum": -2, "maximum": 2})]
NumLogprobs = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": 100})]


class StreamOptions(Struct, kw_only=True):
    """What a stream contains besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class NamedSchema(Struct, kw_only=True):
    """A JSON schema and the name that OpenAI gives it."""

    name: str | None = None
    schema: Json = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """OpenAI's constraint: JSON, optionally by a schema."""

    type: str
    json_schema: NamedSchema | None = None
    schema: Json = None


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's constraints. Exactly one of the first five fields; the others are options."""

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


class SharedBody(Legacy, kw_only=True):
    """The fields that all text APIs take under the names of chat completions."""

    model: str | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: int | None = None
    min_p: Share | None = None
    repetition_penalty: float | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    min_tokens: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None


_SHARED_FIELDS = tuple(name for name in SharedBody.__struct_fields__ if name not in Legacy.__struct_fields__)


def shared_fields(body: SharedBody) -> dict[str, Json]:
    """The fields of `SharedBody`, for a `ChatBody`."""
    return {name: getattr(body, name) for name in _SHARED_FIELDS}


class SamplingBody(SharedBody, kw_only=True):
    """Sampling parameters, request options and response options of chats and completions."""

    n: AtLeastOne | None = None
    best_of: AtLeastOne | None = None
    max_tokens: Count | UnsetType | None = UNSET
    skip_special_tokens: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    use_beam_search: bool | None = None
    beam_width: AtLeastOne | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None


class FunctionName(Struct, kw_only=True):
    """A function by name."""

    name: str


class AllowedTool(Struct, kw_only=True):
    """A tool by name."""

    function: FunctionName
    type: str = "function"


class AllowedTools(Struct, kw_only=True):
    """Which tools may be called, and whether one must be."""

    mode: str
    tools: list[AllowedTool]


class ChosenTools(Struct, kw_only=True):
    """tool_choice: one tool by name (type function), or a subset (allowed_tools)."""

    type: str = "function"
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class ChatBody(SamplingBody, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[dict[str, Json]]
    tools: list[dict[str, Json]] | None = None
    documents: list[Json] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tool_choice: str | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


class CompletionBody(SamplingBody, kw_only=True):
    """The body of POST /v1/completions: one prompt or many, each a text or a list of token ids."""

    served: ClassVar[tuple[str, ...]] = ("suffix",)

    prompt: str | list[str | int | list[int]]
    logprobs: NumLogprobs | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None


class TemplateBody(Struct, kw_only=True):
    """How a conversation is rendered: the fields of `ChatBody` that change it."""

    model: str | None = None
    tools: list[dict[str, Json]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    chat_template: str | None = None
    documents: list[Json] | None = None
    tool_choice: str | ChosenTools | None = None
    reasoning_effort: str | None = None


class ApplyTemplateBody(TemplateBody, kw_only=True):
    """The body of POST /apply-template: a conversation to render."""

    messages: list[dict[str, Json]]


class TokenizeBody(TemplateBody, kw_only=True):
    """The body of POST /tokenize: a text or a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Json]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None

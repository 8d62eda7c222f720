"""Generation request: sampling parameters, request options, grammar and response options of a body.

Also the list of prompts in a body, prompt truncation, and the clamp of max_tokens. Does not depend on text.
"""

from dataclasses import dataclass, fields, replace

from msgspec import UNSET

from quire.core.errors import ContextLengthExceeded, InvalidParameter, InvalidPrompt, shown
from quire.core.sampling import MAX_LOGPROBS, Grammar, SamplingParams, checked_token_ids
from quire.core.validation import check_count, check_int
from quire.engine.messages import RequestOptions
from quire.server.context import ServedModel
from quire.server.http.errors import rename_error_params
from quire.server.http.request_context import CURRENT_CONTEXT
from quire.server.request.schema import ChatBody, CompletionBody, SamplingBody
from quire.server.request.structured_output import RequestedGrammar, grammar_of, relaxed

_COMPLETION_TOKENS = 16  # OpenAI's default for completions

# Fields with the same name and meaning in a body and in `SamplingParams`.
_SAMPLING = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name in SamplingBody.__struct_fields__ and field.name not in ("best_of", "max_tokens", "grammar")
)
_TOKEN_IDS = ("stop_token_ids", "allowed_token_ids", "logit_bias")
_WARNING_CHARACTERS = 1000  # proxies accept at least 4 KiB of headers
_OPTIONS = ("priority", "cache_salt", "timeout_s")  # not the tenant, which follows from the API key


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for generation, without its prompt."""

    params: SamplingParams
    options: RequestOptions
    grammar: Grammar | None
    stream: bool
    is_strict: bool = False  # the schema of the answer is refused if part of it cannot be enforced
    not_enforced: tuple[str, ...] = ()  # keywords of that schema which the grammar leaves out
    grammar_field: str = "response_format"  # the body field that the grammar came from
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # logprobs name tokens by id
    keeps_start: bool = False  # a truncated prompt loses its end instead of its start
    without_tokens: bool = False  # only the prompt is evaluated: a generated token is dropped


def completion_generation(body: CompletionBody, model: ServedModel) -> GenerationRequest:
    """The request of a completion. max_tokens unset is OpenAI's 16; null is the rest of the context."""
    max_tokens = _COMPLETION_TOKENS if body.max_tokens is UNSET else body.max_tokens
    echoed = bool(body.echo) and body.logprobs is not None
    prompt_logprobs = body.logprobs if echoed and body.prompt_logprobs is None else body.prompt_logprobs
    if max_tokens == 0:
        return replace(_generation(body, model, 1, body.logprobs, prompt_logprobs), without_tokens=True)
    return _generation(body, model, max_tokens, body.logprobs, prompt_logprobs)


def chat_generation(body: ChatBody, model: ServedModel) -> GenerationRequest:
    """The request of a chat. max_tokens unset is the rest of the context."""
    max_tokens = None if body.max_tokens is UNSET else body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
    if body.top_logprobs and not body.logprobs:
        raise InvalidParameter("top_logprobs requires logprobs: true.", param="top_logprobs")
    if body.top_logprobs is not None:
        check_int("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
    return _generation(
        body, model, max_tokens, (body.top_logprobs or 0) if body.logprobs else None, body.prompt_logprobs
    )


def allow_minus_one(body: CompletionBody | ChatBody) -> None:
    """A limit of -1 means the rest of the context to clients of llama.cpp and LM Studio, which use OpenAI's routes."""
    if body.max_tokens == -1:
        body.max_tokens = None
    if isinstance(body, ChatBody) and body.max_completion_tokens == -1:
        body.max_tokens = body.max_completion_tokens = None


def _generation(
    body: SamplingBody, model: ServedModel, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> GenerationRequest:
    if body.best_of not in (None, body.n or 1):
        raise InvalidParameter(
            f"best_of is {body.best_of} and n is {body.n or 1}: every continuation that is computed is returned here, "
            f"so best_of must be omitted or equal n.",
            param="best_of",
        )
    stream = bool(body.stream)
    options = body.stream_options
    if options is not None and not stream:
        raise InvalidParameter("stream_options requires stream: true.", param="stream_options")
    if stream and body.prompt_logprobs is not None:
        raise InvalidParameter("prompt_logprobs cannot be streamed; ask without stream.", param="prompt_logprobs")
    defaults = SamplingParams() if body.use_beam_search else model.defaults  # beam search has no temperature
    params = {name: getattr(defaults, name) for name in _SAMPLING}
    params.update({name: value for name in _SAMPLING if (value := getattr(body, name)) is not None})
    params.update(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    request_options = {name: value for name in _OPTIONS if (value := getattr(body, name)) is not None}
    check_count("allowed_token_ids", body.allowed_token_ids or (), model.vocab_size)
    for name in _TOKEN_IDS:  # the engine checks them too, but ids beyond 64 bits cannot be sent to it
        checked_token_ids(name, getattr(body, name) or (), model.vocab_size)
    include_usage = options is not None and bool(options.include_usage)
    continuous = options is not None and bool(options.continuous_usage_stats)
    if continuous and not include_usage:
        raise InvalidParameter(
            "stream_options.continuous_usage_stats requires include_usage: true beside it.",
            param="stream_options.continuous_usage_stats",
        )
    requested = grammar_of(body)
    return GenerationRequest(
        params=SamplingParams(**params),
        options=RequestOptions(**request_options),
        grammar=requested.grammar,
        stream=stream,
        is_strict=requested.is_strict,
        grammar_field="response_format" if body.structured_outputs is None else "structured_outputs",
        include_usage=include_usage,
        continuous_usage=continuous,
        return_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        keeps_start=keeps_start(body.truncation_side),
    )


def relax_grammar(generation: GenerationRequest) -> GenerationRequest:
    """The request with what can be enforced of its schema. Slow for a large schema: call it on a thread."""
    grammar, _, not_enforced = relaxed(
        RequestedGrammar(generation.grammar, is_strict=generation.is_strict), generation.grammar_field
    )
    return replace(generation, grammar=grammar, not_enforced=not_enforced)


async def constrain(generation: GenerationRequest, model: ServedModel) -> GenerationRequest:
    """The request constrained by its own grammar."""
    if generation.grammar is None:
        return generation
    generation = await model.text_threads.run(relax_grammar, generation)
    return await apply_grammar(generation, generation.grammar, model)


async def apply_grammar(
    generation: GenerationRequest, grammar: Grammar | None, model: ServedModel, not_enforced: tuple[str, ...] = ()
) -> GenerationRequest:
    """The request constrained by a grammar, which is compiled first: an invalid one is refused here.

    What the grammar does not enforce, beside the request's own, is named in the warning of the response.
    """
    if grammar is None:
        return generation
    not_enforced = (*generation.not_enforced, *not_enforced)
    if not_enforced and (context := CURRENT_CONTEXT.get()) is not None:
        context.warning = _warning(not_enforced)
    field = "tools" if generation.grammar is None else generation.grammar_field
    if model.constrainer is None:
        raise InvalidParameter("The output of this model cannot be constrained.", param=field)
    with rename_error_params({"grammar": field}):
        if generation.grammar is not None:  # `grammar` may contain it: its own errors come first
            await model.constrainer.check(generation.grammar, field)
        if grammar != generation.grammar:
            await model.constrainer.check(grammar, "tools")
        return replace(generation, grammar=grammar, params=replace(generation.params, grammar=grammar))


def _warning(not_enforced: tuple[str, ...]) -> str:
    """The value of a header: ASCII, and short enough for every client."""
    num_shown, length = 0, 0
    while num_shown < len(not_enforced) and length < _WARNING_CHARACTERS:
        length += len(not_enforced[num_shown]) + 2
        num_shown += 1
    more = f" and {len(not_enforced) - num_shown} more" if num_shown < len(not_enforced) else ""
    return f"not enforced: {', '.join(not_enforced[:num_shown])[:_WARNING_CHARACTERS]}{more}"


def keeps_start(side: str | None) -> bool:
    """Whether truncation drops the end of a prompt, by the side that a body names."""
    if side not in (None, "left", "right"):
        raise InvalidParameter(
            f"truncation_side is {shown(side)}; it may be 'left' or 'right'.", param="truncation_side"
        )
    return side == "right"


def truncate_prompt(
    ids: list[int], truncate: int | None, generation: GenerationRequest, model: ServedModel
) -> list[int]:
    """The last `truncate` tokens of a prompt, or its first ones; with -1, as many as the context holds."""
    if truncate is None:
        return ids
    if truncate == -1:
        num_after = 0 if generation.without_tokens else generation.params.max_tokens or 1
        truncate = max(model.max_model_len - num_after, 1)
    if not 1 <= truncate <= model.max_model_len:
        raise InvalidParameter(
            f"truncate_prompt_tokens must be -1, or from 1 to {model.max_model_len}.", param="truncate_prompt_tokens"
        )
    return ids[:truncate] if generation.keeps_start else ids[-truncate:]


def clamp_max_tokens(generation: GenerationRequest, num_prompt: int, model: ServedModel) -> GenerationRequest:
    """The request with max_tokens reduced to the rest of the context, if it exceeds that. One token must fit."""
    if num_prompt >= model.max_model_len:  # the engine refuses it too, but when its stream is read
        raise ContextLengthExceeded(model.max_model_len, num_prompt, 1, param="messages")
    max_tokens = generation.params.max_tokens
    if max_tokens is None or num_prompt + max_tokens <= model.max_model_len:
        return generation
    return replace(generation, params=replace(generation.params, max_tokens=None))


def prompt_list(prompts: str | list[str | int | list[int]], *, param: str, most: int) -> list[str | list[int]]:
    """The prompts of a body: one text, one list of ids, or a list of these."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [[item for item in prompts if isinstance(item, int)]]
    many = [item for item in prompts if not isinstance(item, int)]
    if not many or len(many) != len(prompts):
        raise InvalidPrompt(
            f"{param} must be a text, a list of token ids, or a list of such; not empty, and ids not beside texts.",
            param=param,
        )
    if len(many) > most:
        raise InvalidPrompt(f"There are {len(many)} prompts; a request may bring {most}.", param=param)
    return many

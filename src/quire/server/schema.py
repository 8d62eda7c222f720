"""OpenAI-shaped bodies to prompts and sampling parameters, and outputs back to bodies."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from quire.core.errors import InvalidParameter, InvalidPrompt
from quire.core.sampling import SamplingParams
from quire.engine.front import Prompt

_SAMPLING = {field.name for field in fields(SamplingParams)} - {"logprobs", "prompt_logprobs"}
_COMPLETION_TOKENS = 16  # what OpenAI's completions give when nothing is said


@dataclass(frozen=True, slots=True)
class Wanted:
    """One call, read."""

    prompt: Prompt
    params: SamplingParams
    stream: bool
    include_usage: bool


def read_completion(body: object, defaults: SamplingParams) -> Wanted:
    fields_given = _mapping(body)
    prompt = fields_given.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(isinstance(i, int) for i in prompt)):
        return _wanted(fields_given, prompt, defaults, _COMPLETION_TOKENS)
    raise InvalidPrompt("prompt must be a text or a list of token ids.", param="prompt")


def read_chat(body: object, defaults: SamplingParams, prompt: Prompt) -> Wanted:
    return _wanted(_mapping(body), prompt, defaults, None)


def messages_of(body: object) -> list[Mapping[str, object]]:
    messages = _mapping(body).get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidPrompt("messages must be a list of at least one message.", param="messages")
    return messages


def _mapping(body: object) -> Mapping[str, object]:
    if not isinstance(body, Mapping):
        raise InvalidPrompt("The body must be a JSON object.")
    return body


def _wanted(body: Mapping[str, object], prompt: Prompt, defaults: SamplingParams, max_tokens: int | None) -> Wanted:
    said = {name: getattr(defaults, name) for name in _SAMPLING}
    said.update({name: body[name] for name in _SAMPLING & body.keys() if body[name] is not None})
    wanted_tokens = body.get("max_completion_tokens", body.get("max_tokens"))
    said["max_tokens"] = max_tokens if wanted_tokens is None else wanted_tokens
    if isinstance(said["logit_bias"], Mapping):
        said["logit_bias"] = _bias(said["logit_bias"])
    stream = body.get("stream") or False
    if not isinstance(stream, bool):
        raise InvalidParameter("stream must be true or false.", param="stream")
    options = body.get("stream_options") or {}
    include_usage = isinstance(options, Mapping) and options.get("include_usage") is True
    try:
        return Wanted(prompt, SamplingParams(**said), stream, include_usage)
    except (TypeError, AttributeError) as error:  # a list where a number belongs, and its like
        raise InvalidParameter(f"A parameter has the wrong type: {error}.") from error


def _bias(bias: Mapping[str, object]) -> dict[int, object]:
    """JSON's keys are strings."""
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError as error:
        raise InvalidParameter("The keys of logit_bias must be token ids.", param="logit_bias") from error

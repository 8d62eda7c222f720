"""Reads OpenAI-shaped bodies: prompts, sampling parameters, how to answer. Knows no engine and writes no answer."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from quire.core.errors import InvalidParameter, InvalidPrompt, ModelNotFound
from quire.core.sampling import SamplingParams
from quire.engine.front import Prompt
from quire.engine.terms import Terms

_SAMPLING = {field.name for field in fields(SamplingParams)} - {"logprobs", "prompt_logprobs"}
_COMPLETION_TOKENS = 16  # what OpenAI's completions give when nothing is said

# Each of these changes what a client gets back: better refused by name than left out in silence.
_NOT_SERVED = ("logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "tools", "functions", "response_format",
               "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")  # fmt: skip
_TERMS = {"priority", "cache_salt", "timeout_s"}  # the tenant is not the client's to say


@dataclass(frozen=True, slots=True)
class Wanted:
    """How one call wants to be answered."""

    params: SamplingParams
    terms: Terms
    stream: bool
    include_usage: bool


def fields_of(body: object, served: str) -> Mapping[str, object]:
    """The fields of a body that asks for the served model, and for nothing that is not served."""
    if not isinstance(body, Mapping):
        raise InvalidPrompt("The body must be a JSON object.")
    model = body.get("model")
    if model is not None and model != served:
        raise ModelNotFound(f"There is no model {model!r:.100} here; this server has {served!r}.", param="model")
    for name in _NOT_SERVED:
        value = body.get(name)
        if not (value is None or value is False or value in ("", [], {}) or _harmless(name, value, body)):
            raise InvalidParameter(f"{name} is not served here yet; leave it away.", param=name)
    return body


def prompt_of(body: Mapping[str, object]) -> Prompt:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(isinstance(i, int) for i in prompt)):
        return prompt
    raise InvalidPrompt("prompt must be one text or one list of token ids.", param="prompt")


def messages_of(body: Mapping[str, object]) -> list[Mapping[str, object]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidPrompt("messages must be a list of at least one message.", param="messages")
    return messages


def read_completion(body: Mapping[str, object], defaults: SamplingParams) -> Wanted:
    return _wanted(body, defaults, _COMPLETION_TOKENS)


def read_chat(body: Mapping[str, object], defaults: SamplingParams) -> Wanted:
    return _wanted(body, defaults, None)


def _wanted(body: Mapping[str, object], defaults: SamplingParams, max_tokens: int | None) -> Wanted:
    searching = _flag(body, "use_beam_search")  # where the makers' temperature has no meaning
    said = {name: getattr(SamplingParams() if searching else defaults, name) for name in _SAMPLING}
    said["max_tokens"] = max_tokens
    said.update({name: body[name] for name in _SAMPLING & body.keys() if body[name] is not None})
    if body.get("max_completion_tokens") is not None:
        said["max_tokens"] = body["max_completion_tokens"]
    if isinstance(said["logit_bias"], Mapping):
        said["logit_bias"] = _bias(said["logit_bias"])
    stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options is not None and not (stream and isinstance(options, Mapping)):
        raise InvalidParameter("stream_options is an object, and only for stream: true.", param="stream_options")
    include_usage = _flag(options, "include_usage") if isinstance(options, Mapping) else False
    terms = {name: body[name] for name in _TERMS & body.keys() if body[name] is not None}
    try:
        return Wanted(SamplingParams(**said), Terms(**terms), stream, include_usage)  # type: ignore[arg-type]
    except (TypeError, AttributeError) as error:  # a list where a number belongs, and its like
        raise InvalidParameter(f"A parameter has the wrong type: {error}.") from error


def _harmless(name: str, value: object, body: Mapping[str, object]) -> bool:
    """A field that is not served, said in a way that asks for nothing."""
    return (name == "response_format" and value == {"type": "text"}) or (
        name == "tools" and body.get("tool_choice") == "none"
    )


def _flag(body: Mapping[str, object], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidParameter(f"{name} must be true or false, not {value!r:.100}.", param=name)
    return bool(value)


def _bias(bias: Mapping[str, object]) -> dict[int, object]:
    """JSON's keys are strings."""
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError as error:
        raise InvalidParameter("The keys of logit_bias must be token ids.", param="logit_bias") from error

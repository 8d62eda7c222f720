"""What a client of text-generation-inference asks for, as a completion. What is not served is refused by its name."""

from quire.core.errors import InvalidParameter, shown
from quire.server.bodies.completion import CompletionBody
from quire.server.bodies.sampling import StructuredOutputs
from quire.server.bodies.tgi import GenerateBody, TgiGrammar, TgiParameters

NAMES = {
    "messages": "inputs",
    "prompt": "inputs",
    "max_tokens": "max_new_tokens",
    "logprobs": "top_n_tokens",
    "truncate_prompt_tokens": "truncate",
    "structured_outputs": "grammar",
    "structured_outputs.json": "grammar.value",
    "structured_outputs.regex": "grammar.value",
}
NUM_TOKENS = 100  # when nothing is said


def as_completion(body: GenerateBody, *, stream: bool) -> CompletionBody:
    """The same question to /v1/completions. Every token is told with its score where tokens are told."""
    said = body.parameters or TgiParameters()
    _check(said, stream=stream)
    chance = said.do_sample or any(each is not None for each in (said.temperature, said.top_k, said.top_p))
    return CompletionBody(
        prompt=body.inputs,
        stream=stream,
        max_tokens=NUM_TOKENS if said.max_new_tokens is None else said.max_new_tokens,
        temperature=said.temperature if chance else 0.0,
        top_k=said.top_k,
        top_p=said.top_p,
        repetition_penalty=said.repetition_penalty,
        frequency_penalty=said.frequency_penalty,
        stop=said.stop,
        seed=said.seed,
        truncate_prompt_tokens=said.truncate,
        logprobs=(said.top_n_tokens or 0) if stream or said.details else None,
        prompt_logprobs=0 if said.details and said.decoder_input_details else None,
        structured_outputs=None if said.grammar is None else _structured(said.grammar),
    )


def _check(said: TgiParameters, *, stream: bool) -> None:
    refused = {
        "best_of": said.best_of not in (None, 1),
        "typical_p": said.typical_p not in (None, 1.0),
        "watermark": bool(said.watermark),
        "adapter_id": said.adapter_id is not None,
        "decoder_input_details": stream and bool(said.decoder_input_details),
    }
    for name, wanted in refused.items():
        if wanted:
            where = " in a stream" if name == "decoder_input_details" else ""
            raise InvalidParameter(f"{name} is not served here{where}; leave it away.", param=name)
    if said.max_new_tokens == 0:
        raise InvalidParameter("max_new_tokens must be at least 1, not 0.", param="max_new_tokens")


def _structured(grammar: TgiGrammar) -> StructuredOutputs:
    value = grammar.value
    match grammar.type:
        case "json" if value is not None:
            return StructuredOutputs(json=value)
        case "json_schema" if isinstance(value, dict) and value.get("schema") is not None:
            return StructuredOutputs(json=value["schema"])
        case "regex" if isinstance(value, str):
            return StructuredOutputs(regex=value)
    raise InvalidParameter(
        f"grammar.type is {shown(grammar.type)} and grammar.value is {shown(value)}; it may be 'json' with a schema, "
        f"'json_schema' with {{\"schema\": …}}, or 'regex' with a text.",
        param="grammar",
    )

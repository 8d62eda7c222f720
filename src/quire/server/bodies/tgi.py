"""The body of /generate and its like: what clients of text-generation-inference send."""

from msgspec import Struct

from quire.server.bodies.sampling import Count, Json, Penalty, Share, Temperature


class TgiGrammar(Struct, kw_only=True):
    """What an answer may say: a JSON schema, or a regular expression."""

    type: str
    value: Json = None


class TgiParameters(Struct, kw_only=True):
    """How to sample, and what to tell besides text. Null means that nothing was said."""

    max_new_tokens: Count | None = None
    do_sample: bool | None = None
    temperature: Temperature | None = None
    top_k: int | None = None
    top_p: Share | None = None
    typical_p: Share | None = None
    repetition_penalty: float | None = None
    frequency_penalty: Penalty | None = None
    stop: list[str] | None = None
    seed: int | None = None
    truncate: int | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    best_of: int | None = None
    top_n_tokens: Count | None = None
    watermark: bool | None = None
    grammar: TgiGrammar | None = None
    adapter_id: str | None = None


class GenerateBody(Struct, kw_only=True):
    """A text that is to go on."""

    inputs: str
    parameters: TgiParameters | None = None
    stream: bool | None = None

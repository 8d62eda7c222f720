"""The body of POST /v1/completions."""

from quire.server.bodies.sampling import NumLogprobs, SamplingBody


class CompletionBody(SamplingBody, kw_only=True):
    """One prompt or many, each a text or a list of token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: NumLogprobs | None = None
    add_special_tokens: bool | None = None

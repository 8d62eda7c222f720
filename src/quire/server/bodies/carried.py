"""What every chat-like body takes by chat's own names: how to sample, and on which terms."""

from msgspec import Struct

from quire.server.bodies.legacy import Legacy
from quire.server.bodies.sampling import Count, Json, Penalty, Share, StructuredOutputs, Temperature


class CarriedBody(Legacy, kw_only=True):
    """Null means that nothing was said; unknown fields are let through."""

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
    chat_template_kwargs: dict[str, Json] | None = None


_NAMES = tuple(name for name in CarriedBody.__struct_fields__ if name not in Legacy.__struct_fields__)


def carried(body: Struct) -> dict[str, Json]:
    """Those fields, for a body of another kind."""
    return {name: getattr(body, name) for name in _NAMES}

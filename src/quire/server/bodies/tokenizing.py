"""The bodies of /tokenize, /detokenize and /apply-template."""

from msgspec import Struct

from quire.server.bodies.sampling import Json


class ApplyTemplateBody(Struct, kw_only=True):
    """A conversation whose text is wanted."""

    messages: list[dict[str, Json]]
    model: str | None = None
    tools: list[dict[str, Json]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Json] | None = None


class TokenizeBody(Struct, kw_only=True):
    """A text, or a conversation, whose tokens are wanted."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Json]] | None = None
    tools: list[dict[str, Json]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, kw_only=True):
    """Tokens whose text is wanted."""

    tokens: list[int]
    model: str | None = None

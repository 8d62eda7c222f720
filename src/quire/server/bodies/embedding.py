"""The body of POST /v1/embeddings."""

from typing import Annotated

from msgspec import Meta, Struct

Dimensions = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": 65536})]
EncodingFormat = Annotated[str, Meta(extra_json_schema={"enum": ["float", "base64"]})]


class EmbeddingBody(Struct, kw_only=True):
    """One text or many, each as it is or as token ids. Unknown fields are let through."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: EncodingFormat | None = None
    dimensions: Dimensions | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None

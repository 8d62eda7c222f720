"""The body of POST /v1/responses."""

from collections.abc import Mapping
from typing import ClassVar

from msgspec import Struct

from quire.server.bodies.carried import CarriedBody
from quire.server.bodies.legacy import Refused
from quire.server.bodies.sampling import Count, Json, NumLogprobs


class TextFormat(Struct, kw_only=True):
    """What shape the text has: free, JSON, or JSON after a schema."""

    type: str
    name: str | None = None
    schema: Json = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, kw_only=True):
    """About the text of an answer."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Struct, kw_only=True):
    """How much a model is to think, and what it tells of it."""

    effort: str | None = None
    summary: str | None = None


class ResponsesBody(CarriedBody, kw_only=True):
    """A turn that is wanted, after a text or a row of items."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "response_format": "use text.format",
        "max_tokens": "use max_output_tokens",
        "max_completion_tokens": "use max_output_tokens",
    }

    input: str | list[dict[str, Json]]
    instructions: str | None = None
    tools: list[dict[str, Json]] | None = None
    tool_choice: str | dict[str, Json] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    reasoning: Reasoning | None = None
    truncation: str | None = None
    include: Json = None
    top_logprobs: NumLogprobs | None = None
    metadata: dict[str, Json] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    previous_response_id: str | None = None
    conversation: Json = None
    prompt: Json = None
    background: bool | None = None
    response_format: Refused = None
    max_tokens: Refused = None
    max_completion_tokens: Refused = None

"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Mapping
from typing import ClassVar

from msgspec import Struct

from quire.server.bodies.carried import CarriedBody
from quire.server.bodies.legacy import Refused
from quire.server.bodies.sampling import Count, Json

Block = dict[str, Json]


class AnthropicMessage(Struct, kw_only=True):
    """Who said what: a text, or blocks of it."""

    role: str
    content: str | list[Block]


class AnthropicTool(Struct, kw_only=True):
    """A tool of the client's. Those that Anthropic runs have a type of their own and no schema."""

    name: str | None = None
    description: str | None = None
    input_schema: Json = None
    type: str | None = None


class AnthropicToolChoice(Struct, kw_only=True):
    """Whether tools may (auto), must (any), must not (none) be called, or which one (tool)."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    """Whether the model is to think first."""

    type: str


class OutputFormat(Struct, kw_only=True):
    """The schema of an answer."""

    type: str
    schema: Json = None


class OutputConfig(Struct, kw_only=True):
    """How hard to try, and in which shape to answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensBody(CarriedBody, kw_only=True):
    """A conversation as Anthropic's clients tell it."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "response_format": "use output_config.format",
        "output_format": "use output_config.format",
    }

    messages: list[AnthropicMessage]
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    response_format: Refused = None
    output_format: Refused = None


class MessagesBody(CountTokensBody, kw_only=True):
    """One that is to go on."""

    max_tokens: Count
    stop_sequences: list[str] | None = None

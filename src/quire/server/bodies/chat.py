"""The body of POST /v1/chat/completions."""

from msgspec import Struct

from quire.server.bodies.sampling import Count, Json, NumLogprobs, SamplingBody


class FunctionName(Struct, kw_only=True):
    """Which function is meant."""

    name: str


class AllowedTool(Struct, kw_only=True):
    """One of the tools, by its name."""

    function: FunctionName
    type: str = "function"


class AllowedTools(Struct, kw_only=True):
    """Which tools may be called, and whether one must be."""

    mode: str
    tools: list[AllowedTool]


class ChosenTools(Struct, kw_only=True):
    """The choice of one tool by its name (type function), or of some of them (allowed_tools)."""

    type: str = "function"
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class ChatBody(SamplingBody, kw_only=True):
    """A conversation that is to go on."""

    messages: list[dict[str, Json]]
    tools: list[dict[str, Json]] | None = None
    documents: list[Json] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tool_choice: str | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

"""Fields of other servers and other years that would change what a client gets, and what took their place.

Whoever sends one is told, by name: an answer that is silently unconstrained would be worse than none.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from quire.core.errors import InvalidParameter

_Legacy = Annotated[Any, Meta(extra_json_schema={"deprecated": True})]

REPLACEMENTS: Mapping[str, str] = {
    "guided_json": 'use response_format, or structured_outputs: {"json": …}',
    "guided_regex": 'use structured_outputs: {"regex": …}',
    "guided_choice": 'use structured_outputs: {"choice": […]}',
    "guided_grammar": 'use structured_outputs: {"grammar": …}',
    "guided_json_object": 'use response_format: {"type": "json_object"}',
    "guided_decoding_backend": "leave it away: the server chooses",
    "guided_whitespace_pattern": "leave it away: the server chooses",
    "structural_tag": "use tools, or structured_outputs",
    "json_schema": 'use response_format: {"type": "json_schema", "json_schema": …}',
    "regex": 'use structured_outputs: {"regex": …}',
    "ebnf": 'use structured_outputs: {"grammar": …} with a Lark grammar',
    "grammar": 'use structured_outputs: {"grammar": …}',
    "functions": "use tools",
    "function_call": "use tool_choice",
    "suffix": "send the text that comes after as part of the prompt",
    "logits_processors": "use logit_bias, bad_words or allowed_token_ids",
}


class Legacy(Struct, kw_only=True):
    """Known, and refused unless they ask for nothing."""

    guided_json: _Legacy = None
    guided_regex: _Legacy = None
    guided_choice: _Legacy = None
    guided_grammar: _Legacy = None
    guided_json_object: _Legacy = None
    guided_decoding_backend: _Legacy = None
    guided_whitespace_pattern: _Legacy = None
    structural_tag: _Legacy = None
    json_schema: _Legacy = None
    regex: _Legacy = None
    ebnf: _Legacy = None
    grammar: _Legacy = None
    functions: _Legacy = None
    function_call: _Legacy = None
    suffix: _Legacy = None
    logits_processors: _Legacy = None


def refuse_legacy(body: Legacy) -> None:
    for name, instead in REPLACEMENTS.items():
        value = getattr(body, name)
        if value not in (None, False, "", []):  # {} is a schema: any JSON
            raise InvalidParameter(f"{name} is not served here; {instead}.", param=name)

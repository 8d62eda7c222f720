"""Fields of other servers and other years that would change what a client gets, and what took their place.

Whoever sends one is told, by name: an answer that is silently unconstrained would be worse than none.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from quire.core.errors import InvalidParameter

Refused = Annotated[Any, Meta(extra_json_schema={"deprecated": True})]
_NOTHING: tuple[object, ...] = ("", [])  # {} is a schema: any JSON

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

    elsewhere: ClassVar[Mapping[str, str]] = {}  # fields of other bodies alone, and what they are called in this one

    guided_json: Refused = None
    guided_regex: Refused = None
    guided_choice: Refused = None
    guided_grammar: Refused = None
    guided_json_object: Refused = None
    guided_decoding_backend: Refused = None
    guided_whitespace_pattern: Refused = None
    structural_tag: Refused = None
    json_schema: Refused = None
    regex: Refused = None
    ebnf: Refused = None
    grammar: Refused = None
    functions: Refused = None
    function_call: Refused = None
    suffix: Refused = None
    logits_processors: Refused = None


def refuse_legacy(body: Legacy) -> None:
    for name, instead in (*REPLACEMENTS.items(), *body.elsewhere.items()):
        value = getattr(body, name)
        if name == "function_call" and value == "none":
            continue  # no call is wanted, and without functions none could come
        if value is not None and value is not False and value not in _NOTHING:
            raise InvalidParameter(f"{name} is not served here; {instead}.", param=name)

"""Converts a client's constraint (JSON schema, regex, choices, Lark) to a Lark grammar, within limits."""

import json
import re
from typing import NamedTuple

from llguidance import regex_to_lark

from quire.core.errors import InvalidGrammar, shown
from quire.core.sampling import Grammar, GrammarKind
from quire.grammar import limits
from quire.grammar.json_schema import check_schema, read_schema

# Whitespace allowed in JSON: one or two blanks, or one line break and its indentation, as models write it, compact or
# pretty-printed. Without a bound a model may emit blanks until max_tokens.
_WHITESPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,32}"
# Without \u: a name under `properties` could otherwise be repeated, in escaped form, as an additional property.
_JSON_STYLE = {"whitespace_pattern": _WHITESPACE, "json_allowed_escapes": 'nrbtf\\"'}

# Forced text is not tokenized ahead: `a{1000000}` took one second per mask, and the tokenization of a text is left to
# the model. Appended at the end, so that line numbers in errors match the client's text.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_NO_OPTIONS = re.compile(r"\A\s*%llguidance\s*\{\s*\}")
_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
# What makes a Lark grammar deep or its parser's rows long: rules, groups, optional and repeated parts.
_PARTS = "\n([{?*"
_WORD = re.compile(r"[\w-]+")

_ANY_OBJECT: dict[str, object] = {"type": "object"}


class GrammarSource(NamedTuple):
    """Input of llguidance's compiler."""

    text: str
    step_items: int  # limit of parser items for one mask


def lark_source(grammar: Grammar) -> GrammarSource:
    """Convert to Lark. Raises InvalidGrammar."""
    if any(0xD800 <= ord(letter) <= 0xDFFF for letter in grammar.text):
        raise InvalidGrammar("The grammar has a lone surrogate, half a character. Send valid Unicode.")
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            body = f"start: {_json_part(_ANY_OBJECT)}"
        case GrammarKind.JSON_SCHEMA:
            body = f"start: {_json_part(read_schema(grammar.text))}"
        case GrammarKind.REGEX:
            body = f"start: /{_checked_regex(grammar.text)}/"
        case GrammarKind.CHOICE:
            body = "start: " + " | ".join(json.dumps(choice) for choice in _choices(grammar.text))
        case GrammarKind.LARK:
            body = _checked_lark(grammar.text)
    has_schema = grammar.kind in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA) or bool(_EMBEDDED.search(body))
    return GrammarSource(body + _OPTIONS, limits.STEP_ITEMS if has_schema else limits.LARK_STEP_ITEMS)


def _json_part(schema: dict[str, object]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _JSON_STYLE})


def _checked_regex(text: str) -> str:
    _check_bytes("regular expression", text, limits.REGEX_BYTES)
    num_backslashes = len(text) - len(text.rstrip("\\"))
    if num_backslashes % 2:
        raise InvalidGrammar("The regular expression ends in a backslash that escapes nothing.")
    return regex_to_lark(text, "dw")  # \d and \w are ASCII, as in JavaScript: no digit that int() may not parse


def _choices(text: str) -> list[str]:
    _check_bytes("list of choices", text, limits.CHOICE_BYTES)
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar("The choices must be a JSON list of texts.") from error
    if not isinstance(listed, list) or not listed:
        raise InvalidGrammar(f"The choices must be a list of at least one text, not {shown(listed)}.")
    if len(listed) > limits.NUM_CHOICES:
        raise InvalidGrammar(f"There are {len(listed)} choices; the limit is {limits.NUM_CHOICES}.")
    for choice in listed:
        if not isinstance(choice, str) or not choice:
            raise InvalidGrammar(f"A choice must be a non-empty text, not {shown(choice)}.")
    return listed


def _checked_lark(text: str) -> str:
    """A Lark grammar whose embedded JSON schemas are validated like standalone ones."""
    _check_bytes("grammar", text, limits.LARK_BYTES)
    text = _NO_OPTIONS.sub("", text)
    if text.lstrip().startswith("{"):
        raise InvalidGrammar("The grammar must be a Lark grammar with a rule named start, not a JSON object.")
    if _GBNF.search(text):
        raise InvalidGrammar('The grammar is in GBNF or EBNF (::=); write it in Lark\'s syntax: start: "yes" | "no".')
    if "%llguidance" in text:
        raise InvalidGrammar("%llguidance options are set by the server; omit that line.")
    pieces: list[str] = []
    own: list[str] = []  # the pieces outside the schemas
    begin = 0
    embedded = list(_EMBEDDED.finditer(text))
    if len(embedded) > limits.LARK_SCHEMAS:
        raise InvalidGrammar(f"The grammar has {len(embedded)} %json parts; the limit is {limits.LARK_SCHEMAS}.")
    for found in embedded:
        if found.start() < begin:
            continue  # inside the previous schema
        try:
            schema, end = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise InvalidGrammar(f"After %json at character {found.start()} there is no JSON schema.") from error
        own.append(text[begin : found.start()])
        pieces += [own[-1], _json_part(check_schema(schema))]
        begin = end
    own.append(text[begin:])
    _check_own("\n".join(own))
    return "".join([*pieces, own[-1]])


def _check_own(text: str) -> None:
    """Limits of the text outside the schemas. Strings and comments count too, as only the compiler can tell them."""
    _check_bytes("grammar without its %json parts", text, limits.LARK_OWN_BYTES)
    num_parts = sum(text.count(sign) for sign in _PARTS)
    if num_parts > limits.LARK_PARTS:
        raise InvalidGrammar(
            f"The grammar has {num_parts} lines and characters ( [ {{ ? * in total; the limit is {limits.LARK_PARTS}. "
            f"Use fewer rules, groups and optional parts; one rule with * or {{…}} may replace many."
        )
    num_words = len(_WORD.findall(text))
    if num_words > limits.LARK_WORDS:
        raise InvalidGrammar(f"The grammar has {num_words} words; the limit is {limits.LARK_WORDS}. Make it smaller.")
    num_intersections = text.count("&")
    if num_intersections > limits.LARK_INTERSECTIONS:
        raise InvalidGrammar(
            f"The grammar has {num_intersections} & signs; the limit is {limits.LARK_INTERSECTIONS}. "
            f'Intersect fewer patterns, and write "\\u0026" for the sign in a string.'
        )


def _check_bytes(what: str, text: str, max_bytes: int) -> None:
    num_bytes = len(text.encode("utf-8"))
    if num_bytes > max_bytes:
        raise InvalidGrammar(f"The {what} is {num_bytes} bytes long; the limit is {max_bytes}. Shorten it.")

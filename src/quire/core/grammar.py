"""What a continuation may say, as it crosses the bridge's doors: a kind and a text. Knows no way to read either."""

from dataclasses import dataclass
from enum import Enum


class GrammarKind(Enum):
    """How the text of a grammar is to be read. The values are what the wire carries."""

    JSON_OBJECT = "json_object"  # any JSON object; the text is empty
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of the texts to choose from
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on one continuation."""

    kind: GrammarKind
    text: str

"""Names: one name for one thing, in words of the field. The words that are ours stand in docs/words.md."""

import ast
import re
from collections import Counter
from collections.abc import Iterator

from tests.architecture.tree import ROOT, SOURCE, label, nodes, source_files, syntax

FIELD_WORDS = frozenset((ROOT / "tests" / "architecture" / "field_words.txt").read_text().split())
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ROW = re.compile(r"^\| ([^|]+) \|", re.MULTILINE)
_PEOPLE = re.compile(r"\b(whoever|somebody|someone|nobody|everybody|everyone|anybody|anyone)\b", re.IGNORECASE)
# Metaphors that once named machinery. As parts of an identifier they mean that a name of the field was not looked for.
_METAPHORS = {
    "books", "chorus", "coast", "cornered", "cruise", "cruising", "desk", "dialogue", "feeding", "forest",
    "gatekeeping", "ghost", "ghosts", "grains", "guise", "inquest", "landing", "leaders", "nobody", "regrets",
    "rehearsal", "rehearse", "seat", "seated", "seating", "seats", "sitter", "stalls", "stance", "tethered",
    "turnstile", "visit", "voice", "voices", "witness",
}  # fmt: skip
_KEPT = {
    "seated_s": "a field of RequestMetrics, which callers read",
    "visit_For": "jinja2 calls it",
    "visit_Concat": "jinja2 calls it",
}
# Phrases that once told machinery as a story, or that say a limit or a refusal in a roundabout way. In texts only.
_DIALECT = re.compile(
    r"\b(chorus|inquest|rehears\w*|sitter|tethered|turnstile|towers?|seats?|seated|stances?|hung up|mend|for ever"
    r"|so many|told|are the most|the most is|at the least|knows (nothing|no|neither)"
    r"|(?<!there )(is|are) no (?!longer|more|smaller|larger|sooner)\w+)\b",
    re.IGNORECASE,
)
_KEPT_VALUES = {
    "seats": "a value of WaitCause, which clients read",
    "seated": "a value of EventKind, which clients read",
    "stance": "a key of journals",
    "stances": "a key of the JSON that `quire bench regimes` prints",
}
_KEPT_LINES = {'UNAUTHENTICATED = Identity("nobody"': "a value in logs"}


def words(name: str) -> list[str]:
    """`kv_store` and `KvStore` as their words."""
    return [word.lower() for word in _WORD.findall(name)]


def classes(tree: ast.Module) -> list[str]:
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def own_words() -> set[str]:
    """The words of docs/words.md."""
    return {word for cell in _ROW.findall((ROOT / "docs" / "words.md").read_text()) for word in words(cell)}


def names_of_modules_and_classes() -> Iterator[tuple[str, str]]:
    """Each name, and where it stands."""
    for path in source_files():
        for part in path.relative_to(SOURCE).with_suffix("").parts:
            if not part.startswith("__"):
                yield part, label(path)
        for name in classes(syntax(path)):
            if not name.startswith("_"):
                yield name, label(path)


def identifiers(tree: ast.Module) -> set[str]:
    """What a file defines or binds: classes, functions, arguments, variables and attributes."""
    found: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The string literals of a file, docstrings included, each with its line."""
    for node in nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, " ".join(node.value.split())


def test_a_class_name_is_used_once() -> None:
    used = Counter(name for path in source_files() for name in classes(syntax(path)))
    assert not {name for name, count in used.items() if count > 1}


def test_modules_and_classes_are_named_in_words_of_the_field() -> None:
    known = FIELD_WORDS | own_words()
    unknown = {(name, where) for name, where in names_of_modules_and_classes() if not set(words(name)) <= known}
    assert not unknown, "choose a word of the field, or add it to field_words.txt, or define it in docs/words.md"


def test_field_words_are_in_use() -> None:
    """A word that no name uses any more goes, so that the list stays what a reader has to know."""
    used = {word for name, _ in names_of_modules_and_classes() for word in words(name)}
    assert not FIELD_WORDS - used


def test_no_identifier_is_a_metaphor() -> None:
    found = {
        f"{label(path)}: {name}"
        for path in source_files()
        for name in identifiers(syntax(path))
        if _METAPHORS & set(words(name)) and name not in _KEPT
    }
    assert not found


def test_no_text_speaks_of_persons() -> None:
    found = {
        f"{label(path)}:{number}"
        for path in source_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if _PEOPLE.search(line) and not line.startswith(tuple(_KEPT_LINES))
    }
    assert not found


def test_texts_are_in_plain_terms() -> None:
    """Docstrings, messages, help and log texts."""
    found = {
        f"{label(path)}:{number}: {match[0]}"
        for path in source_files()
        for number, text in texts(syntax(path))
        if text not in _KEPT_VALUES and (match := _DIALECT.search(text))
    }
    assert not found


def test_names_are_split_into_words() -> None:
    assert words("kv_store") == words("KvStore") == ["kv", "store"]
    assert words("LLMServer2") == ["llm", "server", "2"]
    assert identifiers(ast.parse("def seat(x): self.books = y = 1")) == {"seat", "x", "books", "y"}
    assert list(texts(ast.parse('x = "one\\n two", f"three {x}"'))) == [(1, "one two"), (1, "three")]

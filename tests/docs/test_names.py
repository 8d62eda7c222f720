"""Files, modules and classes that documents name exist under those names."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import HISTORY, PAGES, ROOT, name_of, prose

SOURCE = ROOT / "src" / "quire"
CURRENT = [page for page in PAGES if page not in HISTORY]
# Pages about the code: a class name there is one of ours, or one of these.
ABOUT_CODE = ["CONTRIBUTING.md", "docs/architecture.md", "docs/attention.md", "docs/reading.md", "docs/scheduling.md",
              "docs/security.md", "docs/server.md", "docs/words.md"]  # fmt: skip
FOREIGN = {"NamedTuple", "BatchDecodeWithPagedKVCacheWrapper", "Origin"}

_FILE = re.compile(r"`((?:[A-Za-z_.-]+/)*[A-Za-z_0-9.-]+\.py)`")
_FOLDER = re.compile(r"`((?:[a-z_]+/)+)`")
_TEST_FOLDER = re.compile(r"`(tests/[a-z_/]+)`")
_DOCUMENT = re.compile(r"`(docs/[\w./-]+)`")
_MODULE = re.compile(r"\bquire((?:\.[a-z_]+)+)")
_CLASS = re.compile(r"`([A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*)`")


@cache
def our_paths() -> frozenset[str]:
    """Everything below src/quire, tests and the root's own folders, by every ending of its path."""
    endings = set()
    for top in ("src", "tests", "examples", "deploy", "docs"):
        for path in (ROOT / top, *(ROOT / top).rglob("*")):
            if "__pycache__" in path.parts:
                continue
            parts = path.relative_to(ROOT).parts
            endings |= {"/".join(parts[start:]) for start in range(len(parts))}
    return frozenset(endings)


@cache
def our_classes() -> frozenset[str]:
    return frozenset(
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_the_files_and_folders_a_page_names_exist(page: Path) -> None:
    text = prose(page)
    named = {
        *_FILE.findall(text),
        *(folder.rstrip("/") for folder in _FOLDER.findall(text)),
        *_TEST_FOLDER.findall(text),
    }
    named |= set(re.findall(r"`(docs/[\w./-]+)`", text))
    assert {name for name in named if name.rstrip("/") not in our_paths()} == set()


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_the_modules_a_page_names_exist(page: Path) -> None:
    for dotted in _MODULE.findall(page.read_text(encoding="utf-8")):
        if dotted.endswith((".json", ".yaml", ".service", ".conf", ".toml")):
            continue
        path = SOURCE.joinpath(*dotted.strip(".").split("."))
        file = path.parent.with_suffix(".py")
        is_function = file.is_file() and f"\ndef {path.name}(" in file.read_text(encoding="utf-8")
        assert path.is_dir() or path.with_suffix(".py").is_file() or is_function, f"quire{dotted}"


@pytest.mark.parametrize("page", ABOUT_CODE)
def test_the_classes_a_page_names_exist(page: str) -> None:
    named = set(_CLASS.findall(prose(ROOT / page)))
    assert named - our_classes() - FOREIGN == set()


@pytest.mark.parametrize("page", ABOUT_CODE)
def test_a_class_is_defined_in_the_file_named_beside_it(page: str) -> None:
    for name, file in re.findall(r"`([A-Z]\w+)`,? (?:in |\()`([a-z_/]+\.py)`", prose(ROOT / page)):
        assert re.search(rf"^class {name}\b", (SOURCE / file).read_text(encoding="utf-8"), re.MULTILINE), (name, file)


def test_the_documents_that_the_source_cites_exist() -> None:
    cited = {
        (name_of(path), cited)
        for path in SOURCE.rglob("*.py")
        for cited in re.findall(r"\bdocs/[\w./-]*\w", path.read_text(encoding="utf-8"))
    }
    assert {each for each in cited if not (ROOT / each[1]).exists()} == set()


def test_the_reading_list_has_as_many_files_and_lines_as_it_says() -> None:
    text = (ROOT / "docs" / "reading.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `([a-z_/]+\.py)` \|", text, re.MULTILINE)
    claim = re.search(r"(\d+) files and some ([\d,]+) lines", text)
    assert claim is not None
    files, lines = int(claim[1]), int(claim[2].replace(",", ""))
    assert [int(number) for number, _ in rows] == list(range(1, files + 1))
    counted = {path: len((SOURCE / path).read_text(encoding="utf-8").splitlines()) for _, path in rows}
    assert abs(sum(counted.values()) - lines) <= 0.1 * lines, counted
    assert f"{files} files and some {claim[2]} lines" in (ROOT / "README.md").read_text()

"""The documents of the repository, as text, and what is found in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_FOLDERS = (ROOT, ROOT / "examples", ROOT / "deploy", *(path for path in (DOCS, *DOCS.rglob("*")) if path.is_dir()))
PAGES = sorted(page for folder in _FOLDERS for page in folder.glob("*.md"))
# Written once and kept: they name files as they were called at the time.
HISTORY = {DOCS / "log.md", ROOT / "CHANGELOG.md", *(DOCS / "performance" / "ledger").glob("*.md")}

_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def table_rows(page: Path) -> list[list[str]]:
    """The cells of every row of every table, without headers' rules."""
    lines = [line for line in prose(page).splitlines() if line.startswith("|") and not line.startswith("|--")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def anchors(page: Path) -> set[str]:
    """What a heading is called in a link."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}

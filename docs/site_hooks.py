"""mkdocs hooks: pages of the site that live outside docs/, and the links to them.

Links in the repository are relative to the file they are in, so that they work on any Git host. In the site, a link
from or to one of `PAGES` is rewritten; a link to another file of the repository becomes its name.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "deploy/README.md": "deploy.md",
}
_SOURCES = {page: source for source, page in PAGES.items() if page != "index.md"}
_LINK = re.compile(r"\[([^\]\n]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages, and below the examples their source."""
    for page, source in _SOURCES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source == "examples/README.md":
            for program in sorted((ROOT / "examples").glob("*.py")):
                text += f"\n## {program.name}\n\n```python\n{program.read_text(encoding='utf-8')}```\n"
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites links that leave docs/, and those of pages that came from outside it."""
    here = page.file.src_uri
    folder = os.path.dirname(_SOURCES.get(here, f"docs/{here}"))

    def rewritten(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = os.path.normpath(os.path.join(folder, target))
        if path in PAGES:
            there = PAGES[path]
        elif path.startswith("docs/"):
            there = path.removeprefix("docs/")
        else:
            return text if "`" in text else f"{text} (`{path}`)"
        return f"[{text}]({os.path.relpath(there, os.path.dirname(here) or '.')}{anchor})"

    return _LINK.sub(rewritten, markdown)

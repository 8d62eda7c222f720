"""The documentation site builds strictly, without a warning and without a network."""

import os
import sys
from pathlib import Path

import yaml

from tests import children
from tests.docs.pages import DOCS, ROOT


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    environment = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    result = children.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "WARNING" not in result.stdout + result.stderr
    for page in ("index.html", "contributing.html", "changelog.html", "examples.html", "deploy.html"):
        assert (tmp_path / page).is_file(), page
    assert "fonts.googleapis" not in (tmp_path / "index.html").read_text()


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed: set[str] = set()

    def walk(entry: object) -> None:
        if isinstance(entry, str):
            listed.add(entry)
        elif isinstance(entry, dict):
            for value in entry.values():
                walk(value)
        elif isinstance(entry, list):
            for value in entry:
                walk(value)

    walk(yaml.safe_load(text))
    missing = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - listed
    assert missing == set()

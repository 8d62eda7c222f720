"""Metrics, error codes and routes that documents for operators name are those of the server."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, name_of, prose

PAGES = [
    DOCS / f"{name}.md" for name in ("apis", "production", "security", "troubleshooting", "tuning", "getting-started")
]
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "quire").rglob("*.py"))
_CODES = ("invalid", "unsupported", "queue", "share", "draining", "paused", "engine", "compilers", "deadline", "never",
          "context", "body", "nothing", "numerical", "out_of", "chat_template", "origin", "admin")  # fmt: skip
STRINGS = set(re.findall(r'"([^"\n]*)"', SOURCE))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_metrics_exist(page: Path) -> None:
    metrics = set(re.findall(r"`quire_([a-z_]+)", prose(page)))
    absent = {name for name in metrics if not {name, name.removesuffix("_total"), f"quire_{name}"} & STRINGS}
    assert absent == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_routes_exist(page: Path) -> None:
    routes = {path for _, path in re.findall(r"`(GET|POST) (/[\w/{}-]*)`", prose(page))}
    routes |= set(
        re.findall(
            r"`(/(?:v1|health|ready|load|metrics|version|pause|resume|tokenize|detokenize)[\w/{}-]*)`", prose(page)
        )
    )
    known = {re.sub(r"\{[^}]*\}", "{}", text) for text in STRINGS if text.startswith("/")}
    assert {route for route in routes if re.sub(r"\{[^}]*\}", "{}", route) not in known} == set()


@pytest.mark.parametrize("name", ["production", "troubleshooting"])
def test_the_error_codes_exist(name: str) -> None:
    text = prose(DOCS / f"{name}.md")
    codes = {code for code in re.findall(r"`([a-z]+(?:_[a-z]+)*)`", text) if code.startswith(_CODES)}
    assert len(codes) > 5
    assert codes - STRINGS == set()

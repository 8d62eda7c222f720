"""Links between documents lead somewhere, headings included; every raw measurement is reachable."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, anchors, name_of, prose

_LINK = re.compile(r"\]\(([^)\s]*)\)")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    broken = []
    for link in _LINK.findall(prose(page)):
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        there = (page.parent / target).resolve() if target else page
        if not there.is_file() or (anchor and anchor not in anchors(there)):
            broken.append(link)
    assert broken == []


def test_every_raw_measurement_is_linked_from_the_ledger() -> None:
    linked = set(re.findall(r"\]\(\.\./raw/([^)]+)\)", (DOCS / "performance" / "ledger" / "README.md").read_text()))
    assert linked == {path.name for path in (DOCS / "performance" / "raw").iterdir()}

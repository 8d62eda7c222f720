"""axe-core on every page, in light and dark, on a desk and on a phone: no serious finding."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import Chromium
from tests.browser.test_chat_page import ask, finished
from tests.server.local_server import LocalServer, local_server

AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text(encoding="utf-8")
FINDINGS = """
axe.run(document, {resultTypes: ['violations']}).then((result) => result.violations
  .filter((each) => ['serious', 'critical'].includes(each.impact))
  .map((each) => `${each.id}: ${each.help}: ${each.nodes.map((node) => node.target.join(' ')).join(', ')}`))
"""
READY = {
    "/": "document.getElementById('text') !== null",
    "/docs": "document.querySelectorAll('h2, details').length > 3",
    "/engine": "document.querySelectorAll('#figures dd').length >= 6",
}


@pytest.fixture(scope="module")
def server(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    lines = [
        {
            "say": "# Title\n\nSome `code` and a list:\n\n- one\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nx = 1\n```\n"
        }
    ]
    with local_server(tmp_path_factory.mktemp("script"), lines) as server:
        yield server


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("path", READY)
def test_a_page_has_no_serious_finding(
    browser: Chromium, server: LocalServer, path: str, width: int, dark: bool
) -> None:
    page = browser.tab(server.url + path, width=width, height=844, dark=dark)
    if path == "/":
        page.run("localStorage.clear(), sessionStorage.clear()")
        page.reload()
    page.until(READY[path])
    if path == "/":
        ask(page, "hi")
        finished(page)
    page.run(AXE + "; 0")
    assert page.run(FINDINGS) == []

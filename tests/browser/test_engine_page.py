"""The live view of the engine in a real browser, while requests run."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.server.server import Server
from tests.browser.chromium import Chromium, Tab
from tests.server.local_server import LocalServer, local_server
from tests.server.server_process import wait_until

LINES = [{"say": "on and on and on " * 900, "when": "endless"}, {"say": "A short answer."}]


@pytest.fixture(scope="module")
def server(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server(tmp_path_factory.mktemp("script"), LINES, "--max-model-len", "8k", "--itl-target", "1") as server:
        yield server


def test_blocks_rows_and_steps_are_drawn_while_a_request_runs(browser: Chromium, server: LocalServer) -> None:
    page = browser.tab(server.url + "/engine")
    page.until("document.getElementById('map-text').innerText.includes('blocks held')")
    assert "No step since this page was opened" in page.run("document.getElementById('time-text').innerText")
    stream = {"prompt": "endless", "max_tokens": 4000, "stream": True}
    page.run(
        f"fetch('v1/completions', {{method: 'POST', headers: {{'content-type': 'application/json'}}, body: JSON.stringify({stream})}}.valueOf()), 0".replace(
            "True", "true"
        )
    )
    page.until("document.querySelectorAll('#rows tr').length === 1")
    page.until("document.getElementById('time-text').innerText.startsWith('Steps ')")
    page.run("document.querySelector('#rows button').click()")
    page.until(
        "document.getElementById('story').open && document.getElementById('story-text').innerText.includes('arrived with')"
    )
    page.run("document.getElementById('story').close()")
    pixels = """
    (() => { const c = document.getElementById('%s'); const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
      const seen = new Set(); for (let i = 0; i < d.length; i += 4) if (d[i + 3]) seen.add(d[i] + ',' + d[i + 1] + ',' + d[i + 2]); return seen.size; })()
    """
    assert page.run(pixels % "map") >= 2, "free and held blocks have colours of their own"
    assert page.run(pixels % "timeline") >= 1
    described = page.run("document.getElementById('speed-text').innerText")
    assert re.fullmatch(
        r"\d+ steps, the slowest .+, \d+ above their target of 1\.0 ms; up to 1 decoding row\.", described
    )
    assert page.run("!document.getElementById('speed-target').hidden && !document.getElementById('queue-empty').hidden")
    page.run("document.getElementById('pause').click()")
    before = page.run("document.getElementById('time-text').innerText")
    assert (
        page.run("new Promise((done) => setTimeout(() => done(document.getElementById('time-text').innerText), 600))")
        == before
    )
    assert page.complaints() == []


NOTICE = "document.getElementById('notice').innerText"


def num_streams(server: LocalServer) -> int:
    assert isinstance(server.server, Server)
    return server.server.state.watchers.total


def show(page: Tab, hidden: bool) -> None:
    """As if another tab were chosen, or this one again."""
    value = "true" if hidden else "false"
    page.run(f"Object.defineProperty(document, 'hidden', {{configurable: true, get: () => {value}}}), 0")
    page.run("document.dispatchEvent(new Event('visibilitychange')), 0")


@pytest.fixture
def own_server(default_model_path: Path, tmp_path: Path) -> Iterator[LocalServer]:
    with local_server(tmp_path, LINES) as server:
        yield server


def test_it_reads_one_stream_and_none_while_nobody_looks(browser: Chromium, own_server: LocalServer) -> None:
    page = browser.tab(own_server.url + "/engine")
    page.until("document.getElementById('map-text').innerText.includes('blocks held')")
    assert num_streams(own_server) == 1
    show(page, hidden=True)
    wait_until(lambda: num_streams(own_server) == 0)
    show(page, hidden=False)
    wait_until(lambda: num_streams(own_server) == 1)
    page.run("document.getElementById('pause').click()")
    wait_until(lambda: num_streams(own_server) == 0)
    show(page, hidden=False)
    with own_server.client() as client:
        client.post("/v1/completions", json={"prompt": "one", "max_tokens": 4}).raise_for_status()
    assert num_streams(own_server) == 0, "it is paused"
    page.run("document.getElementById('pause').click()")
    wait_until(lambda: num_streams(own_server) == 1)
    asked = "performance.getEntriesByType('resource').filter((each) => each.name.includes('engine/')).map((each) => each.name)"
    assert all("/engine/events?since=" in each for each in page.run(asked)), "it asks nothing beside it"
    assert page.run("document.getElementById('notice').hidden") and page.complaints() == []


def test_a_lost_connection_is_told_and_comes_back(browser: Chromium, own_server: LocalServer) -> None:
    page = browser.tab(own_server.url + "/engine")
    with own_server.client() as client:
        page.until("document.getElementById('map-text').innerText.includes('blocks held')")
        client.post("/v1/completions", json={"prompt": "one", "max_tokens": 8}).raise_for_status()
        page.until("document.getElementById('time-text').innerText.startsWith('Steps ')")
        first = page.run("document.getElementById('time-text').innerText.split(' ')[1]")
        page.run(
            "seen = [], new MutationObserver(() => seen.push(notice.innerText)).observe(notice, {childList: true}), 0"
        )
        loop = own_server._http._loop
        for connection in list(own_server._http.server_state.connections):
            loop.call_soon_threadsafe(connection.transport.abort)
        page.until("seen.some((text) => text.startsWith('The connection to the server was lost.'))")
        wait_until(lambda: num_streams(own_server) == 1)
        page.until("document.getElementById('notice').hidden")
        client.post("/v1/completions", json={"prompt": "two", "max_tokens": 8}).raise_for_status()
        page.until(f"document.getElementById('time-text').innerText.startsWith('Steps {first} to')")
    own_server.stop()
    page.until(f"{NOTICE} === 'The connection to the server was lost. The page tries again until it is back.'")
    assert page.complaints() == []


def test_it_is_used_by_keyboard_alone(browser: Chromium, server: LocalServer) -> None:
    page = browser.tab(server.url + "/engine")
    focused = "document.activeElement.id || document.activeElement.innerText"

    def tab_to(what: str) -> None:
        for _ in range(30):
            page.press("Tab")
            if page.run(focused) == what:
                return
        raise AssertionError(f"Tab never reaches {what}, but ends at {page.run(focused)}")

    with server.client() as client:
        for text in ("one and the same beginning of prompts, and one", "another one that is longer than a block of 16"):
            client.post("/v1/completions", json={"prompt": text * 3, "max_tokens": 4}).raise_for_status()
    page.until("document.getElementById('tree-text').innerText.includes('nodes')")
    tab_to("tree")
    page.press("ArrowRight")
    page.until("document.getElementById('node-text').innerText.startsWith('Level 1: ')")
    first = page.run("document.getElementById('node-text').innerText")
    page.press("ArrowRight")
    page.press("ArrowDown")
    page.press("ArrowLeft")
    page.press("ArrowUp")
    assert page.run("document.getElementById('node-text').innerText").startswith("Level ")
    assert "tokens" in first and "hit" in first
    stream = '{"prompt": "endless", "max_tokens": 4000, "stream": true}'
    headers = '{"content-type": "application/json"}'
    page.run(f"fetch('v1/completions', {{method: 'POST', headers: {headers}, body: JSON.stringify({stream})}}), 0")
    page.until("document.querySelectorAll('#rows button').length === 1")
    tab_to(page.run("document.querySelector('#rows button').innerText"))
    page.press("Enter")
    page.until("document.getElementById('story').open")
    page.press("Escape")
    page.until("!document.getElementById('story').open")
    assert page.run("Boolean(document.activeElement.closest('#rows'))"), "the focus is where it was"
    tab_to("pause")
    page.press("Enter")
    assert page.run("document.getElementById('pause').innerText") == "Continue"
    assert page.complaints() == []


def test_it_fits_a_phone(browser: Chromium, server: LocalServer) -> None:
    page = browser.tab(server.url + "/engine", width=390, height=844, dark=True)
    page.until("document.querySelectorAll('#figures dd').length >= 6")
    assert page.run("document.documentElement.scrollWidth") <= 390


def test_with_keys_it_asks_for_one(browser: Chromium, default_model_path: Path, tmp_path: Path) -> None:
    with local_server(tmp_path, LINES, "--api-key", "sk-view") as server:
        page = browser.tab(server.url + "/engine")
        page.until("!document.getElementById('key-form').hidden")
        page.run("document.getElementById('key').value = 'sk-view', document.querySelector('#key-form button').click()")
        page.until("document.getElementById('map-text').innerText.includes('blocks held')")

"""A journal in the page /engine, in a real browser: played, stepped and searched, with the keyboard alone."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.cli.serve import listen
from quire.sched.journal.replay import read_journal
from quire.server.replay_view import HOST, ReplayPlayer, replay_server
from quire.sim.check.check import CheckReport, numpy_oracle, run_trial
from tests.browser.chromium import Chromium
from tests.browser.test_accessibility import AXE, FINDINGS

POSITION = "document.getElementById('position-text').innerText"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """The view of a scenario with preemptions, in a thread of this process."""
    journal = tmp_path / "session.journal"
    run_trial(427, CheckReport(0), numpy_oracle, journal=journal.open("wb"))
    player = ReplayPlayer(read_journal(journal), time.monotonic)
    with listen(HOST, 0) as listening:
        server = replay_server(player)
        serving = threading.Thread(target=server.run, args=([listening],))
        serving.start()
        yield f"http://{HOST}:{listening.getsockname()[1]}/engine"
        server.should_exit = True
        serving.join()


def test_it_is_played_stepped_and_searched_with_the_keyboard(browser: Chromium, url: str) -> None:
    page = browser.tab(url)
    page.until(f"{POSITION} === '0 of 74 steps'")
    assert page.run("document.getElementById('model').innerText") == "session.journal"
    assert page.run("[...document.querySelectorAll('header a'), pause].every((each) => each.hidden)")
    page.run(
        "document.getElementById('speed-choice').value = '100', "
        "document.getElementById('speed-choice').dispatchEvent(new Event('change')), 0"
    )
    page.press("Tab")
    assert page.run("document.activeElement.id") == "play"
    page.press("Enter")
    page.until(f"{POSITION} === '74 of 74 steps' && play.innerText === 'Play again'")
    assert "Steps 0 to" in page.run("document.getElementById('time-text').innerText")
    page.press("Tab")
    assert page.run("document.activeElement.id") == "back"
    page.press("Enter")
    page.until(f"{POSITION} === '73 of 74 steps'")
    page.run(
        "document.getElementById('position').value = 40, "
        "document.getElementById('position').dispatchEvent(new Event('input')), 0"
    )
    page.until(f"{POSITION} === '40 of 74 steps'")
    page.until("document.querySelectorAll('#rows tr').length === 1")
    page.run("document.querySelector('#rows button').click()")
    page.until("document.getElementById('story-text').innerText.includes('arrived with')")
    page.run("document.getElementById('story').close()")
    page.run("forward.click(), 0")
    page.until(f"{POSITION} === '41 of 74 steps'")
    assert page.run("timeline.getContext('2d').getImageData(0, 0, timeline.width, timeline.height).data.some(Boolean)")
    page.run("back.click(), back.click(), 0")
    page.until(f"{POSITION} === '39 of 74 steps'")
    assert page.run("document.getElementById('speed-choice').value") == "100"
    assert page.complaints() == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_has_no_serious_finding_and_fits_a_phone(browser: Chromium, url: str, width: int, dark: bool) -> None:
    page = browser.tab(url, width=width, height=844, dark=dark)
    page.until(f"{POSITION} === '0 of 74 steps'")
    assert page.run("document.documentElement.scrollWidth") <= width
    page.run(AXE + "; 0")
    assert page.run(FINDINGS) == []

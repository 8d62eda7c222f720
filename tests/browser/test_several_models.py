"""The pages of a server with several models: a chat chooses its model, the live view its engine."""

from pathlib import Path

from tests.browser.chromium import Chromium
from tests.browser.test_chat_page import ask, finished, log
from tests.server.several_models import several_here


def test_a_chat_chooses_its_model_and_the_view_its_engine(
    browser: Chromium, default_model_path: Path, tmp_path: Path
) -> None:
    with several_here(tmp_path, "--models-max", "2", a={}, b={}) as server:
        page = browser.tab(server.url)
        page.run("localStorage.clear(), sessionStorage.clear()")
        page.reload()
        page.until("document.getElementById('model').innerText.startsWith('a · context 1,024 · unloaded')")
        ask(page, "hi")
        finished(page)
        assert "I am a." in log(page)
        page.run("document.getElementById('open-settings').click()")
        assert page.run("!document.getElementById('model-choice').hidden")
        page.run("document.getElementById('chosen-model').value = 'b'")
        page.run("document.querySelector('#settings .go').click()")
        page.until("document.getElementById('model').innerText.startsWith('b · ')")
        ask(page, "and you?")
        finished(page, 2)
        assert "I am b." in log(page)
        page.reload()
        page.until("document.getElementById('model').innerText.startsWith('b · ')")
        assert page.complaints() == []
        view = browser.tab(server.url + "/engine")
        view.until("document.querySelectorAll('#models option').length === 3")
        for name in "ab":
            view.run(f"document.getElementById('models').value = '{name}'")
            view.run("document.getElementById('models').dispatchEvent(new Event('change'))")
            view.until("document.getElementById('map-text').innerText.includes('blocks held')")
        assert view.complaints() == []

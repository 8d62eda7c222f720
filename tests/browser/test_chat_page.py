"""The chat page in a real browser, over a scripted server: what a person sees and does in the first ten minutes."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import Chromium, Tab
from tests.server.local_server import LocalServer, local_server
from tests.server.pages.test_markdown import ATTACKS

MARKDOWN = (
    "# Title\n\nSome **bold** text.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('x')\n```\n\nAnd $x^2$.\n"
)
LINES: list[dict[str, Any]] = [
    {"say": "\n\n".join(["on and on and on"] * 1600), "when": "endless"},
    {"say": MARKDOWN, "when": "markdown"},
    {"say": "\n\n".join(ATTACKS), "when": "attack"},
    {"say": '{"river": "Rhine"}', "when": "json please"},
    {"say": "$$\\sum_{i=1}^n \\frac{1}{i}$$\n\n- [x] done", "when": "a sum"},
    {"say": "x" * 300 + "\n\n\u0627\u0644\u0639\u0631\u0628\u064a\u0629", "when": "a word"},
    {"say": "- \u05d0\n- \u05d1\n\n> \u05d0\n\n| \u05d0 | b |\n|---|---|\n| 1 | 2 |", "when": "hebrew"},
    {"say": "- a\n- \u05d1\n\n> b\n\n| a | \u05d1 |\n|---|---|\n| 1 | 2 |", "when": "english"},
    {"say": "Bang", "break": True, "when": "boom"},
    {"say": "A short answer."},
]
KEY = "sk-browser"


@pytest.fixture(scope="module")
def server(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server(tmp_path_factory.mktemp("script"), LINES, "--max-model-len", "8k") as server:
        yield server


@pytest.fixture
def tab(browser: Chromium, server: LocalServer) -> Callable[..., Tab]:
    fresh = browser.tab(server.url)
    fresh.run("localStorage.clear(), sessionStorage.clear()")
    return lambda **size: browser.tab(server.url, **size)


def write(tab: Tab, text: str) -> None:
    tab.run("document.getElementById('text').focus()")
    tab.type(text)


def ask(tab: Tab, text: str) -> None:
    write(tab, text)
    tab.press("Enter")


def finished(tab: Tab, number: int = 1) -> None:
    tab.until(
        f"document.querySelectorAll('article.assistant').length >= {number} && !document.getElementById('send').hidden"
    )


def log(tab: Tab) -> str:
    return str(tab.run("document.getElementById('log').innerText"))


def click(tab: Tab, selector: str) -> None:
    tab.run(f"document.querySelector({json.dumps(selector)}).click()")


def test_markdown_is_shown_with_speed_below_it(tab: Callable[..., Tab]) -> None:
    page = tab()
    ask(page, "markdown")
    finished(page)
    page.until("document.querySelector('math')")
    for selector in ("h3", "strong", "table td", ".code .hl-built_in", ".code-head button", "math msup"):
        assert page.run(f"document.querySelectorAll('article.assistant {selector}').length") >= 1, selector
    assert "tok/s" in log(page) and "first token" in log(page) and "prompt" in log(page)
    assert page.complaints() == []


def test_a_formula_is_not_cut_off_and_a_task_has_no_bullet(tab: Callable[..., Tab]) -> None:
    page = tab()
    ask(page, "a sum")
    finished(page)
    page.until("document.querySelector('div.math math')")
    assert (
        page.run(
            "(({ clientHeight, scrollHeight }) => scrollHeight - clientHeight)(document.querySelector('div.math'))"
        )
        == 0
    ), "nothing of it is above or below"
    inside = "['div.math', 'div.math math'].map((each) => document.querySelector(each).getBoundingClientRect())"
    assert page.run(f"(([box, inner]) => inner.top >= box.top && inner.bottom <= box.bottom)({inside})")
    assert page.run("getComputedStyle(document.querySelector('#log li')).listStyleType") == "none"


def test_nothing_that_a_model_or_a_user_writes_runs(tab: Callable[..., Tab]) -> None:
    page = tab()
    for attack in ("attack <img src=x onerror='window.pwned=1'>", "attack again"):
        ask(page, attack)
        finished(page)
    assert page.run("window.pwned") is None
    found = page.run("[...document.querySelectorAll('#log *')].map((each) => each.localName)")
    assert not {"script", "img", "iframe", "svg", "style", "object", "form", "base", "link", "meta"} & set(found)
    hrefs = page.run("[...document.querySelectorAll('#log a')].map((each) => each.protocol)")
    assert hrefs and set(hrefs) <= {"https:", "http:", "mailto:"}
    page.reload()
    page.until("document.querySelector('article')")
    assert page.run("window.pwned") is None
    assert page.complaints() == []


def test_a_new_chat_while_streaming_gets_nothing_of_the_old_answer(tab: Callable[..., Tab]) -> None:
    page = tab()
    ask(page, "endless")
    page.until("document.querySelector('article.assistant').innerText.includes('on and on')")
    click(page, "#new")
    ask(page, "hello")
    page.until("document.getElementById('log').innerText.includes('A short answer.')")
    assert "on and on" not in log(page)
    page.until("document.querySelectorAll('nav li').length === 2 && document.querySelector('nav .busy')")
    page.run(
        "[...document.querySelectorAll('nav li button')].find((each) => each.innerText.includes('endless')).click()"
    )
    assert "on and on" in log(page) and "A short answer." not in log(page)
    click(page, "#stop")
    page.until("document.querySelector('article.assistant').innerText.includes('stopped')")


def test_enter_while_streaming_neither_stops_nor_sends(tab: Callable[..., Tab]) -> None:
    page = tab()
    ask(page, "endless")
    page.until("document.querySelector('article.assistant').innerText.includes('on and on')")
    ask(page, "my next question")
    length = page.run("document.querySelector('article.assistant').innerText.length")
    page.until(f"document.querySelector('article.assistant').innerText.length > {length}")
    assert page.run("document.getElementById('text').value") == "my next question"
    assert page.run("document.querySelectorAll('article').length") == 2
    page.press("Escape")
    page.until("!document.getElementById('send').hidden")


def test_one_can_scroll_up_while_it_streams(tab: Callable[..., Tab]) -> None:
    page = tab(height=500)
    ask(page, "endless")
    page.until("document.getElementById('log').scrollHeight > 1200")
    assert (
        page.run("const log = document.getElementById('log'); log.scrollHeight - log.scrollTop - log.clientHeight")
        < 100
    )
    page.run("document.getElementById('log').scrollTop = 0")
    length = page.run("document.querySelector('article.assistant').innerText.length")
    page.until(f"document.querySelector('article.assistant').innerText.length > {length} + 200")
    assert page.run("document.getElementById('log').scrollTop") == 0
    assert page.run("document.getElementById('to-end').hidden") is False
    click(page, "#stop")


def test_a_message_that_is_too_long_does_not_wedge_the_chat(tab: Callable[..., Tab]) -> None:
    page = tab()
    ask(page, "first")
    finished(page)
    ask(page, "long words " * 9000)
    page.until("document.querySelector('.error:not([hidden])')")
    assert "maximum context length is 8192 tokens" in log(page)
    ask(page, "short again")
    page.until("document.getElementById('log').innerText.split('A short answer.').length === 3")
    assert "long words" not in log(page).replace("‹ 2/2 ›", "")


def test_edit_retry_and_branches(tab: Callable[..., Tab]) -> None:
    page = tab()
    ask(page, "first")
    finished(page)
    page.run(
        "[...document.querySelectorAll('article.assistant button')].find((each) => each.innerText === 'Retry').click()"
    )
    page.until("document.getElementById('log').innerText.includes('2/2') && !document.getElementById('send').hidden")
    page.run("[...document.querySelectorAll('article.user button')].find((each) => each.innerText === 'Edit').click()")
    page.run("document.querySelector('textarea.edit').value = 'markdown'")
    page.run("[...document.querySelectorAll('article button')].find((each) => each.innerText === 'Send').click()")
    page.until("document.querySelector('article.assistant h3') && !document.getElementById('send').hidden")
    click(page, "article.user [aria-label='Previous version']")
    assert "A short answer." in log(page) and "Title" not in log(page)


def test_a_corrupt_stored_value_leaves_the_page_alive(tab: Callable[..., Tab]) -> None:
    page = tab()
    page.run("localStorage.setItem('quire.chat.bad', '{'), localStorage.setItem('quire.settings', 'x')")
    page.run("localStorage.setItem('quire.messages', '[{]')")
    odd = {
        "id": "odd",
        "title": "odd",
        "messages": {"m": {"id": "m", "role": "user", "content": "x", "parent": "toString"}},
    }
    page.run(f"localStorage.setItem('quire.chat.odd', {json.dumps(json.dumps(odd))})")
    page.reload()
    click(page, "nav li button")
    assert "undefined" not in log(page) and page.run("document.querySelectorAll('article').length") == 1
    click(page, "#new")
    ask(page, "hello")
    finished(page)
    assert "A short answer." in log(page)
    assert "1 stored conversation cannot be read" in page.run("document.getElementById('unreadable').innerText")
    assert page.complaints() == []


def test_two_tabs_see_each_other_and_overwrite_nothing(tab: Callable[..., Tab]) -> None:
    left, right = tab(), tab()
    ask(left, "from the left")
    finished(left)
    right.until("document.querySelector('nav').innerText.includes('from the left')")
    ask(right, "from the right")
    finished(right)
    left.until("document.querySelectorAll('nav li').length === 2")
    left.reload()
    left.until("document.querySelectorAll('nav li').length === 2")
    assert "from the left" in log(left)


def test_drafts_and_conversations_survive_a_reload(tab: Callable[..., Tab]) -> None:
    page = tab()
    ask(page, "remember this")
    finished(page)
    write(page, "half a thou")
    page.reload()
    page.until("document.getElementById('text').value === 'half a thou'")
    assert "A short answer." in log(page)


def test_an_answer_that_a_reload_cuts_off_is_interrupted(tab: Callable[..., Tab]) -> None:
    page = tab()
    ask(page, "endless")
    page.until("document.querySelector('article.assistant').innerText.includes('on and on')")
    page.reload()
    page.until("document.querySelector('article.assistant .foot')?.innerText.includes('interrupted')")
    assert "on and on" in log(page)
    assert page.run("document.querySelector('article.assistant .error').hidden"), "it was no failure"


@pytest.mark.parametrize("width", [390, 1200])
def test_a_long_word_is_broken_and_arabic_begins_at_the_right(tab: Callable[..., Tab], width: int) -> None:
    page = tab(width=width)
    ask(page, "a word")
    finished(page)
    assert (
        page.run("(({ scrollWidth, clientWidth }) => scrollWidth - clientWidth)(document.getElementById('log'))") == 0
    )
    page.run(
        "window.ends = [...document.querySelectorAll('article.assistant p')].map((each) => { const text = document.createRange();"
        " text.selectNodeContents(each); return each.getBoundingClientRect().right - text.getBoundingClientRect().right; })"
    )
    assert page.run("ends.length === 2 && ends[1] < 1 && ends[0] >= 0")


@pytest.mark.parametrize(("question", "direction"), [("hebrew", "rtl"), ("english", "ltr")])
def test_bullets_quotes_and_columns_begin_where_their_text_does(
    tab: Callable[..., Tab], question: str, direction: str
) -> None:
    page = tab()
    ask(page, question)
    finished(page)
    parts = "['ul', 'blockquote', 'table'].map((tag) => document.querySelector('article.assistant ' + tag))"
    assert page.run(f"{parts}.map((each) => getComputedStyle(each).direction)") == [direction] * 3


def test_a_broken_answer_keeps_its_text_and_says_why(tab: Callable[..., Tab]) -> None:
    page = tab()
    ask(page, "boom")
    page.until("document.querySelector('.error:not([hidden])')")
    assert "Bang" in log(page) or "engine" in log(page)
    assert page.run("document.getElementById('send').hidden") is False


def test_a_server_that_is_gone_is_told_in_words(tab: Callable[..., Tab]) -> None:
    page = tab()
    page.run("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    ask(page, "hello")
    page.until("document.querySelector('.error:not([hidden])')")
    assert "The server cannot be reached" in log(page) and "Failed to fetch" not in log(page)


def test_a_connection_that_breaks_is_told_in_words(tab: Callable[..., Tab]) -> None:
    """Browsers say "network error", or "Error in input stream"."""
    page = tab()
    page.run(
        "window.fetch = async () => new Response(new ReadableStream({ start(stream) { stream.enqueue(new TextEncoder().encode("
        """'data: {"choices": [{"delta": {"content": "half"}}]}\\n\\n')); setTimeout(() => stream.error(new TypeError('network error')), 50); } }))"""
    )
    ask(page, "hello")
    page.until("document.querySelector('.error:not([hidden])')")
    assert "The connection ended before the answer did." in log(page) and "half" in log(page)


def test_json_answers_are_shown_as_json(tab: Callable[..., Tab]) -> None:
    page = tab()
    click(page, "#open-settings")
    page.run(
        "document.getElementById('json').checked = true, document.getElementById('field-temperature').value = '0.3'"
    )
    page.run("document.getElementById('system').value = 'Be brief.', document.querySelector('#settings .go').click()")
    page.until("!document.getElementById('settings').open")
    ask(page, "json please")
    finished(page)
    page.until("document.querySelector('.hl-attr')")
    stored = page.run("JSON.parse(localStorage.getItem('quire.settings'))")
    assert stored == {"temperature": 0.3, "system": "Be brief.", "json": True}, "only what was set"


def test_an_empty_setting_shows_the_default_of_the_model(tab: Callable[..., Tab]) -> None:
    page = tab()
    page.until("document.getElementById('model').innerText.includes('smollm2')")
    click(page, "#open-settings")
    field = "(({ value, placeholder }) => [value, placeholder])(document.getElementById('field-%s'))"
    assert page.run(field % "temperature") == ["", "default: 0.2"]
    assert page.run(field % "seed") == ["", "default"]


@pytest.mark.parametrize("touched, lines", [(True, ["one", "two"]), (False, [])])
def test_enter_begins_a_line_on_a_phone_and_sends_elsewhere(
    tab: Callable[..., Tab], touched: bool, lines: list[str]
) -> None:
    page = tab(width=390, touched=touched)
    write(page, "one")
    page.press("Enter")
    if touched:
        page.type("two")
    assert page.run("document.getElementById('text').value.split('\\n').filter(Boolean)") == lines
    if not touched:
        finished(page)
    assert page.run("document.querySelectorAll('article').length") == (0 if touched else 2)


@pytest.fixture
def key_page(browser: Chromium, default_model_path: Path, tmp_path: Path) -> Iterator[Tab]:
    """The page of a server with a key, which it asks for."""
    with local_server(tmp_path, LINES, "--api-key", KEY) as server:
        page = browser.tab(server.url)
        page.until("document.getElementById('key-dialog').open")
        yield page


def give_key(page: Tab, key: str) -> None:
    page.run(f"document.getElementById('key').value = '{key}', document.querySelector('#key-dialog .go').click()")


def test_a_server_with_keys_serves_the_page_which_asks_for_the_key(key_page: Tab) -> None:
    give_key(key_page, "wrong")
    key_page.until("document.getElementById('key-reason').innerText.includes('does not know this key')")
    key_page.until("document.getElementById('key-dialog').open")
    give_key(key_page, KEY)
    key_page.until("document.getElementById('model').innerText.includes('smollm2')")
    ask(key_page, "hello")
    finished(key_page)
    assert "A short answer." in log(key_page)
    assert key_page.run("localStorage.getItem('quire.key')") is None, "only where it was asked for"


def test_a_text_that_cannot_be_a_key_is_refused_by_the_page(key_page: Tab) -> None:
    """A browser does not send it, and would say that the server cannot be reached."""
    give_key(key_page, "sk-\u2013browser")
    key_page.until("document.getElementById('key-reason').innerText.includes('cannot be a key')")
    assert key_page.run("document.getElementById('key-dialog').open")
    click(key_page, "#cancel-key")
    key_page.until("!document.getElementById('key-dialog').open")
    key_page.run("localStorage.setItem('quire.key', '\u2013')")
    key_page.reload()
    key_page.until("document.getElementById('key-reason').innerText.includes('needs an API key')")


def test_the_key_dialog_can_be_left_and_keeps_a_remembered_key(key_page: Tab) -> None:
    key_page.press("Escape")
    key_page.until("!document.getElementById('key-dialog').open")
    later = "new Promise((done) => setTimeout(() => done(document.querySelector('dialog[open]')), 300))"
    assert key_page.run(later) is None
    click(key_page, "#open-key")
    click(key_page, "#remember")
    give_key(key_page, KEY)
    key_page.until("document.getElementById('model').innerText.includes('smollm2')")
    click(key_page, "#open-key")
    assert key_page.run("document.getElementById('remember').checked")
    key_page.press("Escape")
    key_page.until("!document.getElementById('key-dialog').open")
    assert key_page.run("localStorage.getItem('quire.key')") == KEY, "looked at, not changed"


def test_an_answer_in_another_tab_is_not_interrupted_and_an_edit_is_kept(tab: Callable[..., Tab]) -> None:
    first = tab()
    ask(first, "hello")
    finished(first)
    second = tab()
    second.run(f"location.hash = {json.dumps(first.run('location.hash'))}")
    second.until("document.querySelectorAll('article').length === 2")
    second.run("document.querySelector('article.user [title^=Edit]').click()")
    second.run("document.querySelector('textarea.edit').value = 'half written'")
    ask(first, "endless")
    first.until("document.querySelectorAll('article').length === 4")
    second.until("document.getElementById('list').innerText.includes('hello')")
    first.until("JSON.parse(localStorage.getItem('quire.chat.' + location.hash.slice(1))).draft === ''")
    assert second.run("document.querySelector('textarea.edit').value") == "half written"
    second.run("[...document.querySelectorAll('button')].find((each) => each.innerText === 'Cancel').click()")
    second.until("document.getElementById('log').innerText.includes('answering in another tab')")
    assert "interrupted" not in log(second)
    click(first, "#stop")
    second.until("document.getElementById('log').innerText.includes('stopped')")


def test_copy_pressed_twice_is_copy_again(tab: Callable[..., Tab]) -> None:
    page = tab()
    page.run("navigator.clipboard.writeText = async () => {}")
    ask(page, "hello")
    finished(page)
    button = "document.querySelector('article.assistant [title^=Copy]')"
    page.run(f"{button}.click(), setTimeout(() => {button}.click(), 200)")
    page.until(f"{button}.innerText === 'Copied'")
    page.until(f"{button}.innerText === 'Copy'")


def test_copying_works_without_https(tab: Callable[..., Tab]) -> None:
    """A page that comes over HTTP from another machine has no navigator.clipboard."""
    page = tab()
    page.run("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.run("addEventListener('copy', (event) => { window.copied = getSelection().toString(); })")
    ask(page, "hello")
    finished(page)
    click(page, "article.assistant [title^=Copy]")
    page.until("window.copied === 'A short answer.'")
    page.until("document.querySelector('article.assistant [title^=Copy]').innerText === 'Copied'")
    assert page.run("document.getElementById('notice').hidden")


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_the_screen(tab: Callable[..., Tab], width: int, dark: bool, tmp_path: Path) -> None:
    page = tab(width=width, height=844, dark=dark)
    ask(page, "markdown")
    finished(page)
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("document.getElementById('send').getBoundingClientRect().right") <= width
    page.screenshot(tmp_path / f"chat-{width}-{'dark' if dark else 'light'}.png")
    if width == 390:
        assert page.run("document.getElementById('side').getBoundingClientRect().right") <= 0
        click(page, "#open-side")
        page.until("document.getElementById('side').getBoundingClientRect().left >= 0")


def test_every_control_has_a_name(tab: Callable[..., Tab]) -> None:
    page = tab()
    ask(page, "markdown")
    finished(page)
    click(page, "#open-settings")
    nameless = page.run("""
    [...document.querySelectorAll("button, input, textarea, select, a, dialog, nav")].filter((each) => {
      const label = each.getAttribute("aria-label") || each.getAttribute("aria-labelledby") || each.innerText.trim();
      return !label && !each.labels?.length;
    }).map((each) => each.outerHTML)
    """)
    assert nameless == []


def test_the_api_page_lists_endpoints_and_sends_an_example(browser: Chromium, server: LocalServer) -> None:
    page = browser.tab(server.url + "/docs")
    page.until("document.getElementById('post/v1/chat/completions')")
    page.run("document.getElementById('post/v1/chat/completions').open = true")
    page.until("document.querySelector('#list textarea')")
    assert "curl http://127.0.0.1" in page.run("document.querySelector('#list pre').innerText")
    page.run("document.querySelector('#list details[open] .go').click()")
    page.until("document.querySelector('.response').innerText.includes('A short answer.')")
    assert page.complaints() == []

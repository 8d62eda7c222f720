"""Answers as elements: markdown is shown, and whatever a model or a user writes, nothing of it runs or is loaded."""

import json
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.server.pages.javascript import Page

ATTACKS = [
    "<script>window.pwned = 1</script>", "<img src=x onerror='window.pwned=1'>", "<svg/onload=alert(1)>",
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe>", "[a](javascript:window.pwned=1)",
    "[a](JaVaScRiPt:alert(1))", "[a](  javascript:alert(1))", "[a](java&#115;cript:alert(1))", "[a](java\tscript:alert(1))",
    "[a](data:text/html,<script>alert(1)</script>)", "[a](vbscript:x)", "[a](file:///etc/passwd)", "[a](//evil.example)",
    "![a](https://evil.example/pixel.png)", "![a](javascript:alert(1))", "<javascript:alert(1)>", "<a href='javascript:x'>y</a>",
    "[a]: javascript:alert(1)\n\n[a]", "`<img src=x onerror=alert(1)>`", "```html\n<script>alert(1)</script>\n```",
    "```<script>alert(1)</script>\nx\n```", "```js\n</code></pre><script>alert(1)</script>\n```",
    "| <script>alert(1)</script> | b |\n|---|---|\n| <img src=x onerror=alert(1)> | c |",
    "# <svg onload=alert(1)>", "> <style>*{display:none}</style>", "- <base href='https://evil.example/'>",
    "<math><mi//xlink:href='data:x,<script>alert(1)</script>'>", "$\\href{javascript:alert(1)}{x}$",
    "$$\\htmlData{onclick=alert(1)}{x}$$", "\\(\\includegraphics{https://evil.example/x.png}\\)",
    "&lt;script&gt;alert(1)&lt;/script&gt;", "&#x3c;script&#x3e;alert(1)", "<form action=https://evil.example><input>",
    "<object data=javascript:alert(1)>", "<link rel=stylesheet href=https://evil.example/x.css>",
    '[a](https://ok.example "onclick=alert(1)")', "[a](https://ok.example' onclick='alert(1))",
    "<meta http-equiv=refresh content='0;url=https://evil.example'>", "<!--><script>alert(1)</script>-->",
]  # fmt: skip
TAGS = {
    "p", "span", "h3", "h4", "h5", "h6", "blockquote", "ul", "ol", "li", "input", "div", "pre", "code", "button", "table",
    "thead", "tbody", "tr", "th", "td", "hr", "br", "strong", "em", "del", "a", "root",
}  # fmt: skip
ATTRIBUTES = {"href", "rel", "target", "className", "start", "type", "checked", "aria-label"}


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    page = Page("markdown.js")
    page.do("""
    globalThis.view = (text) => { const root = document.createElement("root"); new MarkdownView(root).update(text); return root; };
    """)
    yield page


def shown(page: Page, text: str) -> list[Any]:
    return page.run("view(text).tree()", text=text)[2:]  # type: ignore[no-any-return]


def nodes(tree: list[Any]) -> Iterator[list[Any]]:
    yield tree
    for child in tree[2:]:
        if isinstance(child, list):
            yield from nodes(child)


def check_harmless(tree: list[Any]) -> None:
    for tag, attributes, *_ in nodes(tree):
        assert tag in TAGS and set(attributes) <= ATTRIBUTES, (tag, attributes)
        if "href" in attributes:
            assert attributes["href"].startswith(("http://", "https://", "mailto:")), attributes
            assert "noopener" in attributes["rel"] and tag == "a"
        if tag == "input":
            assert attributes["type"] == "checkbox"


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_becomes_more_than_text(page: Page, attack: str) -> None:
    tree = page.run("view(text).tree()", text=attack)
    check_harmless(tree)
    for opening in ("<script>", "<img", "<svg", "<iframe"):
        if attack.startswith(opening):
            assert opening in page.run("view(text).textContent", text=attack), "shown as it was written"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.sampled_from([*ATTACKS, "\n", "\n\n", "- ", "> ", "```", "|", "$", "**", "[", "](", "<"]),
                          st.text(max_size=8)), max_size=12))  # fmt: skip
def test_no_mixture_becomes_more_than_text(page: Page, pieces: list[str]) -> None:
    check_harmless(page.run("view(text).tree()", text="".join(pieces)))


def test_blocks(page: Page) -> None:
    heading, paragraph, quote, rule = shown(page, "# Title\n\nSome **bold**, *thin* and `code`.\n\n> quoted\n\n---\n")
    assert heading == ["h3", {}, "Title"], "the page has the higher ones"
    assert paragraph[2:] == [
        "Some ", ["strong", {}, "bold"], ", ", ["em", {}, "thin"], " and ", ["code", {}, "code"], ".",
    ]  # fmt: skip
    assert quote == ["blockquote", {}, ["p", {}, "quoted"]] and rule == ["hr", {}]


def test_lists(page: Page) -> None:
    ordered, tasks = shown(page, "3. three\n4. four\n   - below\n\n<!-- -->\n\n- [x] done\n- [ ] open\n")[::2]
    assert ordered[:2] == ["ol", {"start": 3}] and len(ordered) == 4
    assert ordered[3][3][0] == "ul"
    assert [item[2][1]["checked"] for item in tasks[2:]] == [True, False]


def test_a_table_scrolls_by_itself(page: Page) -> None:
    [box] = shown(page, "| a | b |\n|---|--:|\n| `1` | x\\|y |\n")
    assert box[:2] == ["div", {"className": "scroll"}]
    head, body = box[2][2:]
    assert head[2][3] == ["th", {"className": "align-right"}, "b"]
    assert body[2][2] == ["td", {}, ["code", {}, "1"]]


def test_code_is_highlighted_and_can_be_copied(page: Page) -> None:
    source = 'def f(x):\n    return "<b>"'
    [box] = shown(page, f"```python\n{source}\n```")
    head, body = box[2:]
    assert head[2] == ["span", {}, "python"] and head[3][2] == "Copy"
    assert ["span", {"className": "hl-keyword"}, "def"] in body[2]
    assert page.run("view(text).nodes[0].nodes[1].textContent", text=f"```python\n{source}\n```") == source
    [unknown] = shown(page, "```klingon\nqapla'\n```")
    assert unknown[3] == ["pre", {}, ["code", {}, "qapla'"]]


def test_references_are_text(page: Page) -> None:
    [paragraph] = shown(page, "a &amp; b &lt;i&gt; &#955; &unknown; `&amp;`")
    assert (
        "".join(part if isinstance(part, str) else part[2] for part in paragraph[2:]) == "a & b <i> λ &unknown; &amp;"
    )


def test_math_is_found_and_prices_are_not(page: Page) -> None:
    page.do("""
    globalThis.formulas = (text) => {
      const found = [];
      const renderMath = (source, display) => { found.push([source, display]); return null; };
      new MarkdownView(document.createElement("root"), { renderMath }).update(text);
      return found;
    };
    """)
    text = "Let $x^2$ and \\(y_1\\).\n\n$$\n\\frac{1}{2}\n$$\n\n\\[ z \\]\n\nIt costs $5 or $6, and `$no$`."
    assert page.run("formulas(text)", text=text) == [
        ["x^2", False], ["y_1", False], ["\\frac{1}{2}", True], ["z", True],
    ]  # fmt: skip


def test_a_growing_answer_keeps_its_finished_blocks(page: Page) -> None:
    page.do("""
    globalThis.grow = (pieces) => {
      const root = document.createElement("root");
      const markdown = new MarkdownView(root);
      const firsts = [];
      let text = "";
      for (const piece of pieces) { text += piece; markdown.update(text); firsts.push(root.nodes[0]); }
      return { same: firsts.slice(2).every((node) => node === firsts[2]), tree: root.tree() };
    };
    """)
    text = "# A\n\npara *one*\n\n```js\nlet a = 1\n```\n\n| a |\n|---|\n| 1 |\n\nend"
    grown = page.run("grow(pieces)", pieces=["# A\n", "\np", *text[6:]])
    assert grown["same"]
    assert grown["tree"][2:] == shown(page, text), "piece by piece gives what the whole gives"


@pytest.mark.parametrize(
    "text", [">" * 5000 + "a", "- " * 5000 + "a", "[" * 1500, "*" * 5000, "`" * 5001, "a" * 400_001]
)
def test_a_bomb_is_shown_in_little_time(page: Page, text: str) -> None:
    tree = page.run("view(text).tree()", text=text)
    check_harmless(tree)
    assert len(json.dumps(tree)) < 3_000_000

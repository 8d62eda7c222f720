"""Conversations in the browser's storage: branches, several tabs, values that cannot be read, export and import."""

import json
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.server.pages.javascript import Page


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page("conversations.js")
    page.do("""
    globalThis.storage = new MemoryStorage();
    globalThis.tab = () => new ConversationStore(storage);
    globalThis.store = tab();
    let number = 0;
    globalThis.say = (conversation, role, content, parent = conversation.leaf) =>
      addMessage(conversation, { id: "m" + ++number, parent, role, content }).id;
    globalThis.talk = (id, ...texts) => {
      const conversation = newConversation(id, 1, {});
      texts.forEach((text, i) => say(conversation, i % 2 ? "assistant" : "user", text));
      return conversation;
    };
    globalThis.texts = (conversation, leaf) => branch(conversation, leaf).map((message) => message.content);
    """)
    yield page


def test_a_title_is_the_first_line_of_the_first_question(page: Page) -> None:
    assert page.run('talk("a", "Hello there\\nmore", "yes").title') == "Hello there"
    assert len(page.run('talk("a", "x".repeat(500)).title')) == 60


def test_an_edit_is_a_branch_and_both_stay(page: Page) -> None:
    page.do("""
    globalThis.it = talk("a", "one", "1", "two", "2");
    globalThis.edited = say(it, "user", "two!", branch(it)[2].parent);
    say(it, "assistant", "2!");
    """)
    assert page.run("texts(it)") == ["one", "1", "two!", "2!"]
    assert page.run("alternatives(it, it.messages[edited]).map((each) => each.content)") == ["two", "two!"]
    page.do("select(it, alternatives(it, it.messages[edited])[0])")
    assert page.run("texts(it)") == ["one", "1", "two", "2"]


def test_a_question_without_an_answer_is_not_sent_with_the_next(page: Page) -> None:
    """A message that was too long would be refused again with every message after it."""
    page.do("""
    globalThis.it = talk("a", "one", "1", "far too long");
    addMessage(it, { id: "failed", parent: it.leaf, role: "assistant", content: "", state: "error", error: "too long" });
    say(it, "user", "short", nextParent(it));
    """)
    assert page.run("requestBody(it, it.leaf).messages.map((each) => each.content)") == ["one", "1", "short"]
    assert page.run('nextParent(talk("b", "one", "1")) !== null') is True
    assert page.run('nextParent(newConversation("c", 1, {}))') is None


def test_the_body_has_what_was_set_and_nothing_else(page: Page) -> None:
    page.do('globalThis.it = talk("a", "hi");')
    assert page.run("requestBody(it, it.leaf)") == {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    page.do(
        'it.settings = { temperature: 9, top_p: 0.5, max_tokens: 10.6, system: "Be kind.", json: true, seed: NaN, x: 1 };'
    )
    body = page.run("requestBody(it, it.leaf)")
    assert body["messages"][0] == {"role": "system", "content": "Be kind."}
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (2, 0.5, 11), "within the ranges of the fields"
    assert body["response_format"] == {"type": "json_object"} and not {"seed", "x", "json", "system"} & set(body)


def test_what_the_model_says_of_sampling_is_not_sent(page: Page) -> None:
    """To a model that names no temperature, 0.7 is sent as by quire chat; to one that does, nothing."""
    page.do('globalThis.it = talk("a", "hi");')

    def sent(own: dict[str, float], **settings: float) -> dict[str, float]:
        page.run("it.settings = settings", settings=settings)
        body = page.run("requestBody(it, it.leaf, { default_sampling_params: own })", own=own)
        return {name: body[name] for name in ("temperature", "top_p", "top_k") if name in body}

    assert sent({}) == page.run("defaultsOf({ default_sampling_params: {} })") == {"temperature": 0.7, "top_p": 0.95}
    assert sent({"top_k": 20}, temperature=0.2) == {"temperature": 0.2, "top_p": 0.95}
    own = {"temperature": 0.6, "top_k": 20}
    assert (sent(own), sent(own, top_p=0.5)) == ({}, {"top_p": 0.5})
    assert page.run("defaultsOf({ default_sampling_params: own })", own=own) == own


def test_conversations_are_listed_and_searched(page: Page) -> None:
    page.do("""
    for (const [id, text, updated] of [["a", "Paris in spring", 1], ["b", "Rome", 3], ["c", "Oslo", 2]]) {
      const it = talk(id, text, "An answer about " + text);
      it.updated = updated;
      store.save(it);
    }
    """)
    assert page.run("store.list().map((each) => each.id)") == ["b", "c", "a"]
    assert page.run('store.list("SPRING answer").map((each) => each.id)') == ["a"]
    assert page.run('store.list("nowhere")') == []


def test_two_tabs_do_not_overwrite_each_other(page: Page) -> None:
    page.do("""
    store.save(talk("a", "one", "1"));
    const [left, right] = [tab(), tab()];
    const [mine, theirs] = [left.load("a"), right.load("a")];
    say(mine, "user", "from the left");
    left.save(mine);
    say(theirs, "user", "from the right");
    theirs.title = "Renamed"; theirs.renamed = 5;
    right.save(theirs);
    say(mine, "assistant", "left answered");
    left.save(mine);
    right.save(talk("b", "another"));
    """)
    contents = page.run('Object.values(store.load("a").messages).map((each) => each.content)')
    assert sorted(contents) == ["1", "from the left", "from the right", "left answered", "one"]
    assert page.run('[store.load("a").title, texts(store.load("a")).slice(-1)[0]]') == ["Renamed", "left answered"]
    assert page.run("store.list().length") == 2


def test_two_tabs_that_are_answered_at_once_keep_both_answers(page: Page) -> None:
    page.do("""
    const mine = talk("a", "one");
    const answer = (conversation, id) => addMessage(conversation, { id, parent: conversation.leaf, role: "assistant", content: "", state: "streaming" });
    answer(mine, "left"); store.save(mine, "left");
    const [left, right] = [store, tab()];
    const theirs = right.load("a");
    answer(theirs, "right"); theirs.messages.right.content = "be"; right.save(theirs, "right");
    Object.assign(mine.messages.left, { content: "all of it", state: "done" }); left.save(mine);
    theirs.messages.right.content = "begun"; right.save(theirs, "right");
    Object.assign(theirs.messages.right, { content: "begun and ended", state: "done" }); right.save(theirs);
    """)
    kept = page.run('Object.values(store.load("a").messages).map(({ id, content, state }) => [id, content, state])')
    assert kept[1:] == [["left", "all of it", "done"], ["right", "begun and ended", "done"]]


def test_a_conversation_deleted_in_another_tab_does_not_come_back(page: Page) -> None:
    page.do('globalThis.it = talk("a", "one"); store.save(it); tab().remove("a"); say(it, "assistant", "late");')
    assert page.run("store.save(it)") is False
    assert page.run("store.list()") == []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["id", "messages", "leaf", "parent", "role", "content", "m1", "settings", "stats", "toolCalls"]), inner
    ),
    max_leaves=12,
)  # fmt: skip
PAGE = Page("conversations.js")


@given(VALUES)
def test_whatever_is_stored_is_read_or_counted(value: object) -> None:
    PAGE.do("globalThis.storage = new MemoryStorage(); globalThis.store = new ConversationStore(storage);")
    PAGE.run('storage.setItem("quire.chat.a", JSON.stringify(value))', value=value)
    assert PAGE.run("store.list().length + store.numUnreadable") == 1
    for conversation in PAGE.run("store.list()"):
        assert PAGE.run("branch(it).length", it=conversation) >= 0


@pytest.mark.parametrize("value", ["", "{", "null", "[]", '"x"', '{"id": "a"}', '{"id": "a", "messages": [1]}'])
def test_a_corrupt_value_breaks_nothing_and_can_be_removed(page: Page, value: str) -> None:
    page.run('storage.setItem("quire.chat.bad", value)', value=value)
    page.run('storage.setItem("quire.settings", value)', value=value)
    page.do('store.save(talk("good", "hi"))')
    assert page.run("store.list().map((each) => each.id)") == ["good"]
    assert page.run("store.numUnreadable") == 1
    assert isinstance(page.run("store.settings"), dict)
    page.do("store.removeUnreadable()")
    assert page.run("[store.numUnreadable, store.list().length]") == [0, 1]


def test_a_cycle_of_messages_ends(page: Page) -> None:
    messages = {name: {"id": name, "parent": other, "role": "user", "content": name} for name, other in ("ab", "ba")}
    value: dict[str, Any] = {"id": "x", "messages": messages, "leaf": "a"}
    assert page.run("texts(readConversation(value))", value=value) == ["b", "a"]
    selected = "((it) => { select(it, it.messages.a); return it.leaf; })(readConversation(value))"
    assert page.run(selected, value=value) == "b"


def test_an_export_can_be_imported_elsewhere(page: Page) -> None:
    page.do('store.save(talk("a", "one", "1")); store.save(talk("b", "two"));')
    exported = page.run("store.exportText()")
    assert json.loads(exported)["format"] == "quire-conversations"
    page.do("globalThis.storage = new MemoryStorage(); globalThis.store = tab();")
    assert page.run("store.importText(text)", text=exported) == 2
    assert page.run('texts(store.load("a"))') == ["one", "1"]
    page.do(
        "globalThis.refused = (text) => { try { store.importText(text); } catch (error) { return error.message; } };"
    )
    assert "not JSON" in page.run("refused(text)", text="hello")
    assert "no conversations" in page.run("refused(text)", text='{"conversations": [{"id": 5}]}')
    page.do("""
    globalThis.storage = new MemoryStorage(); globalThis.store = tab();
    storage.setItem = function (key, value) { if (this.length) throw new Error("quota"); MemoryStorage.prototype.setItem.call(this, key, value); };
    """)
    assert "full: 1 of 2 conversations were imported" in page.run("refused(text)", text=exported)


def test_a_setting_is_kept_only_where_one_was_set(page: Page) -> None:
    assert page.run("store.settings") == {}
    page.do("store.settings = { temperature: 0 };")
    assert page.run("store.settings") == {"temperature": 0}

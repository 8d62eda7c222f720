"""The commands of `quire chat`, its files, and its markdown, without a model: one that repeats the question instead."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from quire.cli import chat_session
from quire.cli.chat import Chat, read_message
from quire.cli.chat_session import ChatSession
from quire.cli.printed_reply import (
    Conversation,
    MarkdownStream,
    PrintedReply,
    ReplyEnd,
    StopRequest,
    render_markdown,
    split_blocks,
)
from quire.core.errors import ConfigError


class Echo:
    """Answers in capitals, and keeps what it was asked."""

    def __init__(self) -> None:
        self.name = "echo"
        self.asked: list[list[str]] = []
        self.settings: Mapping[str, object] = {}

    def reply(
        self,
        prompt: str | Conversation,
        settings: Mapping[str, object],
        show: Callable[[str, bool], None],
        stop: StopRequest,
    ) -> ReplyEnd:
        assert not isinstance(prompt, str)
        self.asked.append([str(message["content"]) for message in prompt])
        self.settings = dict(settings)
        question = self.asked[-1][-1]
        show("hm, ", True)
        show("" if question == "silence" else question.upper(), False)
        return ReplyEnd("stop", 1)

    def names(self) -> Sequence[str]:
        return ("echo", "other")

    def choose(self, name: str) -> None:
        if name not in self.names():
            raise ConfigError(f"no {name}")
        self.name = name


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def chat(echo: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chat:
    monkeypatch.setattr(chat_session, "chats_folder", lambda: tmp_path / "chats")
    return Chat(echo, ChatSession("be brief", {"temperature": 0.5, "seed": None, "threads": 4}), markdown=False)


def test_the_conversation_is_remembered_until_cleared(
    chat: Chat, echo: Echo, capsys: pytest.CaptureFixture[str]
) -> None:
    for question in ("one", "silence", "two", "three"):
        chat.handle(question)
    start = ["be brief", "one", "ONE"]
    assert echo.asked[-1] == [*start, "two", "TWO", "three"], "without the empty reply"
    assert capsys.readouterr().err.count("(no answer: the model ended it at once; the question is forgotten)") == 1
    for line in ("/undo", "/undo", "four"):
        chat.handle(line)
    assert echo.asked[-1] == [*start, "four"]
    for line in ("/clear", "five"):
        chat.handle(line)
    assert echo.asked[-1] == ["be brief", "five"]
    for line in ("/system", "six"):
        chat.handle(line)
    assert echo.asked[-1] == ["six"]


def test_a_message_may_begin_with_a_slash(chat: Chat, echo: Echo, capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("/etc/hosts is a file", "/clear\nis what I typed", "/clera"):
        chat.handle(line)
    assert echo.asked[-1][1::2] == ["/etc/hosts is a file", "/clear\nis what I typed"]
    assert "There is no /clera" in capsys.readouterr().err


def test_settings_are_changed_checked_and_reset(chat: Chat, echo: Echo, capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("/set temperature 1.5", "/set top-k=40", "/set stop END", "hi"):
        chat.handle(line)
    assert echo.settings == {"temperature": 1.5, "top_k": 40, "stop": ["END"]}
    capsys.readouterr()
    for line in ("/set temperature 9", "/set temprature 1", "/set volume 11", "/set top_k many", "/set temperature"):
        chat.handle(line)
    said = capsys.readouterr().err.splitlines()
    assert "from 0 to 2" in said[0] and "Did you mean temperature?" in said[1] and "There are max_tokens" in said[2]
    assert "top_k" in said[3] and said[4] == "top_k 40 · stop ['END']" and len(said) == 5
    chat.handle("again")
    assert echo.settings == {"top_k": 40, "stop": ["END"]}


def test_a_saved_chat_is_continued(chat: Chat, echo: Echo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        "/save",
        "one",
        "/save first",
        "two",
        "/save",
        "/clear",
        "/set temperature 0",
        "/save second",
        "/load",
    ):
        chat.handle(line)
    said = capsys.readouterr().err
    assert "Say under which name: /save NAME." in said and "first, second" in said
    assert (tmp_path / "chats" / "first.json").stat().st_mode & 0o777 == 0o600
    other = Chat(Echo(), ChatSession(None, {}), markdown=False)
    other.handle("/save first")
    assert "exists: /load first continues it" in capsys.readouterr().err
    chat.handle("/load first")
    chat.handle("/model other")
    chat.handle("three")
    assert echo.asked[-1] == ["be brief", "one", "ONE", "two", "TWO", "three"]
    assert (echo.settings, echo.name) == ({"temperature": 0.5}, "other")
    assert "Loaded: 2 questions." in (said := capsys.readouterr().err) and "other answers; others: echo." in said
    chat.handle(f"/save {tmp_path}/")
    assert f"is a folder; name a file in it, such as {tmp_path}/chat.json." in capsys.readouterr().err.replace("\n", "")
    chat.handle(f"/save {tmp_path}/mine.json")
    assert json.loads((tmp_path / "mine.json").read_text())["model"] == "other"


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "There is no "),
        ("{", "is not a saved chat: it is not JSON."),
        ("[]", "is not a saved chat."),
        ('{"quire_chat": 1}', "is not a saved chat."),
        ('{"quire_chat": 1, "model": "m", "system": null, "settings": {}, "messages": [{"role": "x"}]}', "saved chat."),
        ('{"quire_chat": 1, "model": "m", "system": null, "settings": {"top_p": 7}, "messages": []}', "wrong settings"),
        ("[" * 100_000, "is not a saved chat"),
    ],
)
def test_another_file_is_refused_in_a_sentence(
    chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    chat.handle(f"/load {path}")
    chat.handle("/load ?")
    refused = capsys.readouterr().err.splitlines()
    assert said in refused[0] and refused[1].startswith("A saved chat needs a name") and len(refused) == 2


def test_lines_between_quotes_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(['"""one', "two\\", 'three""" ', "a\\", "b"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert [read_message(), read_message()] == ["one\ntwo\\\nthree", "a\nb"]


def test_the_speed_is_of_the_tokens_after_the_first() -> None:
    assert PrintedReply("", ReplyEnd("stop", 11), 3.0, 1.0).speed == "11 tokens · 5.0 tok/s · first token 1000 ms"
    assert PrintedReply("", ReplyEnd("stop", 0), 3.0, None).speed == "0 tokens"


ANSWER = """\
# Title

Some\x1b]0;title\x07 *text* with `code`, a [link](http://x.y) and <b>markup</b>.

1. one

   ```python
   x = 1

   y = 2
   ```

2. two

| a | b |
|---|---|
| 1 | 2 |

<div>kept</div>

~~~
fenced

still fenced
~~~
end"""


def shown(text: str, size: int) -> str:
    """What remains on a terminal of a reply in pieces of this size."""
    console = Console(width=60, force_terminal=False)
    with console.capture() as capture:
        stream = MarkdownStream(console)
        for start in range(0, len(text), size):
            stream.show(text[start : start + size])
        stream.close()
    return capture.get()


def test_markdown_is_the_same_however_it_is_cut() -> None:
    whole = shown(ANSWER, len(ANSWER))
    assert all(shown(ANSWER, size) == whole for size in (1, 7, 50))
    assert "Title" in whole and "# Title" not in whole and "|---" not in whole
    assert "http://x.y" in whole and "<b>markup</b>" in whole and "<div>kept</div>" in whole
    assert "\x1b]" not in whole and "\x07" not in whole and "still fenced" in whole
    assert whole.index(" 1 one") < whole.index("y = 2") < whole.index(" 2 two")


@given(st.text(alphabet="ab #`~\n-1.", max_size=60))
def test_blocks_are_the_text(text: str) -> None:
    *complete, _ = blocks = split_blocks(text)
    assert "".join(blocks) == text
    assert all(block.endswith("\n") for block in complete)
    render_markdown(text)

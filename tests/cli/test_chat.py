"""`quire chat` in a real terminal: one conversation through every command."""

import io
import os
import re
from collections.abc import Iterator

import pexpect
import pytest

from tests import children
from tests.cli.commands import PROMPT, QUIRE, SMALL, Shell


@pytest.fixture(scope="module")
def terminal(default_model_path: object) -> Iterator["pexpect.spawn[str]"]:
    chat = pexpect.spawn(
        QUIRE,
        ["chat", "--temperature", "0", *SMALL],
        encoding="utf-8",
        timeout=120,
        dimensions=(40, 100),
        env={**os.environ, "TERM": "xterm"},
        preexec_fn=children.prepare,
    )
    try:
        chat.expect("Type a message")
        chat.expect("› ")
        yield chat
    finally:
        chat.close(force=True)


def ask(terminal: "pexpect.spawn[str]", line: str) -> str:
    """The output between a line and the next prompt."""
    terminal.sendline(line)
    terminal.expect_exact(PROMPT)
    return str(terminal.before).partition("\r\n")[2]


def test_help_lists_the_commands(terminal: "pexpect.spawn[str]") -> None:
    shown = ask(terminal, "/help")
    assert all(command in shown for command in ("/help", "/system", "/clear", "/undo", "/quit"))


def test_an_unknown_command_is_not_sent_to_the_model(terminal: "pexpect.spawn[str]") -> None:
    assert "There is no /nope; /help lists what there is." in ask(terminal, "/nope")


def test_control_c_at_the_prompt_does_not_leave(terminal: "pexpect.spawn[str]") -> None:
    terminal.sendcontrol("c")
    terminal.expect("Ctrl-D or /quit leaves")
    terminal.expect_exact(PROMPT)


def test_control_c_stops_the_reply_and_not_the_program(terminal: "pexpect.spawn[str]") -> None:
    terminal.sendline("Write a very long story about a dragon and a castle.")
    terminal.expect("castle\\.\r\n")
    terminal.expect(r"\w+\W+\w+")  # the reply has begun
    terminal.sendcontrol("c")
    terminal.expect_exact("(stopped)")
    assert "^C" not in str(terminal.before), "it would begin a line, and the one above would stay"
    terminal.expect_exact(PROMPT)
    assert "Paris" in ask(terminal, "What is the capital of France? Answer in one word.")


def test_an_overflow_is_refused_and_the_chat_goes_on(terminal: "pexpect.spawn[str]") -> None:
    ask(terminal, "/clear")
    refused = ask(terminal, "word " * 600)
    assert "maximum context length is 512 tokens" in refused
    assert "/clear or /undo makes room" in refused
    assert "Paris" in ask(terminal, "What is the capital of France? Answer in one word.")


def test_a_line_may_continue_in_the_next(terminal: "pexpect.spawn[str]") -> None:
    terminal.sendline("What is the capital\\")
    terminal.expect_exact("… ")
    assert "Paris" in ask(terminal, "of France? Answer in one word.")


def test_pasted_lines_are_one_message(terminal: "pexpect.spawn[str]") -> None:
    terminal.send("\x1b[200~What is the capital\rof France?\rAnswer in one word.\x1b[201~")
    assert "Paris" in ask(terminal, "")


def test_the_speed_is_below_each_reply(terminal: "pexpect.spawn[str]") -> None:
    ask(terminal, "/set max_tokens 3")
    assert re.search(r"3 tokens · [\d.]+ tok/s · first token \d+ ms", ask(terminal, "Count to ten."))


def test_control_d_leaves(terminal: "pexpect.spawn[str]") -> None:
    terminal.sendeof()
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


@pytest.mark.usefixtures("shallow_default")
def test_quit_leaves(quire: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/help\n/quit\nthis is never sent\n"))
    result = quire("chat", *SMALL)
    assert (result.status, result.out) == (0, "")
    assert result.err.splitlines()[-1].startswith("Ctrl-C stops a reply.")
